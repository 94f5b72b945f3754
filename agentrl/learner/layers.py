"""Compilation and recomputation of decoder layers, for every learner backend."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from agentrl.config.learner import Recompute
from agentrl.core.errors import ModelError
from agentrl.models.load import value_head

if TYPE_CHECKING:
    from transformers import PreTrainedModel

# Torch warns of operations in place in what is recomputed; decoder layers have none.
logging.getLogger("torch._higher_order_ops.wrap").addFilter(
    lambda record: "context_fn is passed" not in record.getMessage()
)


def decoder_layers(hf: Any) -> list[nn.Module]:
    """Return the decoder layers of a model of transformers, without blocks of its vision tower.

    Raises:
        ModelError: transformers does not say which ones they are.
    """
    blocks = set(getattr(hf, "_no_split_modules", None) or ())
    tower = vision_tower(hf)
    of_tower = set() if tower is None else set(tower.modules())
    layers = [module for module in hf.modules() if type(module).__name__ in blocks and module not in of_tower]
    if not layers:
        kind = hf.config.model_type
        raise ModelError(
            f"model.path: {type(hf).__name__} (model_type={kind!r}) names no decoder layers in transformers "
            "(_no_split_modules), which the learner divides and recomputes; choose another model"
        )
    return layers


def vision_tower(hf: PreTrainedModel) -> PreTrainedModel | None:
    """Return the vision tower of a model of transformers; None if it reads no images."""
    if not hasattr(hf.config, "vision_config") or not hasattr(hf.base_model, "get_image_features"):
        return None
    model: Any = hf
    tower: PreTrainedModel = model.get_encoder("image")
    return tower


def image_weights(hf: PreTrainedModel) -> set[str]:
    """Return the names of the weights with which a model of transformers reads images: those outside of text part and head.

    They are those of the vision tower, and of what joins it to the text part; none of a model that reads no images.
    """
    if vision_tower(hf) is None:
        return set()
    model: Any = hf
    head = model.get_output_embeddings()
    of_text = {*model.get_decoder().parameters(), *(value_head(hf) if head is None else head).parameters()}
    return {name for name, parameter in model.named_parameters() if parameter not in of_text}


def vision_blocks(hf: PreTrainedModel) -> list[nn.Module]:
    """Return the transformer blocks of a model's vision tower; an empty list if it has none."""
    tower = vision_tower(hf)
    lists = [] if tower is None else [module for module in tower.modules() if isinstance(module, nn.ModuleList)]
    return [*max(lists, key=lambda blocks: sum(parameter.numel() for parameter in blocks.parameters()), default=())]


def prepare_layers(layers: Iterable[nn.Module], *, compiled: bool, recompute: Recompute) -> None:
    """Compile every decoder layer, and recompute it in the backward pass; see `prepare_forward`."""
    for layer in layers:
        layer.forward = prepare_forward(layer.forward, compiled=compiled, recompute=recompute)


def prepare_forward(run: Callable[..., Any], *, compiled: bool, recompute: Recompute) -> Callable[..., Any]:
    """Return a layer's forward, compiled, with activations recomputed in the backward pass.

    Layers are compiled one by one: they share their code, so that it is compiled once.
    """
    if compiled:
        from torch._inductor import config as inductor_config

        record_compilation()
        # Beyond the limit layers would be interpreted without a word: rows and trees, with gradients and without, with
        # windows and without, of static and of changing lengths are compiled separately.
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        # Numbers of tokens and of rows change with every micro-batch: they are no constants, from the first step on, and
        # not the same number as a size of the model that they happen to be equal to.
        torch.fx.experimental._config.use_duck_shape = False
        # Else everything is compiled twice, as scales become constants late.
        torch._dynamo.config.specialize_float = True
        # Else micro-batches of few tokens have separate code: large reductions over tokens are fused, small ones are not.
        if hasattr(inductor_config.triton, "mix_order_reduction_non_strict_mode"):
            inductor_config.triton.mix_order_reduction_non_strict_mode = True
    if recompute in ("selective", "all_but_attention"):
        run = partial(checkpoint, run, **_OPTIONS, context_fn=_KEEP[recompute])
    if compiled:
        run = torch.compile(run, dynamic=True)
    return partial(checkpoint, run, **_OPTIONS) if recompute == "full" else run


_compile_times: list[float] = []
"""Times at which torch began and ended to compile, alternately."""


def _record_time(_: object) -> None:
    _compile_times.append(time.perf_counter())


def record_compilation() -> None:
    """Have `compilation` count the seconds from now on."""
    from torch._dynamo.callback import callback_handler

    if _record_time not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_record_time)
        callback_handler.register_end_callback(_record_time)


def compilation() -> dict[str, float]:
    """Return, as a metric, the seconds in which torch has compiled since the last call; nothing if it has not."""
    seconds = sum(end - begin for begin, end in zip(_compile_times[::2], _compile_times[1::2], strict=True))
    _compile_times.clear()
    return {"train/compile_s": seconds} if seconds else {}


_OPTIONS: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}


Contexts = tuple[AbstractContextManager[object], AbstractContextManager[object]]
"""Contexts of the forward pass and of the recomputation."""


def _products() -> set[object]:
    aten = torch.ops.aten
    return {aten.mm.default, aten.addmm.default, aten._grouped_mm.default, aten._scaled_mm.default}


def _attention() -> set[object]:
    aten = torch.ops.aten
    saved: set[object] = {
        torch.ops.higher_order.flex_attention,
        aten._flash_attention_forward.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
    if hasattr(torch.ops.agentrl, "cudnn_attention"):
        saved.add(torch.ops.agentrl.cudnn_attention.default)
    if hasattr(torch.ops.torch_attn, "_varlen_attn"):  # registered when torch.nn.attention.varlen is imported
        saved.add(torch.ops.torch_attn._varlen_attn.default)
    return saved


def _keep_products() -> Contexts:
    return _keep(_attention() | _products())


def _keep_attention() -> Contexts:
    return _keep(_attention())


_KEEP = {"selective": _keep_products, "all_but_attention": _keep_attention}


def _keep(saved: set[object]) -> Contexts:
    def policy(context: object, operation: object, *args: object, **kwargs: object) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operation in saved else CheckpointPolicy.PREFER_RECOMPUTE

    contexts: Contexts = create_selective_checkpoint_contexts(policy)  # type: ignore[no-untyped-call]
    return contexts
