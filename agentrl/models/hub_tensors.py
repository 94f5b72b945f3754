"""The tensors of a model's Hugging Face folder as parts of its weights: transformers fuses some, such as those of experts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ModelError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class HubTensor:
    """A tensor of a Hugging Face folder: consecutive rows of a weight whose dimensions but the last are flattened."""

    name: str
    """In the folder, such as ``model.layers.0.mlp.experts.3.up_proj.weight``."""
    weight: str
    """The weight's name in the model, such as ``model.layers.0.mlp.experts.gate_up_proj``."""
    shape: tuple[int, ...]
    first: int
    """The first of the weight's rows."""
    is_whole: bool
    """Whether it is the whole weight."""

    @property
    def rows(self) -> int:
        """Its number of rows."""
        return math.prod(self.shape[:-1])

    def slice_weight(self, weight: torch.Tensor) -> torch.Tensor:
        """Return the tensor, in the memory of the weight."""
        if self.is_whole:
            return weight
        return weight.flatten(0, -2)[self.first : self.first + self.rows].view(self.shape)

    def overlap(self, start: int, count: int) -> tuple[slice, slice]:
        """Return which of ``count`` rows of the weight from ``start`` on are the tensor's, and which of its rows they are."""
        begin = max(self.first, start)
        end = max(min(self.first + self.rows, start + count), begin)
        return slice(begin - start, end - start), slice(begin - self.first, end - self.first)


def hub_tensors(model: Any, shapes: Mapping[str, tuple[int, ...]]) -> list[HubTensor]:
    """Return the tensors that ``save_pretrained`` would write for weights of a model, in the order of the weights.

    Args:
        model: of transformers; its weights are not read.
        shapes: of weights, by their names in the model.

    Raises:
        ModelError: a tensor is not made of consecutive rows of one weight.
    """
    import torch

    written = _saved_tensors(model, {name: torch.empty(shape, device="meta") for name, shape in shapes.items()})
    expected = {name: tuple(tensor.shape) for name, tensor in written.items()}
    tensors: list[HubTensor] = []
    for name, shape in shapes.items():
        is_unchanged = expected.get(name) == shape
        tensors += [HubTensor(name, name, shape, 0, True)] if is_unchanged else _parts(model, name, shape, expected)
    if {tensor.name: tensor.shape for tensor in tensors} != expected:
        raise _not_rows(model, min(expected.keys() - {tensor.name for tensor in tensors}, default=""))
    return tensors


def sent_buffers(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the buffers that engines have as parameters, such as the biases of routers, by their names in the model.

    They are those of floating-point numbers that the model's folder has: engines load them with the weights.
    """
    persistent = model.state_dict().keys()
    buffers = model.named_buffers()
    return {name: buffer for name, buffer in buffers if name in persistent and buffer.is_floating_point()}


def _parts(
    model: Any, weight: str, shape: tuple[int, ...], expected: Mapping[str, tuple[int, ...]]
) -> Iterator[HubTensor]:
    """Find the rows of one weight: transformers converts a column of their numbers."""
    import torch

    column = torch.arange(math.prod(shape[:-1])).view(*shape[:-1], 1) if len(shape) > 1 else torch.zeros(shape)
    converted = {name: tensor.reshape(-1) for name, tensor in _saved_tensors(model, {weight: column}).items()}
    for name, numbers in sorted(converted.items(), key=lambda item: int(item[1][0])):
        tensor_shape, first = expected.get(name, ()), int(numbers[0])
        if tensor_shape == shape:
            yield HubTensor(name, weight, shape, 0, True)
            continue
        in_order = torch.equal(numbers, torch.arange(first, first + len(numbers)))
        if tensor_shape[-1:] != shape[-1:] or math.prod(tensor_shape[:-1]) != len(numbers) or not in_order:
            raise _not_rows(model, name)
        yield HubTensor(name, weight, tensor_shape, first, False)


def _saved_tensors(model: Any, weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return what ``save_pretrained`` writes for weights of the model, whatever folder it was loaded from."""
    from transformers.core_model_loading import revert_weight_conversion

    conversions = getattr(model, "_weight_conversions", None)
    model._weight_conversions = None  # of the folder; None: of the architecture
    try:
        tensors: dict[str, torch.Tensor] = revert_weight_conversion(model, weights)
    finally:
        model._weight_conversions = conversions
    return tensors


def _not_rows(model: object, name: str) -> ModelError:
    return ModelError(
        f"{type(model).__name__}: {name!r} of its Hugging Face folders is not made of rows of one weight, as agentrl's "
        "weight sync and checkpoints need; choose another model"
    )
