"""Outputs of a model's modules for one token, to find where two computations of a model begin to differ."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

ModuleOutputs = Mapping[str, NDArray[np.float32]]
"""Output ``[H]`` of the last token by the name of the module, in the order of computation."""


def record_module_outputs(model: nn.Module, compute: Callable[[], object]) -> ModuleOutputs:
    """Return the last token's outputs of decoder layers and of their direct parts, in the order in which they are computed.

    Args:
        model: of transformers.
        compute: computes the model once, for tokens of one row.
    """
    outputs: dict[str, NDArray[np.float32]] = {}

    def record(name: str, module: nn.Module, inputs: object, output: object) -> None:
        hidden = output[0] if isinstance(output, tuple) and output else output
        if isinstance(hidden, torch.Tensor) and hidden.dim() > 1 and hidden.is_floating_point():
            outputs[name] = hidden.detach().flatten(0, -2)[-1].float().cpu().numpy()

    layers, prefix = _decoder_layers(model)
    modules = {
        name: module
        for name, module in model.named_modules()
        if name.startswith(prefix) and name.removeprefix(prefix).count(".") <= 1 and module is not layers
    }
    embedding: Any = model.get_input_embeddings()  # type: ignore[operator]
    names = {module: name for name, module in model.named_modules()}
    handles = [
        module.register_forward_hook(partial(record, name))
        for name, module in {names[embedding]: embedding, **modules}.items()
    ]
    try:
        compute()
    finally:
        for handle in handles:
            handle.remove()
    return outputs


def _decoder_layers(model: nn.Module) -> tuple[nn.ModuleList, str]:
    """Return the longest list of modules, and what the names of its modules begin with."""
    lists = [(module, f"{name}.") for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    return max(lists, key=lambda pair: len(pair[0]), default=(nn.ModuleList(), "\0"))
