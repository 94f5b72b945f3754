"""Loading of tokenizers and models from Hugging Face folders, with errors that name the key to change."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ConfigError, ModelError
from agentrl.models.engine_float8 import KEPT_KEY, keeps_blocks
from agentrl.models.float8 import is_quantized
from agentrl.models.routing import COUNTS, REPLAYED, Routing
from agentrl.models.routing import KEY as ROUTING_KEY
from agentrl.models.weight_files import WeightFiles

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

_log = logging.getLogger(__name__)
ROPE_BY_LENGTH = {"dynamic", "longrope", "su"}
"""Types of RoPE scaling whose frequencies depend on the length."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tiktoken.model", "spiece.model", "vocab.json", "vocab.txt")
_TOKENIZER_SUFFIXES = (".json", ".model", ".jinja", ".txt", ".py")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer. With ``config.json`` alone transformers returns an empty one."""
    return any((folder / name).is_file() for name in _TOKENIZER_FILES)


def load_tokenizer(
    folder: Path, key: str = "model.path", *, trust_remote_code: bool = False
) -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``folder``. Does not import torch.

    The vocabulary is cached per process; each call returns a copy with separate settings, such as ``chat_template``.

    Args:
        folder: a folder with tokenizer files.
        key: configuration key of the folder, for messages.
        trust_remote_code: run Python code of the folder if the tokenizer needs it (``model.trust_remote_code``).

    Raises:
        ModelError: the folder has no tokenizer, or it cannot be loaded, such as for code that is not trusted.
    """
    if not has_tokenizer(folder):
        raise ModelError(f"{key}={folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    files = sorted(path for path in folder.iterdir() if path.suffix in _TOKENIZER_SUFFIXES)
    stamp = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    try:
        return copy(_read_tokenizer(folder, stamp, trust_remote_code))
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"{key}={folder}: its tokenizer cannot be loaded: {_words(error)}{_hint(error)}") from error


