"""`Family`: options and weights of an architecture in Megatron-Core, and the parts that families have in common.

A `Weight` lists rows of Hugging Face tensors. A tensor-parallel rank has slices of these tensors, and each slice is a
range of rows of the rank's weight. Loading reads the slices, gathering writes them: one mapping serves both directions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch.nn.functional as F

from agentrl.core.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class HfTensor(NamedTuple):
    """A tensor of a Hugging Face folder."""

    name: str
    shape: tuple[int, ...]


class Rows(NamedTuple):
    """Rows of a Hugging Face tensor."""

    tensor: HfTensor
    start: int
    stop: int


class WeightSlice(NamedTuple):
    """A slice of a Hugging Face tensor, and its place in a rank's weight."""

    tensor: HfTensor
    hf_slices: tuple[slice, ...]
    """In the Hugging Face tensor."""
    local_index: tuple[int | slice, ...]
    """Rows of the rank's weight, of stacked weights after the expert's index."""

    def stacked_at(self, index: int) -> WeightSlice:
        """Return the slice in stacked weights of experts."""
        return self._replace(local_index=(index, *self.local_index))


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter or buffer of a Megatron-Core model."""

    name: str
    """In its layer, expert or model."""
    blocks: tuple[tuple[Rows, ...], ...]
    """The rows of a block follow each other. A rank has its rows of each block, one block after the other."""
    split: Literal["rows", "columns"] | None = "rows"
    """What tensor-parallel ranks divide; None if each has the whole weight."""
    dtype: str | None = None
    """Dtype of a weight whose dtype is not the model's."""

    def tensors(self) -> Iterator[HfTensor]:
        """Iterate over the Hugging Face tensors, each once."""
        yield from dict.fromkeys(rows.tensor for block in self.blocks for rows in block)

    def slices(self, rank: int, size: int) -> Iterator[WeightSlice]:
        """Iterate over the slices of one of ``size`` tensor-parallel ranks."""
        begin = 0
        for block in self.blocks:
            rows = _rank_rows(block, rank, size) if self.split == "rows" else block
            for tensor, start, stop in rows:
                hf_slices = (slice(start, stop), *map(slice, tensor.shape[1:]))
                if self.split == "columns":
                    hf_slices = (hf_slices[0], _range(tensor.shape[1], rank, size))
                yield WeightSlice(tensor, hf_slices, (slice(begin, begin + stop - start),))
                begin += stop - start


def _range(length: int, rank: int, size: int) -> slice:
    assert length % size == 0, f"{length} not divisible by {size}"
    count = length // size
    return slice(rank * count, (rank + 1) * count)


def _rank_rows(block: Iterable[Rows], rank: int, size: int) -> Iterator[Rows]:
    """Iterate over a rank's rows of a block."""
    block = tuple(block)
    rank_range = _range(sum(rows.stop - rows.start for rows in block), rank, size)
    begin = 0
    for tensor, start, stop in block:
        first, last = max(rank_range.start - begin, 0), min(rank_range.stop - begin, stop - start)
        if first < last:
            yield Rows(tensor, start + first, start + last)
        begin += stop - start


def all_rows(tensor: HfTensor) -> tuple[Rows, ...]:
    """Return a block of a whole tensor."""
    return (Rows(tensor, 0, tensor.shape[0]),)


def same(
    name: str, tensor: HfTensor, split: Literal["rows", "columns"] | None = None, dtype: str | None = None
) -> Weight:
    """Return a weight that is one Hugging Face tensor."""
    return Weight(name, (all_rows(tensor),), split, dtype)


def gate_up(name: str, gate: HfTensor, up: HfTensor) -> Weight:
    """Return the first weight of a gated MLP: a rank has its rows of the gate projection, then those of the up projection."""
    return Weight(name, (all_rows(gate), all_rows(up)))


def fused_gate_up(name: str, tensor: HfTensor) -> Weight:
    """Return the first weight of a gated MLP from a Hugging Face tensor with both projections."""
    half = tensor.shape[0] // 2
    return Weight(name, ((Rows(tensor, 0, half),), (Rows(tensor, half, 2 * half),)))


def grouped_qkv(name: str, query: HfTensor, key: HfTensor, value: HfTensor, groups: int) -> Weight:
    """Return the projection to queries, keys and values: of each group of heads the queries, the key and the value."""
    rows: list[Rows] = []
    for group in range(groups):
        for tensor in (query, key, value):
            size = tensor.shape[0] // groups
            rows.append(Rows(tensor, group * size, (group + 1) * size))
    return Weight(name, (tuple(rows),))


