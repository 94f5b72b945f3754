"""A Hugging Face causal model for the learner: from packed tokens to log-probabilities, or values, at given positions."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.checkpoint import checkpoint

from agentrl.batch.microbatch import MicroBatch
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ModelError
from agentrl.learner.device import uses_bfloat16
from agentrl.learner.fsdp.attention import IMPLEMENTATION, move, packed_rows, separated
from agentrl.models.load import load_model, load_value_model, value_head

_log = logging.getLogger(__name__)
_MIXED = 1e-5
"""Relative change of a row's hidden states, when another row changes, that is not rounding."""
_PROBE_T, _OTHER_T = torch.arange(1, 8), torch.arange(6, 0, -1)
"""Token ids of the rows that probe a model."""


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
            at_N: int64, flat positions of the tokens to score, never the first of a row.
            temperature: logits are divided by it.
            entropy_gradient: whether entropies have a gradient too.

        Returns:
            what `_score` returns, float32 ``[N]`` each.

        """
        device = self.hf.device
        token_ids_R_L, position_ids_R_L, row_R_L = micro.token_ids_R_L, micro.position_ids_R_L, micro.row_R_L
        if self.separates_rows:
            token_ids_R_L, position_ids_R_L, row_R_L, at_N = separated(token_ids_R_L, position_ids_R_L, row_R_L, at_N)
        token_ids_R_L, at_N = token_ids_R_L.to(device), at_N.to(device)
        packed = move(packed_rows(position_ids_R_L, row_R_L), device)
        with torch.autocast(device.type, torch.bfloat16, enabled=self.autocast):
            hidden = self.hf.base_model(
                input_ids=token_ids_R_L,
                position_ids=position_ids_R_L.to(device),
                use_cache=False,
                packed=packed,
            ).last_hidden_state
            hidden_N_H = hidden.flatten(0, 1).index_select(0, at_N - 1)
            targets_N = token_ids_R_L.flatten().index_select(0, at_N)
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


def load_policy(folder: Path, config: LearnerConfig, key: str = "model.path") -> PolicyModel:
    """Load ``folder`` in float32 on the CPU, with packed attention, and check that packed rows have the model's own logits.

    If layers of the model mix packed rows, such as convolutions, Mamba or linear attention, every row gets a bin of its own.

    Args:
        folder: a Hugging Face model folder.
        config: of the learner.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: the folder cannot be loaded, or the architecture does more than a head on hidden states.

    """
    policy = PolicyModel(load_model(folder, torch.float32, IMPLEMENTATION, key=key), config.logits_chunk)
    _prepare(policy, config)
    _check_logits(policy, folder, key)  # in float32
    policy.autocast = uses_bfloat16(config)
    return policy


def load_critic(folder: Path, config: LearnerConfig, key: str = "algo.critic.path") -> ValueModel:
    """Load ``folder`` as a critic: as `load_policy`, with a value head, which is one of zeros if the folder has none.

    Raises:
        ModelError: the folder cannot be loaded, or transformers has no such head for the architecture.

    """
    critic = ValueModel(load_value_model(folder, torch.float32, IMPLEMENTATION, key=key), config.logits_chunk)
    _prepare(critic, config)
    critic.autocast = uses_bfloat16(config)
    return critic


def _prepare(model: PackedModel, config: LearnerConfig) -> None:
    """Set a loaded model up for training, and separate rows if it mixes packed ones."""
    model.hf.train()
    _disable_dropout(model.hf)
    if config.gradient_checkpointing:
        # transformers renames this method between versions 5 and 6.
        name = "activation" if hasattr(model.hf, "activation_checkpointing_enable") else "gradient"
        getattr(model.hf, f"{name}_checkpointing_enable")({"use_reentrant": False})
    _probe_rows(model)


def load_frozen(folder: Path, config: LearnerConfig, device: torch.device, mesh: DeviceMesh, key: str) -> PolicyModel:
    """Load ``folder`` as a frozen model that only scores tokens, sharded over ``mesh``; see `load_policy`."""
    frozen: PolicyModel = load_policy(folder, config, key).to(device)
    frozen.eval()
    frozen.requires_grad_(False)
    shard(frozen, mesh, config)
    return frozen


def _disable_dropout(model: nn.Module) -> None:
    """Set all dropout rates to 0: an engine samples without dropout, so the learner's log-probabilities are without it too."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name, value in vars(module).items():
            if isinstance(value, float) and ("dropout" in name or name.endswith("drop")):
                setattr(module, name, 0.0)