@lru_cache(maxsize=2)
def _read_tokenizer(folder: Path, stamp: tuple[tuple[str, int, int], ...], trusted: bool) -> PreTrainedTokenizerBase:
    """Load a tokenizer, which takes a second or two for a large vocabulary; ``stamp`` changes when its files change."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    # Without the argument transformers would ask on the terminal.
    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=trusted)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    if type(tokenizer).__module__.partition(".")[0] == "transformers_modules":
        _log.warning("model.trust_remote_code=true: the tokenizer of %s runs Python code of that folder", folder)
    return tokenizer


def read_vocab_size(folder: Path) -> int:
    """Return the number of token ids that the model in ``folder`` can sample.

    Raises:
        ModelError: its ``config.json`` does not have it.
    """
    size = _text_config(folder).get("vocab_size")
    if not isinstance(size, int) or size < 1:
        raise ModelError(f"{folder}/config.json: vocab_size={size!r} is not a number of tokens")
    return size


def read_end_ids(folder: Path) -> tuple[int, ...]:
    """Return the ids at which engines end a turn of the model in ``folder``, whatever a request says.

    They are ``eos_token_id`` of ``config.json`` and of ``generation_config.json`` together, as in SGLang. Without
    ``config.json`` there are none.

    Raises:
        ModelError: a file cannot be read, or an id is no number.
    """
    paths = [path for name in ("config.json", "generation_config.json") if (path := folder / name).is_file()]
    end_ids: list[int] = []
    for path in paths:
        config = _read_json(path)
        text_config = config.get("text_config")
        for section in (config, text_config if isinstance(text_config, dict) else {}):
            value = section.get("eos_token_id", _default_end_id(section.get("model_type")))
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if not all(isinstance(index, int) for index in ids):
                raise ModelError(f"{path}: eos_token_id={value!r} is not a token id, nor a list of them")
            end_ids += ids
    return tuple(dict.fromkeys(end_ids))


def _default_end_id(model_type: object) -> object:
    """Return the end token of a configuration that does not name one, which depends on the class of the model."""
    if not isinstance(model_type, str):
        return None
    from transformers import CONFIG_MAPPING

    return getattr(CONFIG_MAPPING[model_type](), "eos_token_id", None) if model_type in CONFIG_MAPPING else None


def count_parameters(folder: Path) -> int:
    """Return the number of weights in the safetensors files of ``folder``, from their headers; 0 if it has none.

    Raises:
        ModelError: a file is damaged.
    """
    from safetensors import SafetensorError, safe_open

    count = 0
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(path, "numpy") as weights:
                count += sum(math.prod(weights.get_slice(name).get_shape()) for name in weights.keys())  # noqa: SIM118
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{path} cannot be read: {error}") from error
    return count


def read_max_positions(folder: Path) -> int | None:
    """Return the most tokens that the model in ``folder`` can take, RoPE scaling included; None if nothing limits them.

    Raises:
        ModelError: it has no readable ``config.json``.
    """
    config = _text_config(folder)
    positions = config.get("max_position_embeddings")
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    factor = scaling.get("factor", 1) if isinstance(scaling, dict) else 1
    return int(positions * max(factor, 1)) if isinstance(positions, int) else None


def read_heads(folder: Path) -> int | None:
    """Return the number of attention heads of the model in ``folder``; None if its ``config.json`` has none.

    Raises:
        ModelError: it has no readable ``config.json``.
    """
    config = _text_config(folder)
    heads = config.get("num_attention_heads", config.get("n_head"))
    return heads if isinstance(heads, int) else None


def read_counts(folder: Path, *names: str) -> int:
    """Return the first of these entries of ``config.json`` that is a number; 0 if there is none.

    Raises:
        ModelError: the model in ``folder`` has no readable ``config.json``.
    """
    config = _text_config(folder)
    return next((count for name in names if isinstance(count := config.get(name), int)), 0)


def read_experts(folder: Path) -> int:
    """Return how many experts, without shared ones, a layer of the model in ``folder`` has at most; 0 without experts.

    Raises:
        ModelError: the model in ``folder`` has no readable ``config.json``.
    """
    return read_counts(folder, "n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")


def read_model_type(folder: Path) -> str:
    """Return ``model_type`` of the model in ``folder``, such as ``qwen3``; empty if its ``config.json`` has none.

    Raises:
        ModelError: it has no readable ``config.json``.
    """
    return str(_text_config(folder).get("model_type", ""))


def read_rope_types(folder: Path) -> set[str]:
    """Return the types of RoPE scaling that the ``config.json`` of the model in ``folder`` names, such as ``yarn``.

    Raises:
        ModelError: it has no readable ``config.json``.
    """
    config = _text_config(folder)
    sections = [section for key in ("rope_scaling", "rope_parameters") if isinstance(section := config.get(key), dict)]
    # Models whose layers differ have a mapping for each kind of layer.
    sections += [
        layer_section for section in sections for layer_section in section.values() if isinstance(layer_section, dict)
    ]
    return {str(section[key]) for section in sections for key in ("rope_type", "type") if key in section}


def read_rope_limit(folder: Path) -> int | None:
    """Return the length of rows from which on the RoPE of the model in ``folder`` depends on the longest row that is computed.

    None if it never does. Packed rows, also the short ones, would be computed as the longest of them.

    Raises:
        ModelError: it has no readable ``config.json``.
    """
    if not read_rope_types(folder) & ROPE_BY_LENGTH:
        return None
    config = _text_config(folder)
    sections = [config.get("rope_scaling"), config.get("rope_parameters"), config]
    originals = [section.get("original_max_position_embeddings") for section in sections if isinstance(section, dict)]
    limits = [limit for limit in (*originals, config.get("max_position_embeddings")) if isinstance(limit, int)]
    return min(limits, default=0)


def read_dtype(folder: Path) -> str | None:
    """Return the dtype in ``config.json`` of the model in ``folder``, such as ``bfloat16``; None if there is none.

    Raises:
        ModelError: it has no readable ``config.json``.
    """
    config, text = _config(folder), _text_config(folder)
    dtypes = (config_section.get(key) for config_section in (config, text) for key in ("dtype", "torch_dtype"))
    return next((str(dtype) for dtype in dtypes if dtype), None)


def _text_config(folder: Path) -> dict[str, Any]:
    config = _config(folder)
    text_config = config.get("text_config") or config
    if not isinstance(text_config, dict):
        raise ModelError(f"{folder}/config.json: text_config={text_config!r} is not a mapping")
    return text_config


def _config(folder: Path) -> dict[str, Any]:
    return _read_json(folder / "config.json")


def _read_json(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be read: {error!r}") from error


def load_model(
    folder: Path, dtype: torch.dtype | str = "float32", attn_implementation: str = "sdpa", *, key: str = "model.path"
) -> PreTrainedModel:
    """Return the language model in ``folder``, on the CPU and in evaluation mode; a vision-language model with its vision tower.

    Args:
        folder: a Hugging Face model folder.
        dtype: dtype of the weights, such as ``torch.float32`` or ``"bfloat16"``.
        attn_implementation: attention implementation of transformers.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: the folder has no causal model or lacks weights, or the attention implementation is unknown.
    """
    model, missing_keys = _load(folder, dtype, attn_implementation, key)
    _check_missing(missing_keys, folder, key)
    return model


def load_value_model(
    folder: Path, dtype: torch.dtype | str = "float32", attn_implementation: str = "sdpa", *, key: str = "model.path"
) -> PreTrainedModel:
    """Return the model in ``folder`` with a value head (see `value_head`) in place of its language head.

    It is a token classifier of transformers with one label, or a vision-language model, of which transformers has no token
    classifiers. A folder without such a head gets one of zeros.

    Args:
        folder: a Hugging Face folder of a language model, or of what this function returned.
        dtype: as in `load_model`.
        attn_implementation: as in `load_model`.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: as in `load_model`, or transformers has no token classifier of this architecture.
    """
    import torch

    model, missing_keys = _load(folder, dtype, attn_implementation, key, values=True)
    language_head = replace_language_head(model)
    if language_head:
        missing_keys = missing_keys - language_head | value_head_names(model)
    _check_missing(missing_keys - value_head_names(model), folder, key)
    if missing_keys:
        files = WeightFiles(folder, key)
        stored_names = files.shapes().keys() if language_head else set()
        with torch.no_grad():
            for name in value_head_names(model):
                weight = model.get_parameter(name)
                weight.copy_(files.read(name, ())) if name in stored_names else weight.zero_()
    return model


def read_routing(folder: Path) -> Routing:
    """Return the sizes of the model in a Hugging Face folder.

    Raises:
        ConfigError: it has no experts, or others than can be replayed.
    """
    fields = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    kind = fields.get("model_type")
    if kind not in REPLAYED:
        raise ConfigError(
            f"{ROUTING_KEY}=true, but {folder} is a model with model_type={kind!r}, and only routers of {', '.join(REPLAYED)} "
            f"can be replayed; set {ROUTING_KEY}=false"
        )
    experts = next(int(fields[name]) for name in COUNTS if fields.get(name))
    return Routing(int(fields["num_hidden_layers"]), int(fields["num_experts_per_tok"]), experts)


def empty_model(
    folder: Path, attn_implementation: str, *, values: bool = False, key: str = "model.path"
) -> PreTrainedModel:
    """Return the float32 model in ``folder`` without weights: parameters are on ``meta``, buffers on the CPU.

    Args:
        folder: as in `load_model`, or in `load_value_model`.
        attn_implementation: as in `load_model`.
        values: with a value head in place of the language head.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: as in `load_model` or `load_value_model`.
    """
    try:
        config = model_config(folder, values=values)
        with parameters_on_meta():
            model = new_model(config, values=values, attn_implementation=attn_implementation)
    except Exception as error:  # transformers raises errors of many kinds
        raise _not_loaded(error, folder, key) from error
    return model


@contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give modules that are made here parameters on ``meta``, for which no random numbers are drawn; buffers have theirs.

    Drawing them takes a third of the time in which a small model is loaded.
    """
    import torch
    from torch.nn.modules.module import register_module_parameter_registration_hook
    from transformers.initialization import guard_torch_init_functions

    def to_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> torch.nn.Parameter | None:
        if parameter is None:
            return None
        if not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        parameter._is_hf_initialized = True  # type: ignore[attr-defined]
        return parameter

    hook: Any = register_module_parameter_registration_hook(to_meta)  # type: ignore[arg-type]
    try:
        with guard_torch_init_functions():
            yield
    finally:
        hook.remove()


