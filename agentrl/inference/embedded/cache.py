"""Keys and values of all slots, as a Hugging Face cache and the attention that reads it.

`SlotCache.update` writes the new tokens' keys and values into their slots; `slot_attention`, registered with
transformers under `ATTENTION`, attends to the slots where they lie. Query heads that share a key-value head are folded
into the query dimension, so keys and values are never repeated.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from agentrl.core.errors import EngineError, ModelError
from agentrl.inference.embedded.forward_batch import Step

ATTENTION = "agentrl_slots"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class SlotCache(Cache):
    """``[slots, key-value heads, context, head size]`` of keys and values a layer, made when a layer first runs."""

    def __init__(self, slots: int, context: int) -> None:
        """Remember the size; no memory is taken yet."""
        super().__init__(layers=[])
        self._shape = (slots, context)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._thread = threading.local()

    @property
    def step(self) -> Step:
        """The step that this thread computes; threads that compute at the same time have different slots."""
        step = self._thread.step
        assert isinstance(step, Step)
        return step

    @step.setter
    def step(self, step: Step) -> None:
        self._thread.step = step

    def bind(self, model: nn.Module) -> None:
        """Let every attention module of ``model`` find this cache."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "slot_cache", self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always given, never counted from here."""
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write ``[1, heads, N, size]`` into the step's slots; returns its arguments, which the attention ignores."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
        step = self.step
        where = (step.slots, slice(None), step.positions)
        self._keys[layer_idx][where] = key_states[0].transpose(0, 1)
        self._values[layer_idx][where] = value_states[0].transpose(0, 1)
        return key_states, value_states

    def _allocate(self, like: Tensor) -> Tensor:
        slots, context = self._shape
        shape = (slots, like.shape[1], context, like.shape[3])
        # NumPy's zeros take no memory until they are written, and unwritten places must hold numbers: a masked NaN
        # is still NaN.
        try:
            raw = np.zeros((*shape, like.element_size()), np.uint8)
        except MemoryError as error:
            raise EngineError(
                f"no memory for {slots} slots of {context} tokens: lower sampler.embedded.slots or "
                "sampler.embedded.context"
            ) from error
        # Outside inference mode: slots are copied between passes, which a tensor made inside would not allow.
        with torch.inference_mode(False):
            return torch.from_numpy(raw).view(like.dtype).squeeze(-1)

    def drop(self) -> None:
        """Give all memory back; it is taken again as it is needed."""
        self._keys.clear()
        self._values.clear()

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of a slot to another."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[target, :, :count] = tensor[source, :, :count]

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of ``query [1, H, N, D]`` to its slots, ``[1, N, H, D]``."""
        step = self.step
        keys, values = self._keys[layer], self._values[layer]
        heads, count = query.shape[1], query.shape[2]
        out = query.new_empty(count, heads, values.shape[3])
        if step.decoding:
            tokens = query[0, :, : step.decoding].transpose(0, 1)
            out[: step.decoding] = self._decode(tokens * scale, keys, values, window)
        runs = len(step.runs)
        for index, block in enumerate(step.blocks, runs):
            tokens = query[0, :, block.rows]
            grouped = tokens.reshape(keys.shape[1], -1, *tokens.shape[1:]).transpose(0, 1)
            groups = grouped.shape[0]
            # Batch dimension: the query heads of a group. Expanding the keys over it copies nothing.
            attended = F.scaled_dot_product_attention(
                grouped,
                keys[block.slot, :, : block.end].expand(groups, -1, -1, -1),
                values[block.slot, :, : block.end].expand(groups, -1, -1, -1),
                attn_mask=step.mask(index, window),
                scale=scale,
            )
            out[block.rows] = attended.transpose(0, 1).flatten(0, 1).transpose(0, 1)
        return out[None]

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attend with one token a slot, ``[D, H, size]``, already scaled."""
        step = self.step
        kv_heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
        if not step.dense:
            padded = query.new_zeros(step.rows, *query.shape[1:])
            padded[step.place] = query
            query = padded
        parts = []
        for index, run in enumerate(step.runs):
            pairs = (run.last - run.first) * kv_heads
            k = keys[run.first : run.last].view(pairs, *keys.shape[2:])[:, : run.longest]
            v = values[run.first : run.last].view(pairs, *values.shape[2:])[:, : run.longest]
            scores = torch.bmm(query[run.rows].reshape(pairs, groups, -1), k.transpose(1, 2))
            scores = scores.view(-1, kv_heads, groups, run.longest) + step.mask(index, window)
            weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
            parts.append(torch.bmm(weights.view(pairs, groups, run.longest), v).view(-1, kv_heads * groups, v.shape[2]))
        rows = parts[0] if len(parts) == 1 else torch.cat(parts)
        return rows if step.dense else rows[step.place]


def slot_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attend to the slots; the signature is that of transformers' attention functions.

    Raises:
        ModelError: the model's attention has a part that this one lacks.
    """
    for name in _UNSUPPORTED:
        if kwargs.get(name) is not None:
            raise ModelError(
                f"{type(module).__name__} uses {name}, which the embedded engine lacks: use another model.path"
            )
    cache = module.slot_cache
    assert isinstance(cache, SlotCache)
    layer = module.layer_idx
    assert isinstance(layer, int)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return cache.attend(layer, query, scale, sliding_window), None


AttentionInterface.register(ATTENTION, slot_attention)
