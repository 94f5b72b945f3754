"""KV cache of all slots, as a Hugging Face cache and an attention function that reads it in place.

`SlotCache.update` writes the new tokens' keys and values into their slots; `slot_attention`, registered with
transformers as `ATTENTION`, attends to the slots without copying them. Query heads that share a key-value head are folded
into the query dimension, so keys and values are never repeated.
"""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import Cache

from agentrl.core.errors import EngineError, ModelError
from agentrl.inference.embedded.forward_batch import ForwardBatch
from agentrl.models.batch_invariant import KEYS, batch_invariant_attention

ATTENTION = "agentrl_slots"
_UNSUPPORTED = ("softcap", "s_aux", "position_bias")


class SlotCache(Cache):
    """Keys and values ``[slots, key-value heads, context, head size]`` of each layer, allocated when it first runs."""

    def __init__(self, slots: int, context: int, *, batch_invariant: bool = False) -> None:
        """Set the size; memory is allocated at the first forward pass. See `Model.batch_invariant`."""
        super().__init__(layers=[])
        self._batch_invariant = batch_invariant
        self._shape = (slots, -(-context // KEYS) * KEYS if batch_invariant else context)
        self._keys: dict[int, Tensor] = {}
        self._values: dict[int, Tensor] = {}
        self._experts: dict[int, NDArray[np.int16]] = {}
        """``[slots, context, K]`` experts of each layer that has some."""
        self._thread = threading.local()

    @property
    def batch(self) -> ForwardBatch:
        """The batch that this thread computes; threads that compute at the same time use different slots."""
        batch = self._thread.batch
        assert isinstance(batch, ForwardBatch)
        return batch

    @batch.setter
    def batch(self, batch: ForwardBatch) -> None:
        self._thread.batch = batch

    @property
    def computes(self) -> bool:
        """Whether this thread has computed a batch: before, the model is only compared with."""
        return hasattr(self._thread, "batch")

    def bind(self, model: nn.Module) -> None:
        """Set this cache as ``slot_cache`` of every attention module of ``model``."""
        for module in model.modules():
            if hasattr(module, "layer_idx"):
                object.__setattr__(module, "slot_cache", self)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return 0: positions are always passed to the model, never derived from the cache."""
        return 0

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """Write ``[1, heads, N, size]`` into the batch's slots; return the arguments, which `slot_attention` ignores."""
        if layer_idx not in self._keys:
            self._keys[layer_idx] = self._allocate(key_states)
            self._values[layer_idx] = self._allocate(value_states)
        batch = self.batch
        index = (batch.slots, slice(None), batch.positions)
        self._keys[layer_idx][index] = key_states[0].transpose(0, 1)
        self._values[layer_idx][index] = value_states[0].transpose(0, 1)
        return key_states, value_states

    def record_experts(self, layer: int, index: Tensor) -> None:
        """Write the experts ``[N, K]`` of the batch's tokens into their slots."""
        if layer not in self._experts:
            self._experts[layer] = np.zeros((*self._shape, index.shape[1]), np.int16)
        batch = self.batch
        self._experts[layer][batch.slots.numpy(), batch.positions.numpy()] = index.numpy()

    def experts(self, slot: int, start: int, end: int, layers: int) -> NDArray[np.int32]:
        """Return the experts ``[end - start, layers, K]`` of a slot's tokens; zeros in layers without experts."""
        width = next(iter(self._experts.values())).shape[2]
        experts_TLK = np.zeros((end - start, layers, width), np.int32)
        for layer, layer_experts in self._experts.items():
            experts_TLK[:, layer] = layer_experts[slot, start:end]
        return experts_TLK

    def _allocate(self, like: Tensor) -> Tensor:
        slots, context = self._shape
        shape = (slots, like.shape[1], context, like.shape[3])
        # NumPy's zeros take no memory until they are written. Unwritten positions must hold finite numbers: a masked
        # NaN is still NaN.
        try:
            raw = np.zeros((*shape, like.element_size()), np.uint8)
        except MemoryError as error:
            raise EngineError(
                f"out of memory for {slots} slots of {context} tokens: lower sampler.embedded.slots or "
                "sampler.embedded.context"
            ) from error
        # Outside inference mode: slots are copied between passes, and inference tensors do not allow that.
        with torch.inference_mode(False):
            return torch.from_numpy(raw).view(like.dtype).squeeze(-1)

    def release(self) -> None:
        """Free all memory; it is allocated again when it is needed."""
        self._keys.clear()
        self._values.clear()
        self._experts.clear()

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy the first ``count`` tokens of a slot to another."""
        for tensor in (*self._keys.values(), *self._values.values()):
            tensor[target, :, :count] = tensor[source, :, :count]
        for experts in self._experts.values():
            experts[target, :count] = experts[source, :count]

    def attend(self, layer: int, query: Tensor, scale: float, window: int | None) -> Tensor:
        """Return the attention of ``query [1, H, N, D]`` to its slots, ``[1, N, H, D]``."""
        batch = self.batch
        keys, values = self._keys[layer], self._values[layer]
        if self._batch_invariant:
            ends = np.cumsum([len(segment.tokens) for segment in batch.segments]).tolist()
            rows = [
                batch_invariant_attention(
                    query[0, :, end - len(segment.tokens) : end],
                    keys[segment.slot],
                    values[segment.slot],
                    segment.start,
                    scale,
                    window,
                )
                for segment, end in zip(batch.segments, ends, strict=True)
            ]
            return torch.cat(rows)[None]
        heads, count = query.shape[1], query.shape[2]
        out = query.new_empty(count, heads, values.shape[3])
        if batch.decoding:
            tokens = query[0, :, : batch.decoding].transpose(0, 1)
            out[: batch.decoding] = self._decode(tokens * scale, keys, values, window)
        runs = len(batch.runs)
        for index, block in enumerate(batch.blocks, runs):
            tokens = query[0, :, block.rows]
            grouped = tokens.reshape(keys.shape[1], -1, *tokens.shape[1:]).transpose(0, 1)
            groups = grouped.shape[0]
            # Batch dimension: the query heads of a group. Expanding the keys over it does not copy them.
            attended = F.scaled_dot_product_attention(
                grouped,
                keys[block.slot, :, : block.end].expand(groups, -1, -1, -1),
                values[block.slot, :, : block.end].expand(groups, -1, -1, -1),
                attn_mask=batch.mask(index, window),
                scale=scale,
            )
            out[block.rows] = attended.transpose(0, 1).flatten(0, 1).transpose(0, 1)
        return out[None]

    def _decode(self, query: Tensor, keys: Tensor, values: Tensor, window: int | None) -> Tensor:
        """Attend with one token per slot, ``[D, H, size]``, already scaled."""
        batch = self.batch
        kv_heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
        if not batch.dense:
            padded = query.new_zeros(batch.rows, *query.shape[1:])
            padded[batch.decode_rows] = query
            query = padded
        outputs = []
        for index, run in enumerate(batch.runs):
            pairs = (run.last - run.first) * kv_heads
            k = keys[run.first : run.last].view(pairs, *keys.shape[2:])[:, : run.longest]
            v = values[run.first : run.last].view(pairs, *values.shape[2:])[:, : run.longest]
            scores = torch.bmm(query[run.rows].reshape(pairs, groups, -1), k.transpose(1, 2))
            scores = scores.view(-1, kv_heads, groups, run.longest) + batch.mask(index, window)
            weights = scores.softmax(-1, dtype=torch.float32).to(v.dtype)
            output = torch.bmm(weights.view(pairs, groups, run.longest), v)
            outputs.append(output.view(-1, kv_heads * groups, v.shape[2]))
        rows = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return rows if batch.dense else rows[batch.decode_rows]


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
    """Attend to the slots; has the signature of transformers' attention functions.

    Raises:
        ModelError: the model's attention has a feature that this one lacks.
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
