"""LoRA adapters of the engine: by name, each as the weights that it changes, with the adapter merged."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agentrl.inference.embedded.replies import BadRequestError
from agentrl.models.weight_checksum import raw_bytes

_PREFIX, _A, _B = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter. Requests that it computes keep it, also after it was unloaded."""

    number: int
    """From 1; no two have the same one."""
    weights: Mapping[str, Tensor]
    """Merged weights by their names in the model."""


def merged_weights(
    weights: Mapping[str, Tensor], config: Mapping[str, Any], named: Sequence[tuple[str, Tensor]]
) -> dict[str, Tensor]:
    """Return the weights that an adapter changes, ``W + alpha / r B A``.

    Args:
        weights: of the model, by name.
        config: contents of ``adapter_config.json``.
        named: adapters by their names in a PEFT folder.

    Raises:
        BadRequestError: they do not fit the model.
    """
    tensors = dict(named)
    try:
        scale = float(config["lora_alpha"]) / float(config["r"])
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise BadRequestError(
            f"config_dict needs the numbers r and lora_alpha: {type(error).__name__} {error}"
        ) from error
    layers = {name.removesuffix(_A).removesuffix(_B) for name in tensors}
    merged = {}
    for layer in sorted(layers):
        a, b, name = tensors.get(layer + _A), tensors.get(layer + _B), f"{layer.removeprefix(_PREFIX)}.weight"
        base = weights.get(name)
        if base is None or a is None or b is None:
            raise BadRequestError(f"{layer}: the model has no such layer, or the adapter not both of lora_A and lora_B")
        if a.ndim != 2 or b.ndim != 2 or base.shape != (b.shape[0], a.shape[1]) or b.shape[1] != a.shape[0]:
            raise BadRequestError(
                f"{layer}: lora_B {list(b.shape)} and lora_A {list(a.shape)} do not fit {list(base.shape)}"
            )
        merged[name] = (base.float() + scale * (b.float() @ a.float())).to(base.dtype)
    if not merged:
        raise BadRequestError("serialized_named_tensors holds no adapter")
    return merged


def check_sums(named: Sequence[tuple[str, Tensor]], expected: Mapping[str, str]) -> None:
    """Compare SHA-256 sums of tensors.

    Raises:
        BadRequestError: one differs, or is missing.
    """
    for name, checksum in expected.items():
        tensor = dict(named).get(name)
        if tensor is None or hashlib.sha256(raw_bytes(tensor.contiguous())).hexdigest() != checksum:
            raise BadRequestError(f"{name}: its checksum is not the expected one")


class AdapterTable:
    """The loaded adapters by name."""

    def __init__(self) -> None:
        self._loaded: dict[str, Adapter] = {}
        self._count = 0

    def get(self, name: str) -> Adapter:
        """Return a loaded adapter.

        Raises:
            BadRequestError: there is none of this name.
        """
        if name not in self._loaded:
            raise BadRequestError(f"lora_path={name!r} is not loaded; loaded are {sorted(self._loaded)}")
        return self._loaded[name]

    def add(self, name: str, weights: Mapping[str, Tensor]) -> None:
        """Add an adapter.

        Raises:
            BadRequestError: one of this name is loaded.
        """
        if name in self._loaded:
            raise BadRequestError(f"lora_name={name!r} is loaded already")
        self._count += 1
        self._loaded[name] = Adapter(self._count, weights)

    def remove(self, name: object) -> None:
        """Remove an adapter; requests in progress keep it.

        Raises:
            BadRequestError: there is none of this name.
        """
        if self._loaded.pop(str(name), None) is None:
            raise BadRequestError(f"lora_name={name!r} is not loaded")

    def clear(self) -> None:
        """Remove all adapters: the weights that they were merged with have changed."""
        self._loaded.clear()


class WeightSwitch:
    """Has a model compute with the weights of an adapter, or with those that it was loaded with."""

    def __init__(self, model: torch.nn.Module) -> None:
        self._parameters = dict(model.named_parameters())
        self._current: Adapter | None = None
        self._base: dict[str, Tensor] = {}
        """The model's weights where those of the current adapter are in their place."""

    def use(self, adapter: Adapter | None) -> None:
        """Put the weights of an adapter in place; None restores the model's."""
        if adapter is self._current:
            return
        for name, weight in self._base.items():
            self._parameters[name].data = weight
        self._base = {}
        for name, weight in adapter.weights.items() if adapter is not None else ():
            self._base[name] = self._parameters[name].data
            self._parameters[name].data = weight
        self._current = adapter
