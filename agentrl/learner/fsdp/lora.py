"""LoRA adapters (arXiv:2106.09685) by `peft`: which layers get one, and initial values. `MergedWeights` merges them."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from agentrl.config.learner import LoraConfig
from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.learner.fsdp.weights import LORA_KEY, is_adapter, is_policy_adapter, local, peft_adapter, shard_slices
from agentrl.learner.layers import vision_tower


def add_adapters(hf: Any, config: LoraConfig) -> None:
    """Freeze a model on `meta` and add the adapters of each policy, without memory, to the layers that ``config.target`` names.

    The first policy is the active one.

    Raises:
        ConfigError: a pattern matches no linear layer, or the output head.
        MissingError: peft is not installed.
    """
    require("peft", LORA_KEY)
    from peft import LoraConfig as PeftConfig
    from peft import inject_adapter_in_model

    layers = adapted_layers(hf, config)
    hf.requires_grad_(False)
    for policy in config.policies:
        options = PeftConfig(r=config.rank, lora_alpha=config.alpha, lora_dropout=0.0, target_modules=layers)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Already found a `peft_config`")  # of the policy before
            inject_adapter_in_model(options, hf, peft_adapter(policy), low_cpu_mem_usage=True)
    for name, parameter in hf.named_parameters():
        parameter.requires_grad_(is_adapter(name))  # peft trains the active one alone
    activate(hf, config.policies[0])


def adapted_layers(hf: Any, config: LoraConfig) -> list[str]:
    """Return the names of the linear layers of a model without adapters that ``config.target`` names, of its text part alone.

    Raises:
        ConfigError: a pattern matches no linear layer, or the output head.
    """
    head, text = hf.get_output_embeddings(), hf if vision_tower(hf) is None else hf.get_decoder()
    of_text = set(text.modules())
    linears = [
        name
        for name, module in hf.named_modules()
        if isinstance(module, nn.Linear) and module is not head and module in of_text
    ]
    if config.target == "linear":
        return linears
    chosen: set[str] = set()
    for pattern in config.target:
        names = {name for name in linears if fnmatchcase(name, pattern)}
        if not names:
            raise ConfigError(
                f"{LORA_KEY}.target: {pattern!r} matches no linear layer of the policy but its head; it has layers such as "
                f"{', '.join(linears[:3])}"
            )
        chosen |= names
    return sorted(chosen)


def activate(hf: nn.Module, policy: str) -> None:
    """Compute with the adapters of a policy from now on; adapters of other policies get no gradient."""
    for layer in _adapter_layers(hf):
        # Not by `set_adapter`, which changes `requires_grad` too; see `disabled_adapters`.
        layer._active_adapter = [peft_adapter(policy)]


@torch.no_grad()
def fill_adapters(hf: nn.Module, config: LoraConfig, seed: int) -> None:
    """Draw the initial ``A`` as peft does, and set ``B`` to zeros; the same for each policy, on any number of ranks."""
    for policy in config.policies:
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in hf.named_parameters():
            if not is_policy_adapter(name, policy):
                continue
            if ".lora_A." in name:
                initial = nn.init.kaiming_uniform_(torch.empty(parameter.shape), math.sqrt(5), generator=generator)
                local(parameter).copy_(initial[shard_slices(parameter)])
            else:
                local(parameter).zero_()


@contextmanager
def disabled_adapters(hf: nn.Module) -> Iterator[None]:
    """Compute without adapters in the block."""
    layers = _adapter_layers(hf)
    try:
        for layer in layers:
            # Not by `enable_adapters`, which changes `requires_grad` too: FSDP's gathered weights would keep the old one.
            layer._disable_adapters = True
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def _adapter_layers(hf: nn.Module) -> list[Any]:
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in hf.modules() if isinstance(module, BaseTunerLayer)]