def model_config(folder: Path, *, values: bool = False) -> PreTrainedConfig:
    """Return the configuration of the model in ``folder``, without that of quantised weights: `WeightFiles` reads them.

    Args:
        folder: with ``config.json``.
        values: of the model with a value head.
    """
    from transformers import AutoConfig

    options = {"num_labels": 1} if values else {}
    config: PreTrainedConfig = AutoConfig.from_pretrained(
        str(folder), local_files_only=True, trust_remote_code=False, **options
    )
    for section in (config, config.get_text_config()):
        quantization = vars(section).pop("quantization_config", None)
        if isinstance(quantization, dict) and keeps_blocks(quantization):
            setattr(config, KEPT_KEY, quantization)
    return config


def new_model(
    config: PreTrainedConfig, *, values: bool = False, attn_implementation: str | None = None
) -> PreTrainedModel:
    """Return a float32 model of a configuration, with new weights.

    Args:
        config: of the model.
        values: with a value head in place of the language head.
        attn_implementation: attention implementation of transformers; None is that of the configuration.
    """
    import torch

    model: PreTrainedModel = _auto_class(config, values=values).from_config(
        config, dtype=torch.float32, attn_implementation=attn_implementation, trust_remote_code=False
    )
    if values:
        replace_language_head(model)
    return model


