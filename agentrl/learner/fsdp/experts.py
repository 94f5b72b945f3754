"""Experts of models of transformers: grouped products, expert parallelism, and routing replay.

With expert parallelism each rank of a group has some of a layer's experts. Pairs of a token and an expert are sent to the rank
that has the expert, and its outputs come back. The host waits once a layer for the sizes of the exchange.

Legend: ``T`` tokens, ``K`` experts of a token, ``S`` pairs of token and expert, ``R`` pairs that this rank computes,
``E`` experts, ``P`` ranks of a group, ``H`` hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.metadata import version
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from agentrl.config.learner import EXPERT_PARALLEL
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.learner.layers import decoder_layers
from agentrl.learner.routing_replay import replay_experts
from agentrl.models.routing import KEY, REPLAYED, chooses_outside_router

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GROUP = "expert_group"
"""Attribute of divided experts: the ranks that have them."""
_IMPLEMENTATION = "agentrl_grouped"
"""Name of the experts' implementation, for transformers."""


def use_grouped_products(hf: PreTrainedModel) -> None:
    """Have the experts of a model computed as grouped products, if it has experts that transformers can compute so."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if hf._can_set_experts_implementation():
        ALL_EXPERTS_FUNCTIONS.register(_IMPLEMENTATION, _forward)
        hf.set_experts_implementation(_IMPLEMENTATION)


def expert_modules(hf: nn.Module) -> list[nn.Module]:
    """Return the modules of a model that have all experts of a layer, each weight of them fused."""
    return [module for module in hf.modules() if hasattr(module, "is_transposed")]  # transformers sets it


def divide_experts(hf: PreTrainedModel, mesh: DeviceMesh) -> None:
    """Divide the experts of each layer of a model on `meta` among the ranks of a mesh of one dimension.

    Raises:
        ConfigError: the model has no fused experts, or the ranks do not divide them.
    """
    size, modules = mesh.size(), expert_modules(hf)
    kind = f"{type(hf).__name__} (model_type={hf.config.model_type!r})"
    if not modules:
        raise ConfigError(f"{EXPERT_PARALLEL}={size}: transformers fuses no experts of {kind}; set {EXPERT_PARALLEL}=1")
    if any("." in name for experts in modules for name, _ in experts.named_parameters()):
        raise ConfigError(
            f"{EXPERT_PARALLEL}={size}: experts of {kind} share weights, such as a norm; set {EXPERT_PARALLEL}=1"
        )
    for experts in modules:
        for name, weight in list(experts.named_parameters(recurse=False)):
            if len(weight) % size:
                raise ConfigError(
                    f"{EXPERT_PARALLEL}={size} does not divide the {len(weight)} experts of {kind}; set "
                    f"{EXPERT_PARALLEL} to a divisor"
                )
            shard = torch.empty(len(weight) // size, *weight.shape[1:], dtype=weight.dtype, device="meta")
            divided = DTensor.from_local(
                shard, mesh, (Shard(0),), run_check=False, shape=weight.shape, stride=weight.stride()
            )
            setattr(experts, name, nn.Parameter(divided, weight.requires_grad))
        setattr(experts, _GROUP, mesh.get_group())


class _LocalExperts:
    """The experts of this rank, their weights in a dtype: autocast casts those of linears, not those of grouped products."""

    def __init__(self, experts: nn.Module, dtype: torch.dtype | None) -> None:
        self._experts: Any = experts
        self._dtype = dtype

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._experts, name)
        if isinstance(value, DTensor):
            value = value.to_local()
        return value.to(self._dtype) if isinstance(value, torch.Tensor) and self._dtype is not None else value

    @property
    def num_experts(self) -> int:
        group = getattr(self._experts, _GROUP, None)
        return int(self._experts.num_experts) // (1 if group is None else group.size())


def _forward(experts: Any, hidden: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Compute a layer's experts. Float32 products would be a loop over experts, with a wait of the host in each layer."""
    from transformers.integrations.moe import grouped_mm_experts_forward

    dtype = None
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.bfloat16
        hidden = hidden.to(dtype)
    local: Any = _LocalExperts(experts, dtype)
    if hasattr(experts, _GROUP) or experts.has_bias:
        return _compute_pairs(local, hidden, index, weights, getattr(experts, _GROUP, None))
    if dtype is None:
        local = experts
    result: torch.Tensor = grouped_mm_experts_forward(local, hidden, index, weights)
    return result


