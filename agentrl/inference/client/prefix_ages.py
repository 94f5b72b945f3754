"""The age of cached keys and values: which policy version computed the prefixes that an engine reuses."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from agentrl.core.types import Generation

BLOCK = 64
"""Tokens of a block, the unit in which ages are known."""
_MOST = 1 << 18
"""Blocks that are remembered, 16 million tokens: the earliest half of more is forgotten."""


class BlockUse(NamedTuple):
    """What the reply to a request reports about the blocks of its tokens."""

    prefixes: Sequence[int]
    """A hash of the tokens up to the end of each block."""
    cached: int
    """The first blocks, which were cached."""
    version: int
    """That the request began with."""
    computed: Sequence[int]
    """Versions that have computed the other blocks."""


def block_use(prompt: Sequence[int], generation: Generation) -> BlockUse | None:
    """Return what a reply reports about blocks; None: it ended before it ran."""
    if not generation.versions:
        return None
    prefixes, cached = [*_prefixes([*prompt, *generation.token_ids])], generation.cached_tokens // BLOCK
    # The keys and values of a block are complete when its last token has been computed.
    ends = (max((index + 1) * BLOCK - len(prompt), 1) for index in range(cached, len(prefixes)))
    computed = [[version for start, version in generation.versions if start < end][-1] for end in ends]
    return BlockUse(prefixes, cached, generation.versions[0][1], computed)


class PrefixAges:
    """Remembers for each prefix of whole blocks the version that computed its last block.

    An engine reports how many tokens of a prompt were cached, and not which weights computed them. It computed each block
    when a request with that prefix first had it uncached: in a prompt, or as output.
    """

    def __init__(self) -> None:
        self._versions: dict[int, int] = {}
        self._counts = (0, 0, 0, 0)

    def add(self, use: BlockUse | None) -> None:
        """Record a request: the age of its cached blocks, and the version of those that were computed."""
        if use is None:
            return
        tokens, stale, total, largest = self._counts
        for prefix in use.prefixes[: use.cached]:
            if (cached_version := self._versions.get(prefix)) is not None:
                age = max(0, use.version - cached_version)  # requests of other processes are added late
                tokens, stale, total = tokens + BLOCK, stale + BLOCK * (age > 0), total + BLOCK * age
                largest = max(largest, age)
        self._versions.update(zip(use.prefixes[use.cached :], use.computed, strict=True))
        self._counts = tokens, stale, total, largest
        if len(self._versions) > _MOST:
            for prefix in [*islice(self._versions, _MOST // 2)]:
                del self._versions[prefix]

    def take(self) -> tuple[int, int, int, int]:
        """Return what was counted since the last call.

        Returns:
            cached tokens of known age; those of an older version than samples; the sum of their ages in versions; the
            largest age.
        """
        counts, self._counts = self._counts, (0, 0, 0, 0)
        return counts


def age_metrics(ages: Sequence[PrefixAges]) -> dict[str, float]:
    """Return the metrics of the requests since the last call, or none if no cached token has a known age."""
    counts = [age_counts.take() for age_counts in ages]
    tokens, stale, total = (sum(age_counts[index] for age_counts in counts) for index in range(3))
    if not tokens:
        return {}
    return {
        "rollout/cache_stale": stale / tokens,
        "rollout/cache_age_mean": total / tokens,
        "rollout/cache_age_max": float(max(age_counts[3] for age_counts in counts)),
    }


def _prefixes(ids: Sequence[int]) -> Iterator[int]:
    """Yield a hash of the first block, of the first two, and so on."""
    prefix = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        prefix = hash((prefix, *ids[end - BLOCK : end]))
        yield prefix
