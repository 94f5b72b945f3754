"""PEFT folders of LoRA adapters: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.config.learner import LoraConfig
from agentrl.core.atomic_files import give_default_mode, names_file
from agentrl.core.errors import ModelError
from agentrl.core.reading import reading

if TYPE_CHECKING:
    import torch

ADAPTERS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


def peft_config(config: LoraConfig, modules: Sequence[str]) -> dict[str, Any]:
    """Return the contents of ``adapter_config.json`` of adapters of layers whose names end with ``modules``."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": config.rank,
        "lora_alpha": config.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(modules),
        "bias": "none",
    }


def layer_names(tensors: Collection[str]) -> set[str]:
    """Return the names of the layers that adapters are of, from the names of their weights."""
    return {name.partition(".lora_")[0] for name in tensors}


def last_names(layers: Collection[str]) -> list[str]:
    """Return the last parts of the names of layers, each once."""
    return sorted({layer.rpartition(".")[2] for layer in layers})


def write_peft_config(folder: Path, config: LoraConfig, tensors: Collection[str]) -> None:
    """Write ``adapter_config.json`` of adapters with weights of these names."""
    contents = peft_config(config, last_names(layer_names(tensors)))
    with names_file(folder / CONFIG):
        (folder / CONFIG).write_text(json.dumps(contents, indent=2) + "\n", encoding="utf-8")


def write_peft(folder: Path, config: LoraConfig, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Write a PEFT folder. One that exists already gets these adapters."""
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    with names_file(folder / ADAPTERS):
        save_file(dict(tensors), folder / ADAPTERS, metadata={"format": "pt"})
    give_default_mode(folder / ADAPTERS)
    write_peft_config(folder, config, [name for name, _ in tensors])


def read_peft(folder: Path) -> tuple[dict[str, Any], list[tuple[str, torch.Tensor]]]:
    """Return the configuration and the adapters of a PEFT folder.

    Raises:
        ModelError: it is incomplete or damaged.
    """
    from safetensors.torch import load_file

    with reading(folder, "PEFT folder", ModelError):
        config: dict[str, Any] = json.loads((folder / CONFIG).read_bytes())
        return config, sorted(load_file(folder / ADAPTERS).items())