def _auto_class(config: PreTrainedConfig, *, values: bool) -> Any:
    """Return the class of transformers that makes a model of a configuration.

    Args:
        config: of the model.
        values: as a token classifier, unless transformers has none as the model reads images.
    """
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForTokenClassification

    image_models: Any = AutoModelForImageTextToText._model_mapping
    if hasattr(config, "vision_config") and type(config) in image_models:
        return AutoModelForImageTextToText
    return AutoModelForTokenClassification if values else AutoModelForCausalLM


def replace_language_head(model: PreTrainedModel) -> set[str]:
    """Give a vision-language model a value head in place of its language head, and return the names of that one's weights.

    A token classifier, which has no language head, stays as it is.
    """
    import torch

    language_model: Any = model
    head = language_model.get_output_embeddings()
    if head is None:
        return set()
    [name] = [name for name, module in model.named_children() if module is head]
    names = {f"{name}.{weight}" for weight, _ in head.named_parameters()}
    delattr(model, name)
    model.add_module("score", torch.nn.Linear(head.in_features, 1, dtype=head.weight.dtype))
    return names


def value_head_names(model: Any) -> set[str]:
    """Return the names of the weights of a model's value head."""
    head_ids = {id(parameter) for parameter in value_head(model).parameters()}
    return {name for name, parameter in model.named_parameters() if id(parameter) in head_ids}


def value_head(model: Any) -> torch.nn.Linear:
    """Return the head of a model of `load_value_model`: from hidden states to one number."""
    import torch

    [head] = [module for module in model.children() if isinstance(module, torch.nn.Linear)]
    return head


def _load(
    folder: Path, dtype: torch.dtype | str, attn_implementation: str, key: str, *, values: bool = False
) -> tuple[PreTrainedModel, set[str]]:
    """Return a model in evaluation mode, and the names of the weights that the folder lacks."""
    options = {"dtype": as_dtype(dtype), "attn_implementation": attn_implementation, "output_loading_info": True}
    try:
        config = model_config(folder, values=values)
        kind = _auto_class(config, values=values)
        if is_quantized(folder):
            # transformers would read the weights with the kernels of a GPU.
            files = WeightFiles(folder, key)
            weights = {name: files.read(name, ()) for name in files.shapes()}
            model, report = kind._model_mapping[type(config)].from_pretrained(
                None, config=config, state_dict=weights, trust_remote_code=False, **options
            )
        else:
            model, report = kind.from_pretrained(
                str(folder), config=config, local_files_only=True, trust_remote_code=False, **options
            )
    except ModelError:
        raise
    except Exception as error:  # transformers raises errors of many kinds
        raise _not_loaded(error, folder, key) from error
    model.train(False)
    return model, set(report["missing_keys"])


def _not_loaded(error: Exception, folder: Path, key: str) -> ModelError:
    code = "; agentrl loads weights with the code of transformers only" if _hint(error) else ""
    return ModelError(f"{key}={folder}: the model cannot be loaded: {_words(error)}{code}")


def _check_missing(missing_keys: set[str], folder: Path, key: str) -> None:
    """Refuse a folder that lacks weights, which transformers initialises randomly."""
    if missing_keys:
        raise ModelError(f"{key}={folder}: {len(missing_keys)} weights are missing, such as {min(missing_keys)!r}")


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of a name such as ``"bfloat16"``; `ModelError` if there is none."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    torch_dtype = getattr(torch, dtype, None)
    if not isinstance(torch_dtype, torch.dtype):
        raise ModelError(f"{dtype!r} is not a torch dtype; use float32 or bfloat16")
    return torch_dtype


def _hint(error: Exception) -> str:
    """Return what to set if transformers refuses to run a folder's code."""
    if "trust_remote_code" not in str(error):
        return ""
    return "; set model.trust_remote_code=true if you trust the Python code in that folder"


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