def _compute_pairs(
    experts: _LocalExperts,
    hidden_T_H: torch.Tensor,
    index_T_K: torch.Tensor,
    weights_T_K: torch.Tensor,
    group: dist.ProcessGroup | None,
) -> torch.Tensor:
    """Compute a layer's experts, of which each rank of a group has some. Collective."""
    expert_S, order_S = index_T_K.flatten().sort(stable=True)
    rows_S_H = hidden_T_H[order_S // index_T_K.shape[1]]
    if group is None:
        rows_S_H = _compute_rows(experts, rows_S_H, expert_S)
    else:
        rows_S_H = _compute_elsewhere(experts, rows_S_H, expert_S, group)
    rows_T_K_H = rows_S_H[order_S.argsort()].view(*index_T_K.shape, -1)
    result: torch.Tensor = (rows_T_K_H * weights_T_K[..., None]).sum(1)
    return result.to(hidden_T_H.dtype)


def _compute_elsewhere(
    experts: _LocalExperts, rows_S_H: torch.Tensor, expert_S: torch.Tensor, group: dist.ProcessGroup
) -> torch.Tensor:
    """Have the ranks of a group compute rows in the order of their experts. Collective."""
    ranks, local = group.size(), experts.num_experts
    counts_E = _count(expert_S, ranks * local)
    received_E = torch.empty_like(counts_E)
    dist.all_to_all_single(received_E, counts_E, group=group)
    sent, received = torch.stack([counts_E, received_E]).view(2, ranks, local).sum(-1).tolist()
    rows_R_H = _exchange(rows_S_H, received, sent, group)
    expert_R = torch.arange(local, device=expert_S.device).repeat(ranks)
    expert_R = expert_R.repeat_interleave(received_E, output_size=len(rows_R_H))
    expert_R, order_R = expert_R.sort(stable=True)
    rows_R_H = _compute_rows(experts, rows_R_H[order_R], expert_R)[order_R.argsort()]
    return _exchange(rows_R_H, sent, received, group)


def _compute_rows(experts: _LocalExperts, rows_R_H: torch.Tensor, expert_R: torch.Tensor) -> torch.Tensor:
    """Compute rows in the order of their experts.

    transformers adds biases in place: products that were kept for the backward pass would have them twice.
    """
    from transformers.integrations.moe import _grouped_linear

    if not len(rows_R_H):  # grouped products want a row
        return _compute_rows(experts, F.pad(rows_R_H, (0, 0, 0, 1)), F.pad(expert_R, (0, 1)))[:0]
    offsets = _count(expert_R, experts.num_experts).cumsum(0, dtype=torch.int32)

    def product(inputs: torch.Tensor, name: str) -> torch.Tensor:
        output: torch.Tensor = _grouped_linear(
            inputs, getattr(experts, name), offsets, is_transposed=experts.is_transposed
        )
        return output + getattr(experts, f"{name}_bias")[expert_R] if experts.has_bias else output

    if experts.has_gate:
        inner = experts._apply_gate(product(rows_R_H, "gate_up_proj"))
    else:
        inner = experts.act_fn(product(rows_R_H, "up_proj"))
    output = product(inner, "down_proj")
    return experts.post_expert_norm(output) if getattr(experts, "has_post_expert_norm", False) else output


def _count(expert_S: torch.Tensor, experts: int) -> torch.Tensor:
    """Return the number of pairs of each expert, ``[E]``, without a wait of the host."""
    return torch.zeros(experts, dtype=torch.int64, device=expert_S.device).scatter_add_(
        0, expert_S, torch.ones_like(expert_S)
    )


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup
    ) -> torch.Tensor:
        ctx.sizes, ctx.group = (sent, received), group
        output = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        sent, received = ctx.sizes
        return _exchange(gradient, sent, received, ctx.group), None, None, None


