"""The weights of a rank's chunks by Hugging Face name: loading slice by slice, and gathering of whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from agentrl.core.errors import ModelError
from agentrl.distributed.base import TensorSpec, tensor_spec
from agentrl.distributed.flat_bucket import views
from agentrl.learner.export import BucketPlan, plan_buckets
from agentrl.learner.megatron.families.base import (
    EMBEDDING,
    HEAD,
    VALUE_HEAD,
    StackedWeight,
    Weight,
    WeightSlice,
    model_weights,
)
from agentrl.learner.megatron.model import MegatronModel, has_experts
from agentrl.models.weight_files import WeightFiles

_PART_BYTES = 256 << 20
"""Bytes of one collective, unless a weight is larger. It needs as much memory again."""

Pair = tuple[str, torch.Tensor]
"""Name of a weight, and the tensor that it is written into."""


@dataclass(frozen=True, slots=True)
class RankWeight:
    """A weight of Megatron-Core on this rank."""

    tensor: torch.Tensor
    slices: tuple[WeightSlice, ...]
    sends: bool
    """Whether this rank sends its slices when weights are gathered: of ranks with the same slices, one does."""


@dataclass(frozen=True, slots=True)
class GatherGroups:
    """Process groups in which weights are gathered: the ranks of a group together have each weight once."""

    layers: Any
    """For weights outside of experts: ranks of tensor and pipeline parallelism."""
    experts: Any
    """For weights of experts: ranks of expert tensor, expert and pipeline parallelism."""

    @classmethod
    def model_parallel(cls) -> GatherGroups:
        """Return Megatron-Core's groups, on the device on which it computes."""
        return cls(
            parallel_state.get_model_parallel_group(), parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        )


