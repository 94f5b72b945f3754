"""Mixtures of experts: the router, the exchange of pairs of tokens and experts, and a rank's experts as grouped products.

Recorded experts get weights from the router's own scores. They come with the packed tokens to each layer and, in place of its
padding mask, to its router: recomputation in the backward pass gets the same experts.

Megatron-Core's own grouped experts need Transformer Engine or the package grouped_gemm. Its dispatcher has the host wait several
times in every layer, and adds up the experts of a token in bfloat16. Here the host waits for the sizes of an exchange only:
never without expert and expert tensor parallelism.

Legend: ``T`` tokens, ``K`` experts of a token, ``S`` pairs of token and expert, ``R`` pairs that this rank computes,
``E`` experts, ``H`` hidden size, ``I`` and ``O`` sizes before and after a product, ``P`` and ``Q`` ranks of expert and of
expert tensor parallelism.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.fusions.fused_bias_swiglu import weighted_bias_swiglu_impl
from megatron.core.tensor_parallel.mappings import (
    all_to_all,
    gather_from_sequence_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler, get_default_pg_collection, z_loss_func
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from agentrl.learner.megatron.layers import PackedTokens
from agentrl.learner.routing_replay import replay_experts


class PairDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Exchanges pairs by all-to-all. Replaces Megatron-Core's ``MoEAlltoAllTokenDispatcher``.

    Args:
        config: of Megatron-Core.
        local: indices of this rank's experts.
    """

    def __init__(self, config: Any, local: list[int]) -> None:
        super().__init__(config, get_default_pg_collection())
        self._local = slice(local[0], local[-1] + 1)
        self._is_single_rank = self.ep_size == self.tp_size == 1

    def dispatch_preprocess(
        self, hidden: torch.Tensor, chosen_T_E: torch.Tensor, probs_T_E: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return hidden states and weights of the pairs, in the order of their experts."""
        self._shape = hidden.shape
        hidden_T_H, (tokens, experts) = hidden.view(-1, self._shape[-1]), chosen_T_E.shape
        counts_E = chosen_T_E.sum(0)
        if self._is_single_rank:
            self._counts = counts_E
        else:
            self._exchange_counts(counts_E)
        pairs = torch.nonzero_static(chosen_T_E.t(), size=tokens * self.config.moe_router_topk)
        expert_S, token_S = pairs.unbind(1)
        self._token_S = token_S
        self._place_T_K = token_S.argsort(stable=True).view(tokens, -1)
        weights_S = probs_T_E.flatten().index_select(0, token_S * experts + expert_S)
        return _spread(hidden_T_H, token_S, self._place_T_K), weights_S

    def _exchange_counts(self, counts_E: torch.Tensor) -> None:
        """Exchange how many pairs every rank has for this rank's experts, and start to copy the sizes to the host."""
        all_counts = counts_E.new_empty(self.ep_size * self.tp_size * len(counts_E))
        dist.all_gather_into_tensor(all_counts, counts_E, group=self.tp_ep_group)
        local_counts_Q_P_E = all_counts.view(self.ep_size, self.tp_size, -1)[..., self._local].transpose(0, 1)
        self._counts_Q_P_E = local_counts_Q_P_E
        self._counts = local_counts_Q_P_E.sum((0, 1))
        sent = counts_E.view(self.ep_size, -1).sum(1)
        self._sizes = _HostCopy(torch.cat([sent, local_counts_Q_P_E.sum(2).flatten()]))

    def token_dispatch(self, rows_S_H: torch.Tensor, weights_S: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Exchange the pairs between ranks of expert parallelism."""
        if self._is_single_rank:
            return rows_S_H, weights_S
        sizes = self._sizes.read()
        self._sent, received = sizes[: self.ep_size], sizes[self.ep_size :]
        by_rank = [received[start : start + self.ep_size] for start in range(0, len(received), self.ep_size)]
        self._received = by_rank[self.tp_rank]
        self._gathered = [sum(counts) for counts in by_rank]
        return (
            all_to_all(self.ep_group, rows_S_H, self._received, self._sent),
            all_to_all(self.ep_group, weights_S, self._received, self._sent),
        )

    def dispatch_postprocess(
        self, rows: torch.Tensor, weights: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the hidden states of the pairs that this rank computes, how many each expert has, and their weights."""
        if self._is_single_rank:
            return rows, self._counts, weights
        if self.tp_size > 1:
            options = {"group": self.tp_group, "output_split_sizes": self._gathered}
            rows = gather_from_sequence_parallel_region(rows, **options)
            weights = gather_from_sequence_parallel_region(weights, **options)
        counts = self._counts_Q_P_E.flatten()
        experts = torch.arange(self._counts_Q_P_E.shape[-1], device=rows.device)
        experts = experts.repeat(self.ep_size * self.tp_size)
        expert_R = experts.repeat_interleave(counts, output_size=len(rows))
        self._order_R = expert_R.argsort(stable=True)
        self._inverse_R = self._order_R.argsort()
        rows_R_H = _spread(rows, self._order_R, self._inverse_R[:, None])
        return rows_R_H, self._counts, weights.index_select(0, self._order_R)

    def combine_preprocess(self, rows_R_H: torch.Tensor) -> torch.Tensor:
        """Return the experts' outputs in the order in which the pairs arrived, added up over tensor-parallel ranks."""
        if self._is_single_rank:
            return rows_R_H
        rows = _spread(rows_R_H, self._inverse_R, self._order_R[:, None])
        if self.tp_size > 1:
            options = {"group": self.tp_group, "input_split_sizes": self._gathered}
            rows = reduce_scatter_to_sequence_parallel_region(rows.float(), **options).to(rows.dtype)
        return rows

    def token_combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the pairs to the ranks of their tokens."""
        if not self._is_single_rank:
            rows = all_to_all(self.ep_group, rows, self._sent, self._received)
        return rows

    def combine_postprocess(self, rows_S_H: torch.Tensor) -> torch.Tensor:
        """Add up the experts of each token."""
        return _add_up(rows_S_H, self._token_S, self._place_T_K).view(self._shape)


def _spread(rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
    apply: Any = _Spread.apply
    spread: torch.Tensor = apply(rows, token_S, place_T_K)
    return spread


def _add_up(rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
    apply: Any = _Collect.apply
    sums: torch.Tensor = apply(rows, token_S, place_T_K)
    return sums


class _Spread(torch.autograd.Function):
    """Rows ``[T, H]`` at ``token_S``; the backward pass adds up the gradients at ``place_T_K``."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_S, place_T_K)
        return rows.index_select(0, token_S)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _collect(gradient, ctx.saved_tensors[1]), None, None


class _Collect(torch.autograd.Function):
    """The sums of rows ``[S, H]`` at ``place_T_K``: the reverse of `_Spread`."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, token_S: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(token_S)
        return _collect(rows, place_T_K)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return gradient.index_select(0, ctx.saved_tensors[0]), None, None


def _collect(rows: torch.Tensor, place_T_K: torch.Tensor) -> torch.Tensor:
    """Add up rows, in float32, in an order that does not change from run to run."""
    gathered = rows.index_select(0, place_T_K.flatten())
    return gathered if place_T_K.shape[1] == 1 else gathered.view(*place_T_K.shape, -1).sum(1)


class _HostCopy:
    """An asynchronous copy of integers to the host."""

    def __init__(self, numbers: torch.Tensor) -> None:
        self._host = numbers
        self._event: Any = None
        if numbers.device.type == "cuda":
            self._host = torch.empty_like(numbers, device="cpu", pin_memory=True).copy_(numbers, non_blocking=True)
            event: Any = torch.cuda.Event
            self._event = event()
            self._event.record()

    def read(self) -> list[int]:
        """Wait for the copy, and return the numbers."""
        if self._event is not None:
            self._event.synchronize()
        numbers: list[int] = self._host.tolist()
        return numbers


_Choice = tuple[torch.Tensor, torch.Tensor]
"""Scores and numbers ``[T, K]`` of experts."""


class RoutedLayer(TransformerLayer):  # type: ignore[misc]
    """A decoder layer with experts."""

    def forward(self, *args: Any, packed_seq_params: PackedTokens, **options: Any) -> Any:
        """Compute the layer with the recorded experts of this layer."""
        experts = packed_seq_params.experts
        options["padding_mask"] = None if experts is None else experts[self.layer_number - 1]
        self.mlp.router.tokens = packed_seq_params
        return super().forward(*args, packed_seq_params=packed_seq_params, **options)


class RoutedMixture(MoELayer):  # type: ignore[misc]
    """A mixture of experts whose router can use recorded experts."""

    def forward(self, hidden: torch.Tensor, intermediate: None = None, padding_mask: torch.Tensor | None = None) -> Any:
        """Compute the mixture; ``padding_mask`` has the recorded experts ``[T, K]``."""
        self.router.router_replay.experts = padding_mask
        return super().forward(hidden, intermediate)


class Router(TopKRouter):  # type: ignore[misc]
    """A router whose losses, of balance and of large logits, have the weight of the micro-batch in the optimizer step.

    Padding has no part in them.

    Megatron-Core multiplies them by the number of tokens, and divides the gradient of all losses by it. agentrl's own loss has
    its denominators in the weights of tokens, and its gradient is not divided.
    """

    tokens: PackedTokens

    def routing(self, logits: torch.Tensor, padding_mask: None = None) -> Any:
        """Return probabilities and map of the experts; ``padding_mask`` has taken the recorded experts to the mixture."""
        has_losses = self.training and torch.is_grad_enabled() and self.is_aux_loss_enabled()
        return super().routing(logits, self.tokens.padding if has_losses else None)

    def attach_and_log_load_balancing_loss(
        self, activation: torch.Tensor, coefficient: float, loss: torch.Tensor, *args: object, **options: object
    ) -> torch.Tensor:
        """Add the gradient of a loss of balance in the backward pass of the activation."""
        weighted: torch.Tensor = MoEAuxLossAutoScaler.apply(activation, loss * self.tokens.loss_weight)
        return weighted

    def apply_z_loss(self, logits: torch.Tensor, padding_mask: None = None) -> torch.Tensor:
        """Add the gradient of the loss of large logits in their backward pass; its mean is over the tokens of all ranks."""
        if self.config.moe_z_loss_coeff is None or not (self.training and torch.is_grad_enabled()):
            return logits
        coefficient = self.config.moe_z_loss_coeff * self.tokens.router_share
        loss = z_loss_func(logits, coefficient, self.tokens.padding)
        weighted: torch.Tensor = MoEAuxLossAutoScaler.apply(logits, loss * self.tokens.loss_weight)
        return weighted


def prepare_routing(mixture: MoELayer) -> None:
    """Have a mixture routed as this module says. Called after construction: Megatron-Core refuses other classes."""
    mixture.__class__ = RoutedMixture
    mixture.router.__class__ = Router
    mixture.router.router_replay = _ReplayedExperts()


class _ReplayedExperts:
    """The recorded experts of a router. Replaces Megatron-Core's ``RouterReplay``."""

    def __init__(self) -> None:
        self.experts: torch.Tensor | None = None

    def get_replay_topk(
        self,
        scores_T_E: torch.Tensor,
        topk: int,
        groups: int | None,
        group_topk: int | None,
        choose: Callable[..., _Choice],
    ) -> _Choice:
        """Return scores and numbers of the recorded experts; for tokens without them, those that the router chooses."""
        scores, chosen = choose(scores_T_E, topk, groups, group_topk)
        if self.experts is None:
            return scores, chosen
        index = replay_experts(self.experts, chosen, scores_T_E)
        return scores_T_E.gather(1, index), index


class GroupedLinear(nn.Module):
    """The weights of a rank's experts, stacked, and the product of each row with its expert's.

    Args:
        config: of Megatron-Core.
        shape: ``[E, O, I]`` on this rank.
    """

    def __init__(self, config: Any, *shape: int) -> None:
        super().__init__()
        device = torch.cuda.current_device()
        self.weight = nn.Parameter(torch.empty(shape, dtype=config.params_dtype, device=device))

    def forward(self, rows_S_I: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
        """Return ``[S, O]``, from rows in the order of their experts and the int32 end of each expert's rows."""
        if not len(rows_S_I):
            return rows_S_I @ self.weight[0].t()  # has gradients, of zeros
        return F.grouped_mm(rows_S_I, self.weight.transpose(-2, -1), offs=ends_E)


class BiasedGroupedLinear(nn.Module):
    """The weights and biases of a rank's experts, stacked, inputs before outputs as in gpt-oss.

    Args:
        config: of Megatron-Core.
        shape: ``[E, I, O]`` on this rank.
    """

    def __init__(self, config: Any, *shape: int) -> None:
        super().__init__()
        options: dict[str, Any] = {"dtype": config.params_dtype, "device": torch.cuda.current_device()}
        self.weight = nn.Parameter(torch.empty(shape, **options))
        self.bias = nn.Parameter(torch.empty(shape[0], shape[2], **options))

    def forward(self, rows_S_I: torch.Tensor, ends_E: torch.Tensor, expert_S: torch.Tensor) -> torch.Tensor:
        """Return ``[S, O]``, from rows in the order of their experts, the int32 end of each expert's rows, and their experts."""
        bias_S_O = F.embedding(expert_S, self.bias)
        if not len(rows_S_I):
            return rows_S_I @ self.weight[0] + bias_S_O  # has gradients, of zeros
        return F.grouped_mm(rows_S_I, self.weight, offs=ends_E) + bias_S_O


class BiasedExperts(MegatronModule):  # type: ignore[misc]
    """The experts of gpt-oss on a rank: biases, limits of the gated products, gate and up projection in alternate columns.

    Ranks divide the experts, and no expert (`Layout.check`).
    """

    def __init__(self, count: int, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        self._expert, self._data = pg_collection.ep, pg_collection.expt_dp
        hidden, middle = config.hidden_size, config.moe_ffn_hidden_size
        self.linear_fc1 = BiasedGroupedLinear(config, count, hidden, 2 * middle)
        self.linear_fc2 = BiasedGroupedLinear(config, count, middle, hidden)
        for weight in self.parameters():
            weight.allreduce = False  # see `GroupedExperts`

    def forward(
        self, rows_S_H: torch.Tensor, counts_E: torch.Tensor, weights_S: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the experts; see `GroupedExperts.forward`."""
        counts_E = counts_E.to(rows_S_H.device)
        ends_E = counts_E.cumsum(0, dtype=torch.int32)
        expert_S = torch.arange(len(counts_E), device=rows_S_H.device)
        expert_S = expert_S.repeat_interleave(counts_E, output_size=len(rows_S_H))
        gate_up = self.linear_fc1(rows_S_H, ends_E, expert_S)
        limit = self.config.activation_func_clamp_value
        gate, up = gate_up[..., ::2].clamp(max=limit), gate_up[..., 1::2].clamp(-limit, limit)
        middle = (up + self.config.glu_linear_offset) * self.config.activation_func(gate)
        output = self.linear_fc2(middle, ends_E, expert_S)
        return (output * weights_S[:, None]).to(output.dtype), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weights for distributed checkpoints, divided among ranks of expert parallelism."""
        first = len(sharded_offsets)
        offsets = (*sharded_offsets, (first, self._expert.rank(), self._expert.size()))
        return {
            f"{prefix}{name}": ShardedTensor.from_rank_offsets(
                f"{prefix}experts.{name}",
                weight,
                *offsets,
                replica_id=(0, 0, self._data.rank()),
                prepend_axis_num=first,
            )
            for name, weight in self.named_parameters()
        }

    def backward_dw(self) -> None:
        """Do nothing: the backward pass computes the weights' gradients."""


class GroupedExperts(MegatronModule):  # type: ignore[misc]
    """The gated MLPs of a rank's experts. Replaces Megatron-Core's ``SequentialMLP``."""

    def __init__(self, count: int, config: Any, pg_collection: Any) -> None:
        super().__init__(config=config)
        self._expert, self._tensor, self._data = pg_collection.ep, pg_collection.expt_tp, pg_collection.expt_dp
        hidden, middle = config.hidden_size, config.moe_ffn_hidden_size // self._tensor.size()
        self.linear_fc1 = GroupedLinear(config, count, 2 * middle, hidden)
        self.linear_fc2 = GroupedLinear(config, count, hidden, middle)
        for weight in self.parameters():
            # Their gradients are added up over the data-parallel ranks of experts, and they have a separate optimizer
            # in every layout: checkpoints of all layouts have the same names.
            weight.allreduce = False

    def forward(
        self, rows_S_H: torch.Tensor, counts_E: torch.Tensor, weights_S: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Compute the experts.

        Args:
            rows_S_H: hidden states of the pairs, in the order of their experts.
            counts_E: pairs of each expert.
            weights_S: of the pairs, from the router.
        """
        ends_E = counts_E.to(rows_S_H.device).cumsum(0, dtype=torch.int32)
        gate_up = self.linear_fc1(rows_S_H, ends_E)
        if self.config.bias_activation_fusion:
            middle = weighted_bias_swiglu_impl(gate_up, None, weights_S[:, None])
        else:
            gate, up = gate_up.chunk(2, dim=-1)
            middle = (F.silu(gate) * up * weights_S[:, None]).to(gate_up.dtype)
        return self.linear_fc2(middle, ends_E), None

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: Any = None
    ) -> dict[str, Any]:
        """Return the weights with the names and shapes that Megatron-Core's experts have in distributed checkpoints."""
        first = len(sharded_offsets)
        experts = (first, self._expert.rank(), self._expert.size())
        rank, size = self._tensor.rank(), self._tensor.size()
        replica = (0, 0, self._data.rank())

        def shard(key: str, tensor: torch.Tensor, axis: int, index: int, count: int) -> ShardedTensor:
            offsets = (*sharded_offsets, experts, (first + axis, index, count))
            return ShardedTensor.from_rank_offsets(key, tensor, *offsets, replica_id=replica, prepend_axis_num=first)

        def shard_gate_up(key: str, tensor: torch.Tensor, *args: Any) -> list[ShardedTensor]:
            # Ranks divide each of the two projections.
            gate, up = tensor.detach().chunk(2, dim=1)
            return [shard(key, gate, 1, rank, 2 * size), shard(key, up, 1, size + rank, 2 * size)]

        weight, key = self.linear_fc1.weight, f"{prefix}experts.linear_fc1.weight"
        fc1 = ShardedTensorFactory(key, weight, shard_gate_up, lambda tensors: torch.cat(tensors, dim=1), replica)
        fc2 = shard(f"{prefix}experts.linear_fc2.weight", self.linear_fc2.weight, 2, rank, size)
        return {f"{prefix}linear_fc1.weight": fc1, f"{prefix}linear_fc2.weight": fc2}

    def backward_dw(self) -> None:
        """Do nothing: the backward pass computes the weights' gradients."""
