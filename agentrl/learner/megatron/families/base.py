"""`Family`: options and weights of an architecture in Megatron-Core, and the parts that families have in common."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F

from agentrl.core.errors import ModelError
from agentrl.learner.megatron.mapping import HfTensor, Weight, gate_up, grouped_qkv, same

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of Hugging Face."""
VALUE_HEAD = ("score.weight", "score.bias")
"""Names of a value head, that of a token classifier of transformers with one label."""
Options = dict[str, Any]
"""Fields of Megatron-Core's ``TransformerConfig``."""


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of Hugging Face. In its functions ``hf`` is a configuration of transformers."""

    hf_type: str
    """``model_type`` in transformers."""
    options: Callable[[Any], Options]
    """Fields of ``TransformerConfig`` (of ``MLATransformerConfig`` with ``multi_latent_attention``)."""
    layer: Callable[[Any, int], Sequence[Weight]]
    """The weights of the decoder layer with this index, by names in the layer, without experts."""
    expert: Callable[[Any, int, int], Sequence[Weight]] | None = None
    """The weights of an expert of a layer, by names in the expert."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP have norms."""


def model_weights(hf: Any, *, values: bool = False) -> list[Weight]:
    """Return the weights outside of layers; with tied embeddings the language head's is that of the embedding.

    Args:
        hf: configuration.
        values: with a value head in place of the language head.
    """
    embedding = HfTensor(EMBEDDING, (hf.vocab_size, hf.hidden_size))
    head = embedding if hf.tie_word_embeddings else HfTensor(HEAD, embedding.shape)
    body = [
        same("embedding.word_embeddings.weight", embedding, "rows"),
        same("decoder.final_layernorm.weight", HfTensor("model.norm.weight", (hf.hidden_size,))),
    ]
    if not values:
        return [*body, same("output_layer.weight", head, "rows")]
    weight, bias = (HfTensor(name, shape) for name, shape in zip(VALUE_HEAD, ((1, hf.hidden_size), (1,)), strict=True))
    return [*body, same("output_layer.weight", weight), same("output_layer.bias", bias)]


def head_size(hf: Any) -> int:
    """Return the size of an attention head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def refuse(hf: Any, *names: str) -> None:
    """Refuse a model whose configuration sets one of these fields.

    Raises:
        ModelError: it sets one.
    """
    for name in names:
        if getattr(hf, name, False):
            raise ModelError(f"{name}=true in config.json: the megatron learner lacks it; set learner.backend=fsdp")


def dense_options(hf: Any, **options: Any) -> Options:
    """Return the options of a decoder with grouped-query attention and gated MLPs, with ``options`` over them.

    Raises:
        ModelError: the configuration has what Megatron-Core models here lack.
    """
    if hf.hidden_act != "silu":
        raise ModelError(f"hidden_act={hf.hidden_act!r} in config.json: the megatron learner has only silu")
    refuse(hf, "use_sliding_window")
    return {
        "num_layers": hf.num_hidden_layers,
        "hidden_size": hf.hidden_size,
        "num_attention_heads": hf.num_attention_heads,
        "num_query_groups": hf.num_key_value_heads,
        "kv_channels": head_size(hf),
        "ffn_hidden_size": hf.intermediate_size,
        "layernorm_epsilon": hf.rms_norm_eps,
        "activation_func": F.silu,
    } | options


def at_layer(layer: int) -> Callable[..., HfTensor]:
    """Return a function from name and shape to a tensor of the layer."""

    def make(name: str, *shape: int) -> HfTensor:
        return HfTensor(f"model.layers.{layer}.{name}", shape)

    return make


def attention(hf: Any, layer: int, *, bias: bool = False, qk_norm: bool = False) -> list[Weight]:
    """Return the weights of grouped-query attention, with biases of queries, keys and values, or norms of the first two."""
    at, size, heads, groups = at_layer(layer), head_size(hf), hf.num_attention_heads, hf.num_key_value_heads
    rows = {"q": heads * size, "k": groups * size, "v": groups * size}
    shapes = {"weight": (hf.hidden_size,)} | ({"bias": ()} if bias else {})
    weights = []
    for kind, trailing_shape in shapes.items():
        query, key, value = (
            at(f"self_attn.{name}_proj.{kind}", count, *trailing_shape) for name, count in rows.items()
        )
        weights.append(grouped_qkv(f"self_attention.linear_qkv.{kind}", query, key, value, groups))
    if qk_norm:
        weights += [
            same(f"self_attention.{name}_layernorm.weight", at(f"self_attn.{name}_norm.weight", size)) for name in "qk"
        ]
    output = at("self_attn.o_proj.weight", hf.hidden_size, heads * size)
    return [*weights, same("self_attention.linear_proj.weight", output, "columns")]


def norms(hf: Any, layer: int) -> list[Weight]:
    """Return the norms before attention and MLP."""
    at = at_layer(layer)
    return [
        same("input_layernorm.weight", at("input_layernorm.weight", hf.hidden_size)),
        same("pre_mlp_layernorm.weight", at("post_attention_layernorm.weight", hf.hidden_size)),
    ]


def mlp(hf: Any, layer: int, size: int, hf_prefix: str = "mlp", prefix: str = "mlp.") -> list[Weight]:
    """Return the weights of a gated MLP.

    Args:
        hf: configuration.
        layer: index.
        size: intermediate size.
        hf_prefix: name of the MLP in the Hugging Face layer.
        prefix: of its names in Megatron-Core.
    """
    at = at_layer(layer)
    gate, up = (at(f"{hf_prefix}.{name}_proj.weight", size, hf.hidden_size) for name in ("gate", "up"))
    down = at(f"{hf_prefix}.down_proj.weight", hf.hidden_size, size)
    return [gate_up(f"{prefix}linear_fc1.weight", gate, up), same(f"{prefix}linear_fc2.weight", down, "columns")]