class ModelWeights:
    """The weights of a model by Hugging Face name."""

    def __init__(self, model: MegatronModel) -> None:
        self.model = model
        dtype = str(model.config.params_dtype).removeprefix("torch.")
        self._specs: dict[str, TensorSpec] = {}
        self.expert_names: set[str] = set()
        """Names of the weights of experts."""
        for weight, is_expert in _all_weights(model):
            for tensor in weight.tensors():
                self._specs[tensor.name] = TensorSpec(tensor.name, weight.dtype or dtype, tensor.shape)
                if is_expert:
                    self.expert_names.add(tensor.name)
        self.rank_weights = list(chain.from_iterable(_chunk_weights(model, chunk) for chunk in model.chunks))
        self._slices: dict[str, list[tuple[torch.Tensor, WeightSlice]]] = defaultdict(list)
        for weight_on_rank in self.rank_weights:
            for weight_slice in weight_on_rank.slices if weight_on_rank.sends else ():
                self._slices[weight_slice.tensor.name].append((weight_on_rank.tensor, weight_slice))

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and shapes of the whole model's weights; see `LearnerRank.specs`."""
        return list(self._specs.values())

    def names_on_rank(self) -> frozenset[str]:
        """Return the names of weights of which this rank sends slices when they are gathered."""
        return frozenset(self._slices)

    def to_write(self) -> Iterator[RankWeight]:
        """Iterate over the weights that this rank writes: of ranks with the same one, one does, and all write about as much."""
        replicas = {
            False: (
                parallel_state.get_data_parallel_rank(with_context_parallel=True),
                parallel_state.get_data_parallel_world_size(with_context_parallel=True),
            ),
            True: (
                parallel_state.get_expert_data_parallel_rank(),
                parallel_state.get_expert_data_parallel_world_size(),
            ),
        }
        # Experts have other replicas than the rest, so their sizes are added up for themselves.
        sizes = {is_expert: [0] * count for is_expert, (_, count) in replicas.items()}
        for weight in filter(lambda weight: weight.sends, self.rank_weights):
            is_expert = weight.slices[0].tensor.name in self.expert_names
            rank_sizes = sizes[is_expert]
            writer = rank_sizes.index(min(rank_sizes))
            rank_sizes[writer] += weight.tensor.nbytes
            if writer == replicas[is_expert][0]:
                yield weight

    def full_tensors(self) -> Iterator[Pair]:
        """Iterate over the weights of this rank, one tensor at a time. Only without tensor and expert parallelism."""
        for name, slices in self._slices.items():
            spec = self._specs[name]
            full_tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for tensor, weight_slice in slices:
                full_tensor[weight_slice.hf_slices].copy_(tensor.detach()[weight_slice.local_index])
            yield name, full_tensor

    @torch.no_grad()
    def gather(
        self,
        into: Sequence[Pair],
        groups: GatherGroups,
        readable: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> None:
        """Write whole weights, cast, into tensors. Collective: every rank of the groups calls it with the same names.

        Args:
            into: tensors on the device of the groups.
            groups: whose ranks have the weights.
            readable: returns a tensor of the model in readable memory on that device.
        """
        expert_pairs = [pair for pair in into if pair[0] in self.expert_names]
        layer_pairs = [pair for pair in into if pair[0] not in self.expert_names]
        for pairs, group in ((layer_pairs, groups.layers), (expert_pairs, groups.experts)):
            if dist.get_rank(group) < 0:
                continue
            if group.size() == 1:
                for name, out in pairs:
                    self._write(name, out, readable)
                continue
            outs = dict(pairs)
            for bucket_plan in plan_buckets([tensor_spec(*pair) for pair in pairs], _PART_BYTES):
                self._gather(bucket_plan, outs, group, readable)

    def _gather(
        self,
        bucket_plan: BucketPlan,
        outs: Mapping[str, torch.Tensor],
        group: Any,
        readable: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write this rank's slices into zeros, and add up the ranks' bytes: each byte is nonzero on one rank only."""
        flat = torch.zeros(bucket_plan.size, dtype=torch.uint8, device=outs[bucket_plan.specs[0].name].device)
        tensors = dict(views(bucket_plan.specs, flat))
        for name, full_tensor in tensors.items():
            self._write(name, full_tensor, readable)
        dist.all_reduce(flat, group=group)
        for name, full_tensor in tensors.items():
            outs[name].copy_(full_tensor)

    def _write(self, name: str, full_tensor: torch.Tensor, readable: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for tensor, weight_slice in self._slices.get(name, ()):
            full_tensor[weight_slice.hf_slices].copy_(readable(tensor)[weight_slice.local_index])


def _all_weights(model: MegatronModel) -> Iterator[tuple[Weight | StackedWeight, bool]]:
    """Iterate over the weights of the whole model, and whether each is of an expert."""
    if model.images is not None:
        yield from ((weight, False) for weight in model.images.weights())
    embedding, *norm_and_head = _rename_weights(model, model_weights(model.hf, values=model.values))
    yield embedding, False
    for layer in range(model.config.num_layers):
        yield from ((weight, False) for weight in _rename_weights(model, model.family.layer(model.hf, layer)))
        if has_experts(model.config, layer):
            if model.family.stacked is not None:
                yield from ((weight, True) for weight in model.family.stacked(model.hf, layer))
                continue
            assert model.family.expert is not None
            for expert in range(model.config.num_moe_experts):
                yield from ((weight, True) for weight in model.family.expert(model.hf, layer, expert))
    yield from ((weight, False) for weight in norm_and_head)


def _rename_weights(model: MegatronModel, weights: Iterable[Weight]) -> list[Weight]:
    """Return weights of the decoder with the names that they have in the model's folder."""
    return [*weights] if model.images is None else [model.images.rename(weight) for weight in weights]


def _chunk_weights(model: MegatronModel, chunk: Any) -> Iterator[RankWeight]:
    """Iterate over the weights of a chunk: all of its parameters and persistent buffers."""
    persistent = chunk.state_dict().keys()
    tensors = dict(chunk.named_parameters()) | {name: t for name, t in chunk.named_buffers() if name in persistent}
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()

    def take(weight: Weight, prefix: str = "") -> RankWeight:
        sends = weight.split is not None or rank == 0
        # Megatron-Core sets it only if it initializes weights. Norms of gradients count copies of a weight once by it.
        tensors[prefix + weight.name].tensor_model_parallel = weight.split is not None
        return RankWeight(tensors.pop(prefix + weight.name), tuple(weight.slices(rank, size)), sends)

    for weight in model.images.weights() if model.images is not None else ():
        if weight.name in tensors:
            yield take(weight)
    for weight in _rename_weights(model, model_weights(model.hf, values=model.values)):
        # Stages have the first ones, the last ones, or none of these. The weight of a tied head is that of the embedding.
        if weight.name in tensors:
            weight_on_rank = take(weight)
            is_copy = weight.name.startswith("output_layer") and model.head_is_tied
            yield replace(weight_on_rank, sends=weight_on_rank.sends and not is_copy)
    for index, layer in enumerate(chunk.decoder.layers):
        number, prefix = layer.layer_number - 1, f"decoder.layers.{index}."
        yield from (take(weight, prefix) for weight in _rename_weights(model, model.family.layer(model.hf, number)))
        if has_experts(model.config, number):
            yield from _expert_weights(model, number, f"{prefix}mlp.experts.", tensors)
    assert not tensors, f"no mapping has {', '.join(tensors)}"


def _expert_weights(
    model: MegatronModel, layer: int, prefix: str, tensors: dict[str, torch.Tensor]
) -> Iterator[RankWeight]:
    """Iterate over the stacked weights of this rank's experts."""
    count = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * count
    if model.family.stacked is not None:
        for stacked in model.family.stacked(model.hf, layer):
            yield _make_expert_weight(tensors.pop(prefix + stacked.name), [stacked.slice(first, count)])
        return
    assert model.family.expert is not None
    rank, size = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    experts = [model.family.expert(model.hf, layer, first + index) for index in range(count)]
    for weights in zip(*experts, strict=True):
        slices = (
            weight_slice.stacked_at(index)
            for index, weight in enumerate(weights)
            for weight_slice in weight.slices(rank, size)
        )
        yield _make_expert_weight(tensors.pop(prefix + weights[0].name), slices)


def _make_expert_weight(tensor: torch.Tensor, slices: Iterable[WeightSlice]) -> RankWeight:
    tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
    return RankWeight(tensor, tuple(slices), sends=True)


@torch.no_grad()
def load_weights(weights: ModelWeights, folder: Path, key: str = "model.path") -> None:
    """Read this rank's slices of the weights in a Hugging Face folder. Weights there that the model lacks are not read.

    A value head that the folder lacks stays one of zeros.

    Args:
        weights: of the model.
        folder: with safetensors files.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: a weight is missing, quantised, or has another shape; or a tied head has other weights than the embedding.
    """
    files = WeightFiles(folder, key)
    file_specs = {spec.name: spec for spec in files.specs()}
    initialized = () if file_specs.keys() & {*VALUE_HEAD} else VALUE_HEAD
    specs = [spec for spec in weights.specs() if spec.name not in initialized]
    mismatches = [text for spec in specs if (text := _describe_mismatch(file_specs.get(spec.name), spec))]
    if mismatches:
        raise ModelError(f"{key}={folder}: {len(mismatches)} weights cannot be read; {mismatches[0]}")
    head_is_copy = weights.model.head_is_tied and HEAD in file_specs
    images = weights.model.images
    embedding = EMBEDDING if images is None else images.text_name(EMBEDDING)
    for weight_on_rank in weights.rank_weights:
        for weight_slice in weight_on_rank.slices:
            name, slices = weight_slice.tensor.name, weight_slice.hf_slices
            if name in initialized:
                continue
            tensor = files.read(name, slices)
            if head_is_copy and name == embedding and not torch.equal(tensor, files.read(HEAD, slices)):
                raise ModelError(
                    f"{key}={folder}: {HEAD} differs from {embedding}, but config.json has tie_word_embeddings=true; set it to "
                    "false"
                )
            weight_on_rank.tensor[weight_slice.local_index].copy_(tensor)


def _describe_mismatch(spec: TensorSpec | None, expected: TensorSpec) -> str:
    """Return how a weight in the files differs from the expected one; empty if it does not."""
    if spec is None:
        return f"{expected.name} is missing"
    if spec.shape != expected.shape:
        return f"{expected.name} has the shape {list(spec.shape)}, not {list(expected.shape)}"
    return "" if spec.dtype in ("bfloat16", "float16", "float32") else f"{expected.name} is quantised ({spec.dtype})"
