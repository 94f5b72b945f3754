"""Context parallelism: ranks that compute a micro-batch together, each a part of its tokens (Ulysses, arXiv:2309.14509).

Embeddings, norms, matrix products and scores are computed for each token alone: every rank has those of its part. Before
attention an all-to-all gives each rank all tokens of a part of the heads. After it another one gives each rank all heads of
its part of the tokens.

Legend: ``P`` ranks, ``L`` tokens of a micro-batch, ``T`` tokens of a part, ``H`` heads, ``D`` head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from agentrl.learner.base import RowScores
from agentrl.learner.collectives import exchange, process_group


@dataclass(frozen=True, slots=True)
class Context:
    """The ranks that compute a micro-batch together."""

    group: str
    """Name of their process group, which compiled layers can take."""
    size: int
    """Number of ranks."""
    rank: int
    """Index of this rank in the group."""

    def token_slice(self, length: int) -> slice:
        """Return this rank's part of a sequence; ``size`` divides its length."""
        tokens = length // self.size
        return slice(self.rank * tokens, (self.rank + 1) * tokens)

    def has(self, places_N: torch.Tensor, length: int) -> torch.Tensor:
        """Return whether places of a sequence are in this rank's part, bools ``[N]``."""
        tokens = self.token_slice(length)
        inside_N: torch.Tensor = (places_N >= tokens.start) & (places_N < tokens.stop)
        return inside_N

    def sum_over_ranks(self, rows: RowScores) -> RowScores:
        """Return the sums over the ranks of their rows, on the first rank; none on the others. Collective."""
        if not rows:
            return {}
        flat = torch.from_numpy(np.concatenate([*rows.values()]))
        dist.all_reduce(flat, group=process_group(self.group))
        if self.rank > 0:
            return {}
        parts = torch.split(flat, [len(row) for row in rows.values()])
        return {key: row_scores.numpy() for key, row_scores in zip(rows, parts, strict=True)}

    def to_heads(self, *states: torch.Tensor) -> list[torch.Tensor]:
        """Return all tokens of this rank's heads, each ``[1, H/P, L, D]``, from all heads of its tokens. Collective.

        Args:
            states: each ``[1, H, T, D]``. If ``P`` does not divide the heads, as with few key heads, they are repeated.
        """
        received = exchange(torch.cat([self._by_heads(state) for state in states], -1), self.group).flatten(0, 1)
        sizes = [self._divisible_heads(state.shape[1]) // self.size * state.shape[3] for state in states]
        return [
            block.view(block.shape[0], -1, state.shape[3]).transpose(0, 1)[None].to(state.dtype)
            for block, state in zip(torch.split(received, sizes, -1), states, strict=True)
        ]

    def _by_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Return states ``[1, H, T, D]`` by the rank that gets the heads, ``[P, T, H/P·D]``."""
        _, heads, tokens, size = states.shape
        if self._divisible_heads(heads) > heads:
            states = states.repeat_interleave(self._divisible_heads(heads) // heads, 1)
        return states.reshape(self.size, -1, tokens, size).transpose(1, 2).flatten(2)

    def _divisible_heads(self, heads: int) -> int:
        """Return the least multiple of ``heads`` that the ranks can divide."""
        return math.lcm(heads, self.size)

    def to_tokens(self, attended: torch.Tensor) -> torch.Tensor:
        """Return all heads of this rank's tokens ``[1, T, H, D]`` from all tokens of its heads ``[1, L, H/P, D]``. Collective."""
        received: torch.Tensor = exchange(attended.reshape(self.size, -1, *attended.shape[2:]), self.group)
        return received.transpose(0, 1).flatten(1, 2)[None]


def join_context(size: int) -> Context | None:
    """Return the context of this rank, with ``size`` adjacent ranks; None for one. Collective over all ranks."""
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size)  # type: ignore[no-untyped-call]
    return Context(group.group_name, size, dist.get_rank(group))
