"""Allows torchvision to be imported if its extension module, linked against CUDA, cannot be loaded.

Python imports this module at its start, in every process. SGLang imports torchvision, but does not use it with a
language model; torchvision itself only needs the schemas of two operators.
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
    """Defines the operators just before torchvision is imported; finds no module itself."""

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
        return  # it was loaded and defines the operators
    new: Any = torch.library.Library  # untyped in some versions of torch
    library = new("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + _SCHEMA)
    _kept.append(library)


_kept: list[object] = []
"""Keeps libraries alive: their operators are removed when they are garbage-collected."""


def _run_hidden_module() -> None:
    """Run the ``sitecustomize`` of the distribution or the user that this one hides, if there is one."""
    here = Path(__file__).parent
    path = [entry for entry in sys.path if Path(entry or ".").resolve() != here.resolve()]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Torchvision())
_run_hidden_module()
