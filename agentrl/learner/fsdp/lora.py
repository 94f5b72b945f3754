"""LoRA adapters (arXiv:2106.09685) by `peft`: which layers get one, and initial values. `MergedWeights` merges them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from agentrl.config.learner import LoraConfig
from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.learner.fsdp.weights import LORA_KEY, local, part_of

_ADAPTER = "default"
_A, _B = f".lora_A.{_ADAPTER}.", f".lora_B.{_ADAPTER}."


def add_adapters(hf: Any, config: LoraConfig) -> None:
    """Freeze a model on `meta` and add adapters, without memory, to the linear layers that ``config.target`` names.

    Raises:
        ConfigError: a pattern matches no linear layer, or the output head.
        MissingError: peft is not installed.

    """
    require("peft", LORA_KEY)
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    options = PeftConfig(
        r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=adapted_layers(hf, config)
    )
    hf.requires_grad_(False)
    inject_adapter_in_model(options, hf, _ADAPTER, low_cpu_mem_usage=True)


def adapted_layers(hf: Any, config: LoraConfig) -> list[str]:
    """Return the names of the linear layers of a model without adapters that ``config.target`` names.

    Raises:
        ConfigError: a pattern matches no linear layer, or the output head.

    """
    head = hf.get_output_embeddings()
    linears = [name for name, module in hf.named_modules() if isinstance(module, nn.Linear) and module is not head]
    if config.target == "linear":
        return linears
    chosen: set[str] = set()
    for pattern in config.target:
        found = {name for name in linears if fnmatchcase(name, pattern)}
        if not found:
            raise ConfigError(
                f"{LORA_KEY}.target: {pattern!r} matches no linear layer of the policy but its head; it has layers such as "
                f"{', '.join(linears[:3])}"
            )
        chosen |= found
    return sorted(chosen)


@torch.no_grad()
def fill_adapters(hf: nn.Module, seed: int) -> None:
    """Draw the initial ``A`` as peft does, and set ``B`` to zeros; the same on any number of ranks."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in hf.named_parameters():
        if _A in name:
            whole = nn.init.kaiming_uniform_(torch.empty(parameter.shape), math.sqrt(5), generator=generator)
            local(parameter).copy_(whole[part_of(parameter)])
        elif _B in name:
            local(parameter).zero_()


@contextmanager
def disabled_adapters(hf: nn.Module) -> Iterator[None]:
    """Compute without adapters in the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [module for module in hf.modules() if isinstance(module, BaseTunerLayer)]
    try:
        for layer in layers:
            # Not by `enable_adapters`, which changes `requires_grad` too: FSDP's gathered weights would keep the old one.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False
