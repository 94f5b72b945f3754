"""Loading of tokenizers and models from Hugging Face folders, with errors that name the key to change."""

from __future__ import annotations

from copy import copy
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agentrl.core.errors import ModelError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")
_TOKENIZER_SUFFIXES = (".json", ".model", ".jinja", ".txt")


def load_tokenizer(folder: Path, key: str = "model.path") -> PreTrainedTokenizerBase:
    """Return the tokenizer in ``folder``; ``key`` is the configuration key of the folder, for messages. Does not import torch.

    The vocabulary is cached per process; each call returns a copy with separate settings, such as ``chat_template``.

    Raises:
        ModelError: the folder has no tokenizer, or it cannot be loaded.
    """
    # With config.json alone transformers would return an empty tokenizer of the right class.
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise ModelError(f"{key}={folder} holds no tokenizer: none of {', '.join(_TOKENIZER_FILES)}")
    files = sorted(path for path in folder.iterdir() if path.suffix in _TOKENIZER_SUFFIXES)
    stamp = tuple((path.name, path.stat().st_mtime_ns, path.stat().st_size) for path in files)
    try:
        return copy(_read_tokenizer(folder, stamp))
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"{key}={folder}: its tokenizer cannot be loaded: {_words(error)}") from error


@lru_cache(maxsize=2)
def _read_tokenizer(folder: Path, stamp: tuple[tuple[str, int, int], ...]) -> PreTrainedTokenizerBase:
    """Load a tokenizer, which takes a second or two for a large vocabulary; ``stamp`` changes when its files change."""
    from transformers import AutoTokenizer, PreTrainedTokenizerBase

    tokenizer: Any = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    assert isinstance(tokenizer, PreTrainedTokenizerBase)
    return tokenizer


def load_model(
    folder: Path,
    dtype: torch.dtype | str = "float32",
    attn_implementation: str = "sdpa",
    *,
    key: str = "model.path",
) -> PreTrainedModel:
    """Return the causal language model in ``folder``, on the CPU and in evaluation mode.

    Args:
        folder: a Hugging Face model folder.
        dtype: dtype of the weights, such as ``torch.float32`` or ``"bfloat16"``.
        attn_implementation: attention implementation of transformers.
        key: configuration key of the folder, for messages.

    Raises:
        ModelError: the folder has no causal model or lacks weights, or the attention implementation is unknown.
    """
    from transformers import AutoModelForCausalLM

    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            str(folder),
            dtype=as_dtype(dtype),
            attn_implementation=attn_implementation,
            local_files_only=True,
            output_loading_info=True,
        )
    except Exception as error:  # transformers raises errors of many kinds
        raise ModelError(f"{key}={folder}: the model cannot be loaded: {_words(error)}") from error
    model: PreTrainedModel = loaded[0]
    report = loaded[1]
    # transformers initialises missing weights randomly and only warns.
    missing = sorted(report["missing_keys"])
    if missing:
        raise ModelError(f"{key}={folder}: {len(missing)} weights are missing, such as {missing[0]!r}")
    model.train(False)
    return model


def as_dtype(dtype: torch.dtype | str) -> torch.dtype:
    """Return the torch dtype of a name such as ``"bfloat16"``; `ModelError` if there is none."""
    import torch

    if isinstance(dtype, torch.dtype):
        return dtype
    found = getattr(torch, dtype, None)
    if not isinstance(found, torch.dtype):
        raise ModelError(f"{dtype!r} is not a torch dtype; use float32 or bfloat16")
    return found


def _words(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else 'no message'}"