class StackedWeight(NamedTuple):
    """The weights of all experts of a layer in one Hugging Face tensor, with the expert's index first."""

    name: str
    """In the experts of a layer."""
    tensor: HfTensor
    dtype: None = None

    def tensors(self) -> Iterator[HfTensor]:
        """Iterate over the one Hugging Face tensor."""
        yield self.tensor

    def slice(self, first: int, count: int) -> WeightSlice:
        """Return the slice of some experts, which a rank has as they are."""
        hf_slices = (slice(first, first + count), *map(slice, self.tensor.shape[1:]))
        return WeightSlice(self.tensor, hf_slices, (slice(0, count),))


EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
"""Names of Hugging Face."""
VALUE_HEAD = ("score.weight", "score.bias")
"""Names of a value head, that of a token classifier of transformers with one label."""
Options = dict[str, Any]
"""Fields of Megatron-Core's ``TransformerConfig``."""


def no_window(hf: PreTrainedConfig, layer: int) -> None:
    """Return None: attention of all layers is over whole rows."""
    return None


def layer_window(hf: PreTrainedConfig, layer: int) -> int | None:
    """Return the size of the sliding window of a layer, by ``layer_types`` in its configuration."""
    is_sliding = hf.layer_types[layer] == "sliding_attention"
    return int(hf.sliding_window) if is_sliding and hf.sliding_window else None


@dataclass(frozen=True, slots=True)
class Family:
    """An architecture of Hugging Face. In its functions ``hf`` is a configuration of transformers."""

    hf_type: str
    """``model_type`` in transformers."""
    options: Callable[[PreTrainedConfig], Options]
    """Fields of ``TransformerConfig`` (of ``MLATransformerConfig`` with ``multi_latent_attention``)."""
    layer: Callable[[PreTrainedConfig, int], Sequence[Weight]]
    """The weights of the decoder layer with this index, by names in the layer, without experts."""
    expert: Callable[[PreTrainedConfig, int, int], Sequence[Weight]] | None = None
    """The weights of an expert of a layer, by names in the expert."""
    stacked: Callable[[PreTrainedConfig, int], Sequence[StackedWeight]] | None = None
    """Those of all experts of a layer, if Hugging Face has them in one tensor. Ranks divide the experts, and no expert."""
    window: Callable[[PreTrainedConfig, int], int | None] = no_window
    """The size of the sliding window of a layer's attention; None if it has none."""
    sinks: bool = False
    """Whether attention has sinks: a weight ``self_attention.core_attention.sinks`` of each layer."""
    post_norms: bool = False
    """Whether the outputs of attention and MLP have norms."""
    reads_images: bool = False
    """Whether it is the text part of a model with a vision tower: ``hf`` is the configuration of the text part."""
    whole: PreTrainedConfig | None = None
    """Configuration of the whole model that was read, if it reads images."""


def layer_features(family: Family) -> int:
    """Return how many of the first layers add features of images to their outputs (Qwen3-VL's deepstack)."""
    return 0 if family.whole is None else len(getattr(family.whole.vision_config, "deepstack_visual_indexes", ()))


def model_weights(hf: PreTrainedConfig, *, values: bool = False) -> list[Weight]:
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


def head_size(hf: PreTrainedConfig) -> int:
    """Return the size of an attention head."""
    return int(getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)


def refuse(hf: PreTrainedConfig, *names: str) -> None:
    """Refuse a model whose configuration sets one of these fields.

    Raises:
        ModelError: it sets one.
    """
    for name in names:
        if getattr(hf, name, False):
            raise ModelError(f"{name}=true in config.json: the megatron learner lacks it; set learner.backend=fsdp")


def dense_options(hf: PreTrainedConfig, **options: Any) -> Options:
    """Return the options of a decoder with grouped-query attention and gated MLPs, with ``options`` over them.

    Raises:
        ModelError: the configuration has what Megatron-Core models here lack.
    """
    if hf.hidden_act != "silu":
        raise ModelError(f"hidden_act={hf.hidden_act!r} in config.json: the megatron learner has only silu")
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


def attention(
    hf: PreTrainedConfig, layer: int, *, bias: bool = False, output_bias: bool = False, qk_norm: bool = False
) -> list[Weight]:
    """Return the weights of grouped-query attention.

    Args:
        hf: configuration.
        layer: index.
        bias: whether queries, keys and values have biases.
        output_bias: whether the output has one.
        qk_norm: whether queries and keys have norms.
    """
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
    if output_bias:
        weights.append(same("self_attention.linear_proj.bias", at("self_attn.o_proj.bias", hf.hidden_size)))
    return [*weights, same("self_attention.linear_proj.weight", output, "columns")]


def norms(hf: PreTrainedConfig, layer: int) -> list[Weight]:
    """Return the norms before attention and MLP."""
    at = at_layer(layer)
    return [
        same("input_layernorm.weight", at("input_layernorm.weight", hf.hidden_size)),
        same("pre_mlp_layernorm.weight", at("post_attention_layernorm.weight", hf.hidden_size)),
    ]


def mlp(hf: PreTrainedConfig, layer: int, size: int, hf_prefix: str = "mlp", prefix: str = "mlp.") -> list[Weight]:
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
