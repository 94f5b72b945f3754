"""Compilation and recomputation of decoder layers, for every learner backend."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from agentrl.config.learner import Recompute

# Torch warns of operations in place in what is recomputed; decoder layers have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


def decoder_layers(hf: Any) -> list[nn.Module]:
    """Return the decoder layers of a model of transformers."""
    blocks = set(getattr(hf, "_no_split_modules", None) or ())
    layers = [module for module in hf.modules() if type(module).__name__ in blocks]
    assert layers, f"{type(hf).__name__} names no decoder layer in _no_split_modules"
    return layers


def prepare_layers(layers: Iterable[nn.Module], *, compiled: bool, recompute: Recompute) -> None:
    """Compile every decoder layer, and recompute it in the backward pass; see `prepare_forward`."""
    for layer in layers:
        layer.forward = prepare_forward(layer.forward, compiled=compiled, recompute=recompute)


def prepare_forward(run: Callable[..., Any], *, compiled: bool, recompute: Recompute) -> Callable[..., Any]:
    """Return a layer's forward, compiled, with activations recomputed in the backward pass.

    Layers are compiled one by one: they share their code, so that it is compiled once.
    """
    if compiled:
        # Beyond the limit layers would be interpreted without a word: rows and trees, with gradients and without, with
        # windows and without, of static and of changing lengths are compiled separately.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
    if recompute == "selective":
        run = partial(checkpoint, run, **_OPTIONS, context_fn=_keep_products)
    if compiled:
        run = torch.compile(run)
    return partial(checkpoint, run, **_OPTIONS) if recompute == "full" else run


_OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


def _saved_operations() -> set[Any]:
    """Return the operations whose results are kept: matrix products and attention. All else is cheap to compute again."""
    aten = torch.ops.aten
    saved = {
        aten.mm.default,
        aten.addmm.default,
        aten._grouped_mm.default,
        aten._scaled_mm.default,
        torch.ops.higher_order.flex_attention,
        aten._flash_attention_forward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):  # registered when torch.nn.attention.varlen is imported
        saved.add(torch.ops.torch_attn._varlen_attn.default)
    return saved


def _keep_products() -> Any:
    saved = _saved_operations()

    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
