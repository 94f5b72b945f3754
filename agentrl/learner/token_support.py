"""The sampling support of tokens in the language head: which logits a token's distribution has, and scores of all of them.

Legend: ``N`` tokens, ``n`` tokens of a chunk, ``E`` ids of all tokens, ``e`` those of a chunk, ``V`` vocabulary, or the part of
it that a rank has.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from agentrl.batch.microbatch import to_device
from agentrl.core.sampling_support import SamplingSupport

Coefficients = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""``(logprobs_E, sampler_logprobs_E) -> coefficients_E``: the learner's log-probabilities of ids and the engine's."""


@dataclass(frozen=True, slots=True)
class SupportChunk:
    """The support of the tokens of a chunk, as far as a rank has logits of it."""

    token_e: torch.Tensor
    """int64 token of each id, in the chunk."""
    column_e: torch.Tensor
    """int64 column of each id."""
    slice: slice
    """Where these ids are in ``E``."""
    is_unknown_n: torch.Tensor
    """bool: the token has no support."""
    is_here_e: torch.Tensor
    """bool: the rank has the id's logit; columns of others are arbitrary."""

    def keep(self, columns: int) -> torch.Tensor:
        """Return which logits ``[n, V]`` the tokens' distributions have: all, if the support is not known."""
        is_kept_n_V = self.is_unknown_n[:, None].repeat(1, columns)
        is_kept_n_V[self.token_e[self.is_here_e], self.column_e[self.is_here_e]] = True
        return is_kept_n_V

    def gather(self, logits_n_V: torch.Tensor) -> torch.Tensor:
        """Return the logit of each id, ``[e]``; an arbitrary one of those that the rank does not have."""
        return logits_n_V[self.token_e, self.column_e]


class TokenSupport:
    """The support of ``N`` tokens on a device."""

    def __init__(self, support: SamplingSupport, device: torch.device) -> None:
        self._offsets: NDArray[np.int64] = support.offsets
        counts_N = torch.from_numpy(support.counts.astype(np.int64))
        self.token_E = to_device(torch.repeat_interleave(counts_N), device)
        self.token_ids_E = to_device(torch.from_numpy(support.token_ids.astype(np.int64)), device)
        self.sampler_logprobs_E = (
            None if support.logprobs is None else to_device(torch.from_numpy(support.logprobs.copy()), device)
        )
        self._is_unknown_N = to_device(counts_N == 0, device)

    def chunk(self, first: int, last: int, first_id: int, columns: int) -> SupportChunk:
        """Return the support of the tokens from ``first`` to ``last``, for logits of the ids from ``first_id`` on."""
        ids = slice(int(self._offsets[first]), int(self._offsets[last]))
        column_e = self.token_ids_E[ids] - first_id
        is_here_e = (column_e >= 0) & (column_e < columns)
        column_e = column_e.clamp(0, columns - 1)
        return SupportChunk(self.token_E[ids] - first, column_e, ids, self._is_unknown_N[first:last], is_here_e)

    def centering(
        self,
        logits_E: torch.Tensor,
        is_here_E: torch.Tensor,
        normalizer_N: torch.Tensor,
        coefficients: Coefficients,
        group: dist.ProcessGroup | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return ``Σ c · log p`` over the ids of each token ``[N]``, the coefficients ``c`` ``[E]``, and their sums ``[N]``.

        Args:
            logits_E: of the ids, over the temperature.
            is_here_E: bool, ids whose logits are not arbitrary. Coefficients of others are 0.
            normalizer_N: logarithms of the denominators.
            coefficients: of the ids.
            group: the ranks that have the other logits.
        """
        assert self.sampler_logprobs_E is not None, "the sampling support has no log-probabilities"
        logprobs_E = logits_E - normalizer_N[self.token_E]
        coefficients_E = coefficients(logprobs_E, self.sampler_logprobs_E.to(logprobs_E.dtype)).masked_fill(
            ~is_here_E, 0
        )
        summands = torch.stack([coefficients_E * logprobs_E.masked_fill(~is_here_E, 0), coefficients_E])
        sums = summands.new_zeros(2, len(normalizer_N)).index_add(1, self.token_E, summands)
        if group is not None:
            dist.all_reduce(sums, group=group)
        return sums[0], coefficients_E, sums[1]
