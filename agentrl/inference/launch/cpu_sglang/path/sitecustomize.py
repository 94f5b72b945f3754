"""Allows torchvision to be imported if its extension module, linked against CUDA, cannot be loaded, and LoRA on a CPU.

Python imports this module at its start, in every process. SGLang imports torchvision, but does not use it with a
language model; torchvision itself only needs the schemas of two operators. SGLang's LoRA layers request pinned memory,
which torch refuses without a GPU.
"""

import ctypes
import functools
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Before(importlib.abc.MetaPathFinder):
    """Calls ``prepare`` just before ``module`` is imported; finds no module itself."""

    def __init__(self, module: str, prepare: Callable[[], None]) -> None:
        self._module = module
        self._prepare = prepare

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == self._module:
            sys.meta_path.remove(self)
            self._prepare()
        return None


def _define_operators() -> None:
    import torch

    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    for file in Path(spec.origin).parent.glob("_C*.so"):
        try:
            ctypes.CDLL(str(file))
        except OSError:
            continue
        return  # it was loaded and defines the operators
    new: Any = torch.library.Library  # untyped in some versions of torch
    library = new("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _libraries.append(library)


def _ignore_pinning() -> None:
    import torch

    def ignore_pin_memory(create: Any) -> Any:
        @functools.wraps(create)
        def call(*arguments: Any, pin_memory: bool = False, **named: Any) -> Any:
            return create(*arguments, **named)

        return call

    for name in ("tensor", "zeros", "empty"):
        setattr(torch, name, ignore_pin_memory(getattr(torch, name)))
    setattr(torch.Tensor, "pin_memory", lambda self, device=None: self)  # noqa: B010 - mypy refuses the assignment


_libraries: list[object] = []
"""Keeps libraries alive: their operators are removed when they are garbage-collected."""


def _run_hidden_module() -> None:
    """Run the ``sitecustomize`` of the distribution or the user that this one hides, if there is one."""
    folder = Path(__file__).parent
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != folder.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Before("torchvision", _define_operators))
sys.meta_path.insert(0, _Before("sglang.srt.lora.layers", _ignore_pinning))
_run_hidden_module()
