"""Compact binary format of a rollout's tokens, which the page unpacks when the rollout is opened.

::

    zlib( uint32 length of header | header, JSON |
          for each row: token numbers, uint16 or (header "wide") uint32, [T]
                        flags, uint8 [T]: bits 0-1 provenance, bit 2 mask, bits 3-5 mask reason
                        log-probabilities, float16 [S], of the sampled tokens only )

All numbers are little-endian. Token numbers are indices into the page's vocabulary, not the tokenizer's ids. Versions and
requests are run-length encoded in the header: ``[[start, value], …]``.
"""

from __future__ import annotations

import json
import math
import struct
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import Provenance, Rollout, Row
from agentrl.obs.rollout_format import player_to_dict

_LEVEL = 6


class Vocabulary:
    """Numbers the token ids of a page from 0 in order of occurrence."""

    def __init__(self) -> None:
        self._numbers: dict[int, int] = {}

    @property
    def ids(self) -> list[int]:
        """The tokenizer's id of each number."""
        return list(self._numbers)

    def number(self, ids_T: NDArray[np.int32]) -> NDArray[np.uint32]:
        """Return the number of each id, ``[T]``."""
        unique, inverse_T = np.unique(ids_T, return_inverse=True)
        numbers = [self._numbers.setdefault(int(token), len(self._numbers)) for token in unique]
        return np.array(numbers, np.uint32)[inverse_T] if numbers else np.zeros(0, np.uint32)


def pack_rollout(rollout: Rollout, vocabulary: Vocabulary) -> bytes:
    """Return a rollout's tokens and the details that are shown when it is opened."""
    numbers = [vocabulary.number(row.token_ids) for row in rollout.rows]
    wide = any(number.size and int(number.max()) > 0xFFFF for number in numbers)
    header = json_bytes({"wide": wide, "rows": [_row_header(row) for row in rollout.rows], **_details(rollout)})
    buffers = [struct.pack("<I", len(header)), header]
    for row, number in zip(rollout.rows, numbers, strict=True):
        flags = row.provenance | row.mask << 2 | row.mask_reason << 3
        sampled = row.provenance == Provenance.SAMPLED
        buffers.append(number.astype("<u4" if wide else "<u2").tobytes())
        buffers.append(flags.astype(np.uint8).tobytes())
        with np.errstate(over="ignore"):  # values below float16's range become minus infinity
            buffers.append(row.logprobs[sampled].astype("<f2").tobytes())
    return zlib.compress(b"".join(buffers), _LEVEL)


def _row_header(row: Row) -> dict[str, Any]:
    return {
        "agent": row.key.agent_id,
        "row": row.key.row,
        "fork": row.fork and row.fork.value,
        "tokens": len(row.token_ids),
        "sampled": int((row.provenance == Provenance.SAMPLED).sum()),
        "versions": runs(row.versions),
        "requests": runs(row.requests),
        "request_ids": list(row.request_ids),
    }


def _details(rollout: Rollout) -> dict[str, Any]:
    """Return the details of a rollout; its texts only if it has no rows, because otherwise the tokens have them."""
    failure = rollout.failure
    with_text = not rollout.rows
    turns = [
        {"finish": turn.finish_reason.value, "reward": turn.reward}
        | ({"action": turn.action, "observation": turn.observation} if with_text else {})
        for turn in rollout.turns
    ]
    return {
        "prompt": rollout.prompt if with_text else None,
        "turns": turns,
        "metadata": rollout.metadata,
        "label": rollout.label,
        "player": player_to_dict(rollout) if rollout.episode else None,
        "failure": failure and {"kind": failure.kind.value, "error": failure.error, "message": failure.message},
        "filtered": rollout.filtered,
    }


def runs(values_T: NDArray[Any]) -> list[list[int]]:
    """Return ``[[start, value], …]`` of the runs of equal values."""
    if not len(values_T):
        return []
    starts = [0, *(np.flatnonzero(values_T[1:] != values_T[:-1]) + 1).tolist()]
    return [[start, int(values_T[start])] for start in starts]


def json_bytes(value: Any) -> bytes:
    """Return JSON that browsers can parse: NaN and infinities are null, lone surrogates question marks."""
    text = json.dumps(finite(value), ensure_ascii=False, allow_nan=False, separators=(",", ":"), default=str)
    return text.encode("utf-8", "replace")


def finite(value: Any) -> Any:
    """Return data with NaN and infinities replaced by None, at any depth."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {str(key): finite(item) for key, item in value.items()}
    return [finite(item) for item in value] if isinstance(value, list | tuple) else value
