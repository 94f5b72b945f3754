"""Weights received over HTTP: SGLang's base64 pickles, unpickled without executing code."""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.inference.embedded.errors import BadRequestError


def _storage(data: bytes) -> Any:
    # A pickled tensor calls torch.load with its bytes, which without weights_only would unpickle anything.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch._utils", "_rebuild_parameter"): torch._utils._rebuild_parameter,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise BadRequestError(f"serialized_named_tensors holds {module}.{name}: tensors only, pickled by value")
        return _ALLOWED[module, name]


def read_named_tensors(serialized: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the ``(name, tensor)`` pairs of a base64 pickle. SGLang takes one per tensor-parallel rank; here is one rank.

    Raises:
        BadRequestError: it cannot be read, or holds anything but tensors.
    """
    if not serialized or not isinstance(serialized[0], str):
        raise BadRequestError("serialized_named_tensors must hold one base64 string")
    try:
        named = _Unpickler(io.BytesIO(base64.b64decode(serialized[0], validate=True))).load()
    except BadRequestError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise BadRequestError(f"serialized_named_tensors cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(named, list):
        raise BadRequestError(f"serialized_named_tensors holds a {type(named).__name__}, not a list")
    for pair in named:
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and isinstance(pair[1], Tensor)):
            raise BadRequestError("serialized_named_tensors must hold pairs of a name and a tensor")
    return [(str(name), tensor) for name, tensor in named]
