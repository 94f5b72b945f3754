"""The sampling support of tokens: which token ids top-k and top-p left when each of them was sampled.

A token that no engine sampled, or whose support was not recorded, has none: its count is 0.

Three tokens, of which the first was observed, and the others were sampled from two ids and from one::

    counts       0 2 1
    token_ids    7 3 | 5
    logprobs     -0.2 -1.7 | 0.0
"""

from __future__ import annotations

import base64
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

TokenIds = NDArray[np.int32] | NDArray[np.int64]
_SIZES = struct.Struct("<II?")
"""Tokens, kept ids, and whether there are log-probabilities."""
_LEVEL = 1
"""Compression level of zlib, as of records of rollouts."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSupport:
    """The ids that ``T`` tokens were sampled from, ``E`` in all."""

    counts: NDArray[np.int32]
    """``[T]`` ids of each token; 0: not known, the whole vocabulary."""
    token_ids: NDArray[np.int32]
    """``[E]`` the ids, token by token; those of a token are all different."""
    logprobs: NDArray[np.float32] | None = None
    """``[E]`` log-probabilities with which the engine sampled: those of a token's ids sum up to 1 as probabilities."""

    def __len__(self) -> int:
        """Return the number of tokens."""
        return len(self.counts)

    @property
    def offsets(self) -> NDArray[np.int64]:
        """``[T + 1]`` where the ids of each token begin, and where the last ones end."""
        offsets = np.zeros(len(self.counts) + 1, np.int64)
        np.cumsum(self.counts, out=offsets[1:])
        return offsets

    def slice(self, start: int, stop: int) -> SamplingSupport:
        """Return the support of the tokens from ``start`` to ``stop``."""
        first, last = (int(self.counts[:end].sum()) for end in (start, stop))
        logprobs = None if self.logprobs is None else self.logprobs[first:last]
        return SamplingSupport(self.counts[start:stop], self.token_ids[first:last], logprobs)

    def select(self, places_N: NDArray[np.int64]) -> SamplingSupport:
        """Return the support of the tokens at some places, in their order."""
        counts = self.counts[places_N]
        starts = self.offsets[:-1][places_N]
        ends = np.cumsum(counts, dtype=np.int64)
        index = np.arange(int(ends[-1]) if len(ends) else 0) + np.repeat(starts - (ends - counts), counts)
        return SamplingSupport(counts, self.token_ids[index], None if self.logprobs is None else self.logprobs[index])

    def contains(self, token_ids_T: TokenIds) -> NDArray[np.bool_]:
        """Return ``[T]`` whether each token is among its ids; False without any."""
        is_token = self.token_ids == np.repeat(token_ids_T, self.counts)
        is_contained = np.zeros(len(self.counts), np.bool_)
        is_contained[np.repeat(np.arange(len(self.counts)), self.counts)[is_token]] = True
        return is_contained

    @property
    def has_repeated_ids(self) -> bool:
        """Whether an id is there twice for one token."""
        keys = np.repeat(np.arange(len(self.counts), dtype=np.int64), self.counts) << 32 | self.token_ids
        return len(np.unique(keys)) < len(keys)

    def sampled_logprobs(self, token_ids_T: TokenIds) -> NDArray[np.float32]:
        """Return ``[T]`` the log-probability of each token, which must be among its ids."""
        assert self.logprobs is not None, "the support was recorded without log-probabilities"
        is_token = self.token_ids == np.repeat(token_ids_T, self.counts)
        logprobs_T: NDArray[np.float32] = self.logprobs[is_token]
        return logprobs_T


def concatenate_supports(supports: Sequence[SamplingSupport | None], sizes: Sequence[int]) -> SamplingSupport | None:
    """Return the support of tokens that follow each other, of so many tokens each; None if none is known.

    It has log-probabilities if all that is known has them.
    """
    if all(support is None for support in supports):
        return None
    filled = [
        SamplingSupport(np.zeros(size, np.int32), np.zeros(0, np.int32)) if support is None else support
        for support, size in zip(supports, sizes, strict=True)
    ]
    logprobs = [support.logprobs for support in filled if len(support.token_ids)]
    has_logprobs = all(values is not None for values in logprobs)
    return SamplingSupport(
        np.concatenate([support.counts for support in filled]),
        np.concatenate([support.token_ids for support in filled]),
        np.concatenate([np.zeros(0, np.float32), *(values for values in logprobs if values is not None)])
        if has_logprobs
        else None,
    )


def encode_support(support: SamplingSupport | None) -> str | None:
    """Return a support as compressed text, for JSON.

    As in records of rollouts, first come the lowest bytes of all values, then the second ones: ids are alike in these.
    """
    if support is None:
        return None
    arrays: list[tuple[NDArray[Any], str]] = [(support.counts, "<i4"), (support.token_ids, "<i4")]
    if support.logprobs is not None:
        arrays.append((support.logprobs, "<f4"))
    sizes = _SIZES.pack(len(support.counts), len(support.token_ids), support.logprobs is not None)
    planes = (np.ascontiguousarray(array, dtype).view(np.uint8).reshape(-1, 4).T.tobytes() for array, dtype in arrays)
    return base64.b64encode(zlib.compress(b"".join((sizes, *planes)), _LEVEL)).decode("ascii")


def decode_support(text: str | None) -> SamplingSupport | None:
    """Return the support that `encode_support` wrote.

    Raises:
        ValueError: the text is damaged.
    """
    if text is None:
        return None
    try:
        content = zlib.decompress(base64.b64decode(text, validate=True))
        tokens, ids, has_logprobs = _SIZES.unpack_from(content)
    except (zlib.error, struct.error) as error:
        raise ValueError(f"a sampling support is damaged: {error}") from error
    dtypes = [(tokens, "<i4"), (ids, "<i4"), *([(ids, "<f4")] if has_logprobs else [])]
    if len(content) != _SIZES.size + sum(4 * size for size, _ in dtypes):
        raise ValueError(f"a sampling support of {tokens} tokens and {ids} ids has {len(content)} bytes")
    start, arrays = _SIZES.size, list[NDArray[Any]]()
    for size, dtype in dtypes:
        planes = np.frombuffer(content, np.uint8, 4 * size, start).reshape(4, size)
        arrays.append(planes.T.copy(order="C").view(dtype).reshape(size))
        start += 4 * size
    counts, token_ids, *logprobs = arrays
    if int(counts.sum()) != ids or (tokens and int(counts.min()) < 0):
        raise ValueError(f"a sampling support has {ids} ids, and counts of {counts.sum()}")
    return SamplingSupport(counts, token_ids, logprobs[0] if logprobs else None)