@torch.no_grad()
def _probe_rows(model: PackedModel) -> None:
    """Separate rows if the model mixes packed ones."""
    first, second = _packed_pair(_PROBE_T, _OTHER_T), _packed_pair(_PROBE_T + 1, _OTHER_T)
    hidden = [_hidden(model.hf, micro)[:, len(_PROBE_T) :] for micro in (first, second)]
    model.separates_rows = bool((hidden[0] - hidden[1]).norm() > _MIXED * hidden[0].norm())
    if model.separates_rows:
        _log.warning(
            "%s mixes packed rows: the learner computes one row a bin, with more padding", type(model.hf).__name__
        )


@torch.no_grad()
def _check_logits(policy: PolicyModel, folder: Path, key: str) -> None:
    """Compare log-probabilities of packed rows with the model's own.

    Raises:
        ModelError: they differ: the architecture scales or caps logits after the head.
    """
    packed = _packed_pair(_PROBE_T, _OTHER_T)
    expected_N = torch.cat([_logprobs_alone(policy.hf, tokens_T) for tokens_T in (_PROBE_T, _OTHER_T)])
    found_N, _ = policy(packed, packed.position_ids_R_L[0].nonzero()[:, 0], 1.0)
    if not torch.allclose(found_N, expected_N, atol=1e-4, rtol=1e-4):
        raise ModelError(
            f"{key}={folder}: {type(policy.hf).__name__} changes logits after its head, which the fsdp learner lacks; "
            "choose another"
        )


def _packed_pair(row_T: torch.Tensor, other_T: torch.Tensor) -> MicroBatch:
    """Return a micro-batch of two rows in one bin."""
    rows = (row_T, other_T)
    positions = torch.cat([torch.arange(len(tokens_T)) for tokens_T in rows])[None]
    row_R_L = torch.cat([torch.full_like(tokens_T, number) for number, tokens_T in enumerate(rows)])[None]
    zeros = torch.zeros_like(positions)
    return MicroBatch(torch.cat(rows)[None], positions, row_R_L, zeros, zeros, zeros, zeros, zeros, zeros, zeros, ())


def _hidden(hf: Any, micro: MicroBatch) -> torch.Tensor:
    """Return the last hidden states of packed rows, ``[R, L, H]``."""
    packed, positions = packed_rows(micro.position_ids_R_L, micro.row_R_L), micro.position_ids_R_L
    states = hf.base_model(input_ids=micro.token_ids_R_L, position_ids=positions, use_cache=False, packed=packed)
    hidden: torch.Tensor = states.last_hidden_state
    return hidden


def _logprobs_alone(hf: Any, token_ids_T: torch.Tensor) -> torch.Tensor:
    """Return the model's own log-probabilities ``[T - 1]`` of a row after its first token."""
    positions = torch.arange(len(token_ids_T))[None]
    packed = packed_rows(positions, torch.zeros_like(positions))
    logits_T_V: torch.Tensor = hf(
        input_ids=token_ids_T[None], position_ids=positions, use_cache=False, packed=packed
    ).logits[0, :-1]
    return logits_T_V.float().log_softmax(-1).gather(-1, token_ids_T[1:, None])[:, 0]


def shard(model: PackedModel, mesh: DeviceMesh, config: LearnerConfig) -> FSDPModule:
    """Shard the parameters over ``mesh``: one unit per decoder layer, and one for the rest. Gradients are summed over ranks.

    Returns:
        ``model`` itself, with the FSDP methods that ``fully_shard`` adds.

    """
    blocks = set(getattr(model.hf, "_no_split_modules", None) or ())
    layers = [module for module in model.modules() if type(module).__name__ in blocks]
    assert layers, f"{type(model.hf).__name__} names no decoder layer in _no_split_modules"
    for layer in layers:
        fully_shard(layer, mesh=mesh, reshard_after_forward=config.reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=False)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # The loss is a plain sum with the denominator in the weights: averaging over ranks would scale it down.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo lacks the scaled sum that is used otherwise
    assert isinstance(model, FSDPModule)
    return model
