"""Lets torchvision be imported where its compiled half, linked against CUDA, cannot be loaded.

Python imports this module at its start, in every process. SGLang imports torchvision, but uses nothing of it with a
language model; torchvision itself only wants the schemas of two operators to be there.
"""

import ctypes
import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


class _Torchvision(importlib.abc.MetaPathFinder):
    """Defines the operators just before torchvision is imported; finds nothing itself."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname == "torchvision":
            sys.meta_path.remove(self)
            _define_operators()
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
        return  # it loads, and defines them itself
    new: Any = torch.library.Library  # untyped in some versions of torch
    library = new("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _kept.append(library)


_kept: list[object] = []
"""A library's operators go when it is collected."""


def _run_the_next() -> None:
    """Run the module of this name that this one hides, if there is one: the distribution's or the user's."""
    here = Path(__file__).parent
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Torchvision())
_run_the_next()
