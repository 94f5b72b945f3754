"""Megatron-Core on a CPU, where it calls CUDA whatever the device of its tensors.

`computing_on` is entered by the thread that calls Megatron-Core, around every call.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from types import ModuleType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

_CPU = torch.device("cpu")
_CUDA, _TYPE = torch.Tensor.cuda, torch.Tensor.type


def computing_on(device: torch.device, *, compiled: bool = False) -> AbstractContextManager[None]:
    """Return the context in which Megatron-Core computes on ``device``, if this thread is not in it.

    Args:
        device: of the rank.
        compiled: whether code is compiled on a CPU. Megatron-Core always compiles, for longer than a small run takes.
    """
    modes = _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    is_active = any(isinstance(mode, _CudaTensorsOnCpu) for mode in modes)
    return nullcontext() if device.type == "cuda" or is_active else _on_cpu(compiled)


@contextmanager
def _on_cpu(compiled: bool) -> Iterator[None]:
    """Redirect the CUDA calls of Megatron-Core to the CPU."""
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import token_dispatcher

    calls: dict[ModuleType, Mapping[str, Callable[..., Any]]] = {
        torch.cuda: _TORCH_CUDA,
        random: {
            "_get_cuda_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
            "_set_cuda_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        },
        token_dispatcher: {"maybe_move_tensor_to_cpu": _as_cpu},
    }
    log = logging.getLogger(random.__name__)
    with ExitStack() as stack:
        for module, replaced in calls.items():
            stack.enter_context(_replacing(module, replaced))
        # Megatron-Core warns if the CPU's random state changes; on a CPU there is no other.
        log.addFilter(_is_not_rng_warning)
        stack.callback(log.removeFilter, _is_not_rng_warning)
        if not compiled:
            stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(_CudaTensorsOnCpu())
        yield


@contextmanager
def _replacing(module: ModuleType, replaced: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    originals = {name: getattr(module, name) for name in replaced}
    vars(module).update(replaced)
    try:
        yield
    finally:
        vars(module).update(originals)


class _CudaTensorsOnCpu(TorchFunctionMode):
    """Makes tensors on the CPU that are requested on a GPU, or in pinned memory."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is _CUDA:
            return args[0]
        if not kwargs:  # most calls, of which a step has thousands
            result = func(*args)
            # Optimizers compare names of types with those on GPUs.
            return result.replace("torch.", "torch.cuda.", 1) if func is _TYPE and len(args) == 1 else result
        options = dict(kwargs)
        if "device" in options and str(options["device"]).startswith("cuda"):
            options["device"] = _CPU
        if func is not torch.Tensor.pin_memory:
            options.pop("pin_memory", None)
        return func(*args, **options)


class _Stream:
    """A CUDA stream or event on a CPU, which computes everything in order."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def record_event(self, *args: object) -> _Stream:
        return self

    def wait_stream(self, *args: object) -> None:
        pass

    wait = wait_event = synchronize = record = wait_stream

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0


def _as_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """Return sizes as numpy if requested: Megatron-Core does so only for tensors on a GPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


def _is_not_rng_warning(record: logging.LogRecord) -> bool:
    return "CPU RNG state changed" not in record.getMessage()


_TORCH_CUDA: dict[str, Callable[..., Any]] = {
    "current_device": lambda: _CPU,
    "synchronize": lambda *args: None,
    "empty_cache": lambda: None,
    "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
    "get_rng_state": lambda *args: torch.get_rng_state(),
    "Stream": _Stream,
    "Event": _Stream,
    "current_stream": lambda *args: _Stream(),
    "default_stream": lambda *args: _Stream(),
    "stream": lambda stream: nullcontext(),
}
