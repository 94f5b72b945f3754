"""The weights of a rank's chunks by Hugging Face name: loading slice by slice, and gathering of whole tensors."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from agentrl.learner.export.bucket import Plan, plan_buckets
from agentrl.learner.megatron.families.base import EMBEDDING, HEAD, VALUE_HEAD, model_weights
from agentrl.learner.megatron.mapping import Part, Weight
from agentrl.learner.megatron.model import MegatronModel, has_experts
from agentrl.models.weight_files import WeightFiles

_PART_BYTES = 256 << 20
"""Weights of one collective, at least one; further memory as large is needed for it."""

Pair = tuple[str, torch.Tensor]
"""Name of a weight, and the tensor that it is written into."""


@dataclass(frozen=True, slots=True)
class Held:
    """A weight of this rank."""

    tensor: torch.Tensor
    parts: tuple[Part, ...]
    given: bool
    """Whether this rank gives its parts to the others: of ranks that have the same, one does."""


@dataclass(frozen=True, slots=True)
class GatherGroups:
    """The groups in which weights are gathered: together their ranks have each weight once."""

    layers: Any
    """For all but experts: ranks of tensor and pipeline parallelism."""
    experts: Any
    """For experts: ranks of expert tensor, expert and pipeline parallelism."""

    @classmethod
    def of_megatron(cls) -> GatherGroups:
        """Return the groups of Megatron-Core, of the device on which it computes."""
        return cls(
            parallel_state.get_model_parallel_group(), parallel_state.get_expert_tensor_model_pipeline_parallel_group()
        )

    @classmethod
    def with_rank_0(cls) -> GatherGroups:
        """Create the groups in which rank 0 gathers weights on CPUs, for a separate thread. Collective."""
        own = cls.of_megatron()
        ranks = [dist.get_process_group_ranks(group) for group in (own.layers, own.experts)]
        dist.broadcast_object_list(ranks, src=0)
        return cls(*(dist.new_group(each, backend="gloo") for each in ranks))


class ModelWeights:
    """The weights of a model by Hugging Face name.

    Args:
        model: this rank's part.

    """

    def __init__(self, model: MegatronModel) -> None:
        self.model = model
        dtype = str(model.config.params_dtype).removeprefix("torch.")
        self._specs: dict[str, TensorSpec] = {}
        self._of_experts: set[str] = set()
        for weight, of_expert in _all_weights(model):
            for tensor in weight.tensors():
                self._specs[tensor.name] = TensorSpec(tensor.name, weight.dtype or dtype, tensor.shape)
                if of_expert:
                    self._of_experts.add(tensor.name)
        self.held = list(chain.from_iterable(_held(model, chunk) for chunk in model.chunks))
        self._parts: dict[str, list[tuple[torch.Tensor, Part]]] = defaultdict(list)
        for held in self.held:
            for part in held.parts if held.given else ():
                self._parts[part.tensor.name].append((held.tensor, part))

    def specs(self) -> Sequence[TensorSpec]:
        """Return names, dtypes and shapes of the whole model's weights; see `LearnerRank.specs`."""
        return list(self._specs.values())

    def whole(self) -> Iterator[Pair]:
        """Iterate over the weights that this rank alone holds, without tensor or expert parallelism; one at a time is made."""
        for name, parts in self._parts.items():
            spec = self._specs[name]
            whole = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
            for tensor, part in parts:
                whole[part.there].copy_(tensor.detach()[part.here])
            yield name, whole

    @torch.no_grad()
    def gather(
        self,
        into: Sequence[Pair],
        groups: GatherGroups,
        present: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach,
    ) -> None:
        """Write whole weights, cast, into tensors. Collective: every rank of the groups calls it with the same names.

        Args:
            into: tensors on the device of the groups.
            groups: whose ranks have the weights.
            present: returns a tensor of the model in readable memory on that device.

        """
        of_experts = [pair for pair in into if pair[0] in self._of_experts]
        others = [pair for pair in into if pair[0] not in self._of_experts]
        for pairs, group in ((others, groups.layers), (of_experts, groups.experts)):
            if dist.get_rank(group) < 0:
                continue
            if group.size() == 1:
                for name, out in pairs:
                    self._write(name, out, present)
                continue
            outs = dict(pairs)
            for plan in plan_buckets([tensor_spec(*pair) for pair in pairs], _PART_BYTES):
                self._gather(plan, outs, group, present)

    def _gather(
        self,
        plan: Plan,
        outs: Mapping[str, torch.Tensor],
        group: Any,
        present: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Write what this rank has into zeros, and add up the ranks' bytes: each byte comes from one of them."""
        flat = torch.zeros(plan.size, dtype=torch.uint8, device=outs[plan.specs[0].name].device)
        found = dict(views(plan.specs, flat))
        for name, whole in found.items():
            self._write(name, whole, present)
        dist.all_reduce(flat, group=group)
        for name, whole in found.items():
            outs[name].copy_(whole)

    def _write(self, name: str, whole: torch.Tensor, present: Callable[[torch.Tensor], torch.Tensor]) -> None:
        for tensor, part in self._parts[name]:
            whole[part.there].copy_(present(tensor)[part.here])


def _all_weights(model: MegatronModel) -> Iterator[tuple[Weight, bool]]:
    """Iterate over the weights of the whole model, and whether each is of an expert."""
    embedding, *rest = model_weights(model.hf, values=model.values)
    yield embedding, False
    for layer in range(model.config.num_layers):
        yield from ((weight, False) for weight in model.family.layer(model.hf, layer))
        if has_experts(model.config, layer):
            assert model.family.expert is not None
            for expert in range(model.config.num_moe_experts):
                yield from ((weight, True) for weight in model.family.expert(model.hf, layer, expert))
    yield from ((weight, False) for weight in rest)


def _held(model: MegatronModel, chunk: Any) -> Iterator[Held]:
    """Iterate over the weights of a chunk. All of its parameters and persistent buffers are among them."""
    persistent = chunk.state_dict().keys()
    named = dict(chunk.named_parameters()) | {name: each for name, each in chunk.named_buffers() if name in persistent}
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_world_size()

    def take(weight: Weight, prefix: str = "") -> Held:
        given = weight.split is not None or rank == 0
        # Megatron-Core sets it with an initialization only. Norms of gradients leave copies of a weight out by it.
        named[prefix + weight.name].tensor_model_parallel = weight.split is not None
        return Held(named.pop(prefix + weight.name), tuple(weight.parts(rank, size)), given)

    for weight in model_weights(model.hf, values=model.values):
        # Stages have the first ones, the last ones, or none of these. A head that is tied has its weight from the embedding.
        if weight.name in named:
            held = take(weight)
            is_copy = weight.name.startswith("output_layer") and model.tied
            yield replace(held, given=held.given and not is_copy)
    for index, layer in enumerate(chunk.decoder.layers):
        number, prefix = layer.layer_number - 1, f"decoder.layers.{index}."
        yield from (take(weight, prefix) for weight in model.family.layer(model.hf, number))
        if has_experts(model.config, number):
            yield from _held_experts(model, number, f"{prefix}mlp.experts.", named)
    assert not named, f"no mapping has {', '.join(named)}"


def _held_experts(model: MegatronModel, layer: int, prefix: str, named: dict[str, torch.Tensor]) -> Iterator[Held]:
    """Iterate over the stacked weights of this rank's experts."""
    assert model.family.expert is not None
    rank, size = (
        parallel_state.get_expert_tensor_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
    )
    count = model.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    first = parallel_state.get_expert_model_parallel_rank() * count
    experts = [model.family.expert(model.hf, layer, first + index) for index in range(count)]
    for weights in zip(*experts, strict=True):
        tensor = named.pop(prefix + weights[0].name)
        tensor.tensor_model_parallel = True  # type: ignore[attr-defined]
        parts = (part.of_expert(index) for index, weight in enumerate(weights) for part in weight.parts(rank, size))
        yield Held(tensor, tuple(parts), given=True)


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
    found = {spec.name: spec for spec in files.specs()}
    new = () if found.keys() & {*VALUE_HEAD} else VALUE_HEAD
    read = [spec for spec in weights.specs() if spec.name not in new]
    wrong = [text for spec in read if (text := _fault_of(found.get(spec.name), spec))]
    if wrong:
        raise ModelError(f"{key}={folder}: {len(wrong)} weights cannot be read; {wrong[0]}")
    head_is_copy = weights.model.tied and HEAD in found
    for held in weights.held:
        for part in held.parts:
            if part.tensor.name in new:
                continue
            values = files.read(part.tensor.name, part.there)
            if head_is_copy and part.tensor.name == EMBEDDING and not torch.equal(values, files.read(HEAD, part.there)):
                raise ModelError(
                    f"{key}={folder}: {HEAD} differs from {EMBEDDING}, but config.json has tie_word_embeddings=true; set it to "
                    "false"
                )
            held.tensor[part.here].copy_(values)


def _fault_of(found: TensorSpec | None, wanted: TensorSpec) -> str:
    """Return why a weight in the files is not the required one; empty if it is."""
    if found is None:
        return f"{wanted.name} is missing"
    if found.shape != wanted.shape:
        return f"{wanted.name} has the shape {list(found.shape)}, not {list(wanted.shape)}"
    return "" if found.dtype in ("bfloat16", "float16", "float32") else f"{wanted.name} is quantised ({found.dtype})"
