"""Loading of Hugging Face folders as models of the learner, and probes of what their architectures do."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from agentrl.batch.microbatch import MicroBatch
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ModelError
from agentrl.learner.device import compiles, recomputed, resolve_device, uses_bfloat16
from agentrl.learner.fsdp.attention import IMPLEMENTATION, packed_rows
from agentrl.learner.fsdp.layers import prepare_layers
from agentrl.learner.fsdp.model import PackedModel, PolicyModel, ValueModel
from agentrl.learner.fsdp.sharding import shard
from agentrl.models.load import load_model, load_value_model

_log = logging.getLogger(__name__)
_MIXED = 1e-5
"""Relative change of a row's hidden states, when another row changes, that is not rounding."""
_PROBE_T, _OTHER_T = torch.arange(1, 8), torch.arange(6, 0, -1)
"""Token ids of the rows that probe a model."""


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
    _set_up_computation(policy, config)
    return policy


def load_critic(folder: Path, config: LearnerConfig, key: str = "algo.critic.path") -> ValueModel:
    """Load ``folder`` as a critic: as `load_policy`, with a value head, which is one of zeros if the folder has none.

    Raises:
        ModelError: the folder cannot be loaded, or transformers has no such head for the architecture.

    """
    critic = ValueModel(load_value_model(folder, torch.float32, IMPLEMENTATION, key=key), config.logits_chunk)
    _prepare(critic, config)
    _set_up_computation(critic, config)
    return critic


def _prepare(model: PackedModel, config: LearnerConfig) -> None:
    """Set a loaded model up for training, and separate rows if it mixes packed ones."""
    model.hf.train()
    _disable_dropout(model.hf)
    _probe_rows(model)


def _set_up_computation(model: PackedModel, config: LearnerConfig) -> None:
    """Set precision, compilation and recomputation."""
    model.autocast, model.compiled = uses_bfloat16(config), compiles(config)
    prepare_layers(model.hf, config, compiled=model.compiled, recompute=recomputed(config))
    if resolve_device(config) == "cuda" and model.autocast:
        model.hf.get_input_embeddings().register_forward_hook(_as_bfloat16)


def _as_bfloat16(module: nn.Module, inputs: object, embeddings: torch.Tensor) -> torch.Tensor:
    """Have a single rank's layers hand on what those of several do, whose gathered weights are bfloat16."""
    return embeddings.to(torch.bfloat16) if torch.is_autocast_enabled(embeddings.device.type) else embeddings


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
    found_N, _ = policy(packed, packed.position_ids_L.nonzero()[:, 0], 1.0)
    if not torch.allclose(found_N, expected_N, atol=1e-4, rtol=1e-4):
        raise ModelError(
            f"{key}={folder}: {type(policy.hf).__name__} changes logits after its head, which the fsdp learner lacks; "
            "choose another"
        )


def _packed_pair(row_T: torch.Tensor, other_T: torch.Tensor) -> MicroBatch:
    """Return a micro-batch of two packed rows."""
    rows = (row_T, other_T)
    positions = torch.cat([torch.arange(len(tokens_T)) for tokens_T in rows])
    row_L = torch.cat([torch.full_like(tokens_T, number) for number, tokens_T in enumerate(rows)])
    zeros = torch.zeros_like(positions)
    return MicroBatch(torch.cat(rows), positions, row_L, zeros, zeros, zeros, zeros, zeros, zeros, zeros, ())


def _hidden(hf: Any, micro: MicroBatch) -> torch.Tensor:
    """Return the last hidden states of packed rows, ``[R, L, H]``."""
    packed, positions = (
        packed_rows(micro.position_ids_L[None], micro.row_L[None], hf.device),
        micro.position_ids_L[None],
    )
    states = hf.base_model(input_ids=micro.token_ids_L[None], position_ids=positions, use_cache=False, packed=packed)
    hidden: torch.Tensor = states.last_hidden_state
    return hidden


def _logprobs_alone(hf: Any, token_ids_T: torch.Tensor) -> torch.Tensor:
    """Return the model's own log-probabilities ``[T - 1]`` of a row after its first token."""
    positions = torch.arange(len(token_ids_T))[None]
    packed = packed_rows(positions, torch.zeros_like(positions), hf.device)
    logits_T_V: torch.Tensor = hf(
        input_ids=token_ids_T[None], position_ids=positions, use_cache=False, packed=packed
    ).logits[0, :-1]
    return logits_T_V.float().log_softmax(-1).gather(-1, token_ids_T[1:, None])[:, 0]
