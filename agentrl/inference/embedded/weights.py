"""Weights received over HTTP: SGLang's base64 pickles, unpickled without executing code."""

from __future__ import annotations

import base64
import io
import pickle
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from agentrl.distributed.base import LOAD_FORMAT
from agentrl.inference.embedded.replies import BadRequestError


def _storage(data: bytes) -> Any:
    # A pickled tensor calls torch.load with its bytes, which without weights_only would unpickle anything.
    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("torch._utils", "_rebuild_tensor_v2"): torch._utils._rebuild_tensor_v2,
    ("torch.storage", "_load_from_bytes"): _storage,
    ("collections", "OrderedDict"): OrderedDict,
    ("types", "SimpleNamespace"): SimpleNamespace,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(dtype := getattr(torch, name, None), torch.dtype):
            return dtype
        if (module, name) not in _ALLOWED:
            raise BadRequestError(f"serialized_named_tensors holds {module}.{name}: tensors only, pickled by value")
        return _ALLOWED[module, name]


def check_load_format(body: Mapping[str, Any]) -> None:
    """Check that a request is about one flat bucket.

    Raises:
        BadRequestError: it has another ``load_format``.
    """
    if (load_format := body.get("load_format")) != LOAD_FORMAT:
        raise BadRequestError(f"load_format={load_format!r}: the embedded engine supports {LOAD_FORMAT} only")


def read_named(serialized: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a list of names and tensors; see `read_bucket`."""
    pairs = _read(serialized)
    try:
        return [(str(name), tensor) for name, tensor in pairs if isinstance(tensor, Tensor)]
    except (TypeError, ValueError) as error:
        raise BadRequestError(f"serialized_named_tensors holds no named tensors: {error}") from error


def read_bucket(serialized: Sequence[str]) -> list[tuple[str, Tensor]]:
    """Return the tensors of a bucket by name: views. SGLang takes one string per tensor-parallel rank; here is one rank.

    Raises:
        BadRequestError: it cannot be read, or is not a bucket.
    """
    bucket = _read(serialized)
    try:
        flat = bucket["flattened_tensor"]
        return [
            (str(entry.name), flat[entry.start_idx : entry.end_idx].view(entry.dtype).reshape(entry.shape))
            for entry in bucket["metadata"]
        ]
    except Exception as error:  # its parts may be anything
        raise BadRequestError(f"serialized_named_tensors cannot be read: {type(error).__name__}: {error}") from error


def _read(serialized: Sequence[str]) -> Any:
    if not serialized or not isinstance(serialized[0], str):
        raise BadRequestError("serialized_named_tensors must hold one base64 string")
    try:
        return _Unpickler(io.BytesIO(base64.b64decode(serialized[0], validate=True))).load()
    except BadRequestError:
        raise
    except Exception as error:  # a broken pickle can raise anything
        raise BadRequestError(f"serialized_named_tensors cannot be read: {type(error).__name__}: {error}") from error
