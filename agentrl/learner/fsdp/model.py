"""A Hugging Face causal model for the learner: from packed tokens to log-probabilities, or values, at given positions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from agentrl.batch.microbatch import MicroBatch
from agentrl.learner.fsdp.attention import move, packed_rows, separated
from agentrl.models.load import value_head


class PackedModel(nn.Module):
    """Wraps the model so that one ``forward``, and with it one set of FSDP hooks, covers body and head.

    The head is applied only at the given positions, in chunks of ``logits_chunk`` positions.
    """

    def __init__(self, model: Any, logits_chunk: int) -> None:
        super().__init__()
        self.hf = model
        self.logits_chunk = logits_chunk
        self.autocast = False
        """Whether matrix products are computed in bfloat16."""
        self.separates_rows = False
        """Compute every row in a bin of its own: layers of the model that are not attention would mix packed rows."""

    def forward(
        self, micro: MicroBatch, at_N: torch.Tensor, temperature: float, entropy_gradient: bool = False
    ) -> tuple[torch.Tensor, ...]:
        """Score the tokens at ``at_N`` given the tokens before them in their rows.

        Args:
            micro: token ids, positions and rows, on the CPU.
            at_N: int64, positions of the tokens to score, never the first of a row.
            temperature: logits are divided by it.
            entropy_gradient: whether entropies have a gradient too.

        Returns:
            what `_score` returns, float32 ``[N]`` each.

        """
        device = self.hf.device
        token_ids_L, position_ids_L, row_L = micro.token_ids_L, micro.position_ids_L, micro.row_L
        targets_N = token_ids_L[at_N].to(device)
        token_ids_R_L, position_ids_R_L, row_R_L = token_ids_L[None], position_ids_L[None], row_L[None]
        if self.separates_rows:
            token_ids_R_L, position_ids_R_L, row_R_L, at_N = separated(token_ids_L, position_ids_L, row_L, at_N)
        packed = move(packed_rows(position_ids_R_L, row_R_L), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.hf.base_model(
                input_ids=token_ids_R_L.to(device),
                position_ids=position_ids_R_L.to(device),
                use_cache=False,
                packed=packed,
            ).last_hidden_state
            hidden_N_H = hidden.flatten(0, 1).index_select(0, at_N.to(device) - 1)
            if len(targets_N) <= self.logits_chunk:
                return self._score(hidden_N_H, targets_N, temperature, entropy_gradient)
            chunks = zip(
                torch.split(hidden_N_H, self.logits_chunk), torch.split(targets_N, self.logits_chunk), strict=True
            )
            options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
            parts = [
                checkpoint(self._score, hidden, targets, temperature, entropy_gradient, **options)
                for hidden, targets in chunks
            ]
            return tuple(torch.cat(part) for part in zip(*parts, strict=True))

    @property
    def head(self) -> nn.Module:
        """What is applied to hidden states."""
        raise NotImplementedError

    def _score(
        self, hidden_N_H: torch.Tensor, targets_N: torch.Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return the scores of tokens from the hidden states before them."""
        raise NotImplementedError


class PolicyModel(PackedModel):
    """With a language head: the scores are log-probabilities, and entropies (nats) of their distributions."""

    @property
    def head(self) -> nn.Module:
        """From hidden states to logits."""
        head: nn.Module = self.hf.get_output_embeddings()
        return head

    def _score(
        self, hidden_N_H: torch.Tensor, targets_N: torch.Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies; the softmax is computed in at least float32."""
        logits_N_V = self._logits(hidden_N_H)
        log_N_V = torch.log_softmax(logits_N_V / temperature, -1)
        with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
            entropy_N = -(log_N_V.exp() * log_N_V).sum(-1)
        return -F.nll_loss(log_N_V, targets_N, reduction="none"), entropy_N

    def _logits(self, hidden_N_H: torch.Tensor) -> torch.Tensor:
        """Return logits in at least float32.

        Under autocast the factors are rounded, but not the logits: these are about 20 in size, where adjacent bfloat16
        values differ by an eighth, so that log-probabilities would be off by several hundredths.
        """
        head: Any = self.head
        device = hidden_N_H.device.type
        if not torch.is_autocast_enabled(device):
            logits_N_V: torch.Tensor = head(hidden_N_H)
            return logits_N_V.to(torch.promote_types(logits_N_V.dtype, torch.float32))
        dtype = torch.get_autocast_dtype(device)
        with torch.autocast(device, enabled=False):
            bias = head.bias.float() if head.bias is not None else None
            return F.linear(hidden_N_H.to(dtype).float(), head.weight.to(dtype).float(), bias)


class ValueModel(PackedModel):
    """With a value head: the score is the value of the state in which the token was sampled."""

    @property
    def head(self) -> nn.Linear:
        """From hidden states to values."""
        return value_head(self.hf)

    def _score(
        self, hidden_N_H: torch.Tensor, targets_N: torch.Tensor, temperature: float, entropy_gradient: bool
    ) -> tuple[torch.Tensor, ...]:
        """Return values, computed in at least float32."""
        head, dtype = self.head, torch.promote_types(hidden_N_H.dtype, torch.float32)
        with torch.autocast(hidden_N_H.device.type, enabled=False):
            bias = None if head.bias is None else head.bias.to(dtype)
            return (F.linear(hidden_N_H.to(dtype), head.weight.to(dtype), bias).sum(-1),)
