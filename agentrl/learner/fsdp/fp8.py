"""Linear layers in float8."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from agentrl.core.errors import ConfigError


def convert_linears(layers: Sequence[nn.Module]) -> None:
    """Have the linear modules in ``layers`` compute their products in float8, with one scale a tensor; weights stay float32.

    Raises:
        ConfigError: torchao is missing, or the GPU has no float8.
    """
    try:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    except ImportError as error:
        raise ConfigError(
            f"learner.fp8=true needs torchao ({error}): pip install torchao, or set learner.fp8=false"
        ) from error
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9):
        raise ConfigError("learner.fp8=true needs a GPU with float8 (compute capability 8.9); set learner.fp8=false")
    for layer in layers:
        convert_to_float8_training(layer, config=Float8LinearConfig.from_recipe_name("tensorwise"))
