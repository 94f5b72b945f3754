"""What an SGLang server reports of the precision of its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.models.engine_float8 import DTYPE, QUANTIZATION, keeps_blocks
from agentrl.models.float8 import read_quantization

SELF_QUANTIZED = "flash_rl"
"""SGLang's ``load_format`` that quantises each weight that arrives in bfloat16."""


def quantized_weights(info: Mapping[str, object], engine: str) -> str | None:
    """Return ``float8_e4m3fn`` if an engine's weights are float8 in blocks, None if new ones are not to be quantised.

    Args:
        info: what it reports at ``/server_info``.
        engine: its name for messages.

    Raises:
        ConfigError: its weights are quantised in a way in which SGLang takes no new ones.
    """
    option = info.get("quantization") or info.get("torchao_config") or None  # SGLang 0.5.17 reports "" for none
    if option == "fp8" and info.get("load_format") == SELF_QUANTIZED:
        return None
    quantization = _override(info)
    if quantization is None:
        quantization = read_quantization(Path(str(info.get("model_path"))))
    if keeps_blocks(quantization) and option in (None, "fp8"):
        return DTYPE
    if option or quantization:
        form = option or f"quant_method={quantization.get('quant_method')!r} in config.json"
        override = json.dumps({"quantization_config": dict(QUANTIZATION)})
        raise ConfigError(
            f"{engine} has quantised weights ({form}), and SGLang takes no new ones in that form: start it without "
            "--quantization from a folder whose weights are not quantised, such as one of agentrl export; for float8 in blocks, "
            f"with --load-format dummy --json-model-override-args '{override}' and weights.dtype=float8"
        )
    return None


def _override(info: Mapping[str, object]) -> Mapping[str, object] | None:
    """Return the ``quantization_config`` that the engine was started with in place of that of its folder."""
    try:
        overrides = json.loads(str(info.get("json_model_override_args") or "{}"))
    except ValueError:
        return None
    if not isinstance(overrides, dict) or "quantization_config" not in overrides:
        return None
    quantization = overrides["quantization_config"]
    return quantization if isinstance(quantization, dict) else {}
