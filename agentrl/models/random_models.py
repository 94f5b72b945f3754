"""Models of a known size with random weights: for measurements, where what a model says does not matter."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Shape:
    """What decides a Qwen3 model's size; the names are those of its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool

    @property
    def parameters(self) -> int:
        """How many weights it has, tied ones once."""
        heads = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        layer = self.hidden_size * (heads + 3 * self.intermediate_size + 2) + 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


SHAPES = {
    "tiny": Shape(64, 192, 2, 2, 1, 32, 2048, True),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, True),
    "8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, False),
}
"""By name; the larger two are those of Qwen3-0.6B and Qwen3-8B."""


def find_shape(size: str) -> Shape:
    """Return the shape of that name.

    Raises:
        ConfigError: there is none.

    """
    if size not in SHAPES:
        raise ConfigError(f"size {size!r}: there are {', '.join(SHAPES)}")
    return SHAPES[size]


def model_config(shape: Shape) -> Any:
    """Return transformers' configuration of a model of this shape."""
    from transformers import Qwen3Config

    return Qwen3Config(
        **asdict(shape), architectures=["Qwen3ForCausalLM"], dtype="bfloat16", max_position_embeddings=40960
    )


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by Hugging Face name, tied ones once, without making any."""
    import torch
    from transformers import AutoModelForCausalLM

    make: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"):
        return {name: tuple(data.shape) for name, data in make(model_config(shape)).named_parameters()}


def make_folder(folder: Path, shape: Shape, *, tokenizer: Path | None = None, weights: bool = False) -> None:
    """Write a Hugging Face folder of a random model.

    Args:
        folder: is made.
        shape: its size.
        tokenizer: the folder of a tokenizer, of which the model gets a copy with as many tokens as it has itself.
        weights: whether to write weights (bfloat16); engines that make up their own need none.

    Raises:
        ConfigError: the tokenizer has more tokens than the model, or is none that can be filled up.

    """
    folder.mkdir(parents=True)
    config = model_config(shape)
    config.save_pretrained(folder)
    if weights:
        import torch
        from safetensors.torch import save_file
        from transformers import AutoModelForCausalLM

        make: Any = AutoModelForCausalLM.from_config
        parameters = make(config, dtype=torch.bfloat16).named_parameters()  # tied ones once
        save_file({name: data.detach() for name, data in parameters}, folder / "model.safetensors", {"format": "pt"})
    if tokenizer is not None:
        _fill_tokenizer(tokenizer, folder, shape.vocab_size)


def _fill_tokenizer(source: Path, folder: Path, size: int) -> None:
    """Copy a tokenizer and give every id below ``size`` a text. What was not there before is decoded, never encoded."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    try:
        tree = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tree["model"]["vocab"]
        known = set(vocabulary.values())
        behind = [token for token in tree["added_tokens"] if token["content"] not in vocabulary]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.path={source}: its tokenizer cannot be filled up to {size} tokens ({type(error).__name__}: {error}); "
            "set model.path to a model with a BPE tokenizer.json"
        ) from None
    count, end = 1 + max(known) + len(behind), size - len(behind)
    if count > size:
        raise ConfigError(f"model.path={source}: its tokenizer has {count} tokens, the made model only {size}")
    vocabulary |= {f"Ġfill{number}": number for number in range(end) if number not in known}
    # Such tokens follow the vocabulary, wherever it ends.
    for number, token in enumerate(behind, end):
        token["id"] = number
    (folder / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
