"""The training state of a rank as boxes of Hugging Face tensors, so that a checkpoint loads in any layout, and with any family's
fused weights.

The distributed optimizer divides each weight of a rank as one row of numbers among data-parallel ranks, regardless of its
rows: a rank writes its numbers as up to three boxes of a matrix, and nothing is gathered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping

import torch

from agentrl.learner.megatron.families.base import WeightSlice
from agentrl.learner.megatron.policies import Training
from agentrl.learner.megatron.weights import ModelWeights, RankWeight
from agentrl.learner.sharded_files import Box, TensorBoxes, flat_boxes
from agentrl.models.sharded_weights import WEIGHTS

_Read = Callable[[torch.Tensor], torch.Tensor]
OPTIMIZER, REFERENCE = "optimizer", "reference"
"""Folders of a checkpoint, besides `WEIGHTS`."""


class _Boxes:
    """Boxes of Hugging Face tensors by name."""

    def __init__(self) -> None:
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._boxes: dict[str, list[Box]] = defaultdict(list)

    def add(self, weight: RankWeight, numbers: torch.Tensor, start: int = 0) -> None:
        """Add consecutive numbers of a weight of this rank, from the position ``start`` on."""
        for box in flat_boxes(weight.tensor.shape, start, numbers.view(-1)):
            for weight_slice in weight.slices:
                hf_box = _hf_box(weight_slice, box)
                if hf_box is not None:
                    self._shapes[weight_slice.tensor.name] = weight_slice.tensor.shape
                    self._boxes[weight_slice.tensor.name].append(hf_box)

    def tensors(self) -> dict[str, TensorBoxes]:
        """Return the tensors of which this rank has boxes."""
        return {name: TensorBoxes(self._shapes[name], boxes) for name, boxes in self._boxes.items()}


def _hf_box(weight_slice: WeightSlice, box: Box) -> Box | None:
    """Return what a slice of a Hugging Face tensor has of a box of a rank's weight, as a box of that tensor."""
    offsets: list[int] = []
    index: list[int | slice] = []
    hf_starts = iter(indices.start or 0 for indices in weight_slice.hf_slices)
    selectors = [*weight_slice.local_index, *[slice(None)] * (box.tensor.ndim - len(weight_slice.local_index))]
    for selector, offset, size in zip(selectors, box.offsets, box.tensor.shape, strict=True):
        if isinstance(selector, int):
            if not offset <= selector < offset + size:
                return None
            index.append(selector - offset)
            continue
        start = selector.start or 0
        begin, end = max(start, offset), offset + size if selector.stop is None else min(selector.stop, offset + size)
        if begin >= end:
            return None
        index.append(slice(begin - offset, end - offset))
        offsets.append(next(hf_starts) + begin - start)
    return Box(tuple(offsets), box.tensor[tuple(index)])


def state_to_save(
    weights: ModelWeights, training: Training, reference: ModelWeights | None, read: _Read
) -> dict[str, dict[str, TensorBoxes]]:
    """Return the state by folder and name: the optimizer's float32 weights, those that it does not change, and its moments.

    Args:
        weights: of the trained model.
        training: of it.
        reference: the weights of a reference that has changed.
        read: returns the copy of a tensor that is written.
    """
    model, moments = _Boxes(), defaultdict[str, _Boxes](_Boxes)
    by_tensor = {weight.tensor: weight for weight in weights.rank_weights}
    for shard in training.shards():
        if (weight := by_tensor[shard.parameter]).sends:
            model.add(weight, read(shard.weight), shard.start)
            for name, moment in shard.moments.items():
                moments[name].add(weight, read(moment), shard.start)
    for weight in weights.rank_weights:
        if weight.sends and not weight.tensor.requires_grad:
            model.add(weight, read(weight.tensor))
    state = {WEIGHTS: model.tensors(), OPTIMIZER: _by_moment(moments)}
    if reference is not None:
        state[REFERENCE] = _whole(filter(lambda weight: weight.sends, reference.rank_weights), read)
    return state


def state_to_load(
    weights: ModelWeights, training: Training, reference: ModelWeights | None
) -> dict[str, dict[str, TensorBoxes]]:
    """Return the memory of the state by folder and name; see `state_to_save`. The optimizer has its moments."""
    moments = defaultdict[str, _Boxes](_Boxes)
    model = _Boxes()
    by_tensor = {weight.tensor: weight for weight in weights.rank_weights}
    for weight in weights.rank_weights:
        model.add(weight, weight.tensor.detach())
    for shard in training.shards():
        if shard.weight.untyped_storage()._cdata != shard.parameter.untyped_storage()._cdata:
            model.add(by_tensor[shard.parameter], shard.weight, shard.start)
        for name, moment in shard.moments.items():
            moments[name].add(by_tensor[shard.parameter], moment, shard.start)
    state = {WEIGHTS: model.tensors(), OPTIMIZER: _by_moment(moments)}
    if reference is not None:
        state[REFERENCE] = _whole(reference.rank_weights, torch.Tensor.detach)
    return state


def _by_moment(moments: Mapping[str, _Boxes]) -> dict[str, TensorBoxes]:
    return {
        f"{moment}.{name}": boxes for moment, tensors in moments.items() for name, boxes in tensors.tensors().items()
    }


def _whole(weights: Iterable[RankWeight], read: _Read) -> dict[str, TensorBoxes]:
    boxes = _Boxes()
    for weight in weights:
        boxes.add(weight, read(weight.tensor))
    return boxes.tensors()