def _exchange(rows: torch.Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> torch.Tensor:
    """Send so many rows to each rank, in their order, and return those that the ranks sent. Collective."""
    output: torch.Tensor = _Exchange.apply(rows, received, sent, group)  # type: ignore[no-untyped-call]
    return output


def accept_replayed_experts(hf: PreTrainedModel) -> None:
    """Have layers with experts take the argument ``replayed_experts``, ``[T, K]``. Call before layers are compiled."""
    if hf.config.model_type in REPLAYED:
        for layer in decoder_layers(hf):
            if hasattr(layer.mlp, "experts"):
                layer.forward = MethodType(_forward_layer, layer)


def pass_experts_by_layer(hf: PreTrainedModel) -> None:
    """Pass each layer its experts from ``[layers, T, K]``. Call after layers are compiled, which they are once for all."""
    if hf.config.model_type in REPLAYED:
        for number, layer in enumerate(decoder_layers(hf)):
            layer.forward = partial(_run_layer, layer.forward, number, hasattr(layer.mlp, "experts"))


def _run_layer(
    run: Callable[..., Any],
    number: int,
    has_experts: bool,
    *args: Any,
    replayed_experts: torch.Tensor | None = None,
    **options: Any,
) -> Any:
    if replayed_experts is not None and has_experts:
        options["replayed_experts"] = replayed_experts[number]
    return run(*args, **options)


def _forward_layer(
    layer: Any, hidden: torch.Tensor, *args: Any, replayed_experts: torch.Tensor | None = None, **options: Any
) -> Any:
    """Compute a decoder layer, whose order of operations all `REPLAYED` models have."""
    if replayed_experts is None:
        return type(layer).forward(layer, hidden, *args, **options)
    attended, _ = layer.self_attn(layer.input_layernorm(hidden), *args, **options)
    hidden = hidden + attended
    return hidden + _mixture(layer.mlp, layer.post_attention_layernorm(hidden), replayed_experts)


def _mixture(mixture: Any, hidden: torch.Tensor, experts_T_K: torch.Tensor) -> torch.Tensor:
    """Compute a mixture of experts with given experts.

    Raises:
        LearnerError: this release of transformers does not choose experts in the router.
    """
    if chooses_outside_router(mixture):
        raise LearnerError(
            f"{KEY}=true: routers of {type(mixture).__name__} in this release of transformers ({version('transformers')}) do not "
            f"choose the experts; install a newer one, or set {KEY}=false"
        )
    flat = hidden.flatten(0, -2)
    index, weights = _route(mixture.gate, flat, experts_T_K)
    result: torch.Tensor = mixture.experts(flat, index, weights).view_as(hidden)
    return result + mixture.shared_experts(hidden) if hasattr(mixture, "shared_experts") else result


def _route(router: Any, hidden: torch.Tensor, experts_T_K: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return experts ``[T, K]``, and weights that the router's scores give them."""
    logits, weights, chosen = router(hidden)
    index = replay_experts(experts_T_K, chosen, logits)
    return index, _weights(router, logits.float(), index).to(weights.dtype)


def _weights(router: Any, logits: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """Return the weights ``[T, K]`` of experts, as the router computes those of its choice."""
    if not hasattr(router, "e_score_correction_bias"):
        # A softmax of the chosen logits is one of all, normalised. Improbable experts would have a sum near 0.
        return logits.gather(1, index).softmax(-1) if router.norm_topk_prob else logits.softmax(-1).gather(1, index)
    chosen = logits.sigmoid().gather(1, index)
    if router.norm_topk_prob:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    weights: torch.Tensor = chosen * router.routed_scaling_factor
    return weights
