"""Models of a given size with random weights, for benchmarks."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agentrl.core.atomic_files import give_default_mode
from agentrl.core.errors import ConfigError
from agentrl.models.hub_tensors import hub_tensors
from agentrl.models.load import parameters_on_meta


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a Qwen3 model, of one with experts if it has any, with the field names of its ``config.json``."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    tie_word_embeddings: bool
    num_experts: int = 0
    num_experts_per_tok: int = 0
    moe_intermediate_size: int = 0

    @property
    def parameters(self) -> int:
        """Number of parameters; tied ones are counted once."""
        return self._parameters(self.num_experts)

    @property
    def active_parameters(self) -> int:
        """Number of parameters that a token is multiplied with."""
        return self._parameters(self.num_experts_per_tok)

    def _parameters(self, experts: int) -> int:
        heads = self.head_dim * (2 * self.num_attention_heads + 2 * self.num_key_value_heads)
        products = 3 * experts * self.moe_intermediate_size if self.num_experts else 3 * self.intermediate_size
        layer = self.hidden_size * (heads + products + self.num_experts + 2) + 2 * self.head_dim
        embeddings = self.vocab_size * self.hidden_size * (1 if self.tie_word_embeddings else 2)
        return embeddings + self.num_hidden_layers * layer + self.hidden_size


SHAPES = {
    "tiny": Shape(64, 192, 2, 2, 1, 32, 2048, True),
    "0.6b": Shape(1024, 3072, 28, 16, 8, 128, 151936, True),
    "4b": Shape(2560, 9728, 36, 32, 8, 128, 151936, True),
    "8b": Shape(4096, 12288, 36, 32, 8, 128, 151936, False),
    "14b": Shape(5120, 17408, 40, 40, 8, 128, 151936, False),
    "tiny-moe": Shape(64, 192, 2, 2, 1, 32, 2048, True, 8, 2, 32),
    "30b-a3b-12": Shape(2048, 6144, 12, 32, 4, 128, 151936, False, 128, 8, 768),
}
"""Shapes by name; except the tiny ones they are those of Qwen3. The last has 12 layers of 48, 8.1B parameters."""


def find_model_shape(size: str) -> Shape:
    """Return the shape of a name.

    Raises:
        ConfigError: the name is unknown.
    """
    if size not in SHAPES:
        raise ConfigError(f"size {size!r}: there are {', '.join(SHAPES)}")
    return SHAPES[size]


def _config_fields(shape: Shape) -> dict[str, Any]:
    """Return what ``config.json`` has, with the names that engines know; for the rest the defaults of transformers hold."""
    fields = {name: value for name, value in asdict(shape).items() if value or name == "tie_word_embeddings"}
    kind = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}
    if shape.num_experts:
        kind = {"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"]}
        fields |= {"norm_topk_prob": True, "mlp_only_layers": []}
    return {**kind, **fields, "dtype": "bfloat16", "max_position_embeddings": 40960}


def model_config(shape: Shape) -> Any:
    """Return the configuration in transformers of a model of this shape."""
    from transformers import AutoConfig

    for_model: Any = AutoConfig.for_model
    return for_model(**_config_fields(shape))


def parameter_shapes(shape: Shape) -> dict[str, tuple[int, ...]]:
    """Return the shapes of a model's weights by Hugging Face name, tied ones once, without allocating them."""
    import torch
    from transformers import AutoModelForCausalLM

    from_config: Any = AutoModelForCausalLM.from_config
    with torch.device("meta"), parameters_on_meta():
        model = from_config(model_config(shape))
    shapes = {name: tuple(data.shape) for name, data in model.named_parameters()}
    return {tensor.name: tensor.shape for tensor in hub_tensors(model, shapes)}


def write_random_model(
    folder: Path, shape: Shape, *, tokenizer: Path | None = None, weights: bool = False, device: str = "cpu"
) -> None:
    """Write a Hugging Face folder of a model with random weights.

    Args:
        folder: folder to create.
        shape: size of the model.
        tokenizer: folder of a tokenizer; it is copied and extended to the model's vocabulary size.
        weights: whether to write weights (bfloat16); engines with random weights do not need them.
        device: where weights are generated.

    Raises:
        ConfigError: the tokenizer has more tokens than the model, or cannot be extended.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(_config_fields(shape), indent=2))
    if weights:
        import torch
        from safetensors.torch import save_file

        generator = torch.Generator(device).manual_seed(0)
        tensors = {
            name: torch.empty(sizes, device=device, dtype=torch.bfloat16).normal_(0.0, 0.02, generator=generator)
            for name, sizes in parameter_shapes(shape).items()
        }
        for name, data in tensors.items():
            if name.endswith("norm.weight"):
                data.fill_(1.0)
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        give_default_mode(folder / "model.safetensors")
    if tokenizer is not None:
        _extend_tokenizer(tokenizer, folder, shape.vocab_size)


def _extend_tokenizer(source: Path, folder: Path, size: int) -> None:
    """Copy a tokenizer and add tokens for all missing ids below ``size``. Added tokens are decoded, but never encoded."""
    for name in ("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"):
        if (source / name).is_file():
            shutil.copy(source / name, folder)
    try:
        tree = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = tree["model"]["vocab"]
        used_ids = set(vocabulary.values())
        added = [token for token in tree["added_tokens"] if token["content"] not in vocabulary]
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ConfigError(
            f"model.path={source}: its tokenizer cannot be extended to {size} tokens ({type(error).__name__}: {error}); "
            "set model.path to a model with a BPE tokenizer.json"
        ) from None
    count, end = 1 + max(used_ids) + len(added), size - len(added)
    if count > size:
        raise ConfigError(f"model.path={source}: its tokenizer has {count} tokens, the random model only {size}")
    vocabulary |= {f"Ġfill{number}": number for number in range(end) if number not in used_ids}
    # Added tokens follow the vocabulary.
    for number, token in enumerate(added, end):
        token["id"] = number
    (folder / "tokenizer.json").write_text(json.dumps(tree), encoding="utf-8")
