"""Changes of weights: their encoding, and SGLang's custom weight loader that applies them; and a loader of whole weights.

SGLang imports this file by itself (``--custom-weight-loader agentrl_weight_loaders.load_changes``), from the folder in which
it is: it may import nothing of agentrl.

SGLang passes an entry of the request to each tensor-parallel rank of an engine. Only the first rank's entry has the payload
of a bucket, or that rank fetches it from the sender: it broadcasts the payload to the others, over the links between the engine's
GPUs (`EncodedBucket`).

A bucket of changes is a header and a payload of bytes. Of each weight the payload has the changed numbers, and where they are:
the count of unchanged ones before each, in a byte. The byte 255 stands for 255 unchanged numbers, and the count continues in the
next byte. A weight for which that is not less is sent whole.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import pickle
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from http import HTTPStatus
from http.client import HTTPException
from typing import Any, Protocol, TypedDict

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

_SKIP = 255
_HELD = "_agentrl_weights_held"
"""Attribute of SGLang's model: name of the weights that it has, as far as the loader knows."""
_FLOAT8 = torch.float8_e4m3fn
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, _FLOAT8)
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
_FETCH_S = 60.0
"""In which some bytes of a payload must come."""
_PROBE_S = 5.0
"""The same for a probe: a firewall between engine and sender may answer nothing at all."""
_ATTEMPTS = 3
_SYNCHRONOUS = "_sglang_runai_streamer_tensor"
"""Attribute of tensors that SGLang's loaders copy at once. They copy others on a CPU in threads, where `_Masked` is not."""


class WeightChangesError(ValueError):
    """Changes cannot be applied to the weights that are there."""


@dataclass(frozen=True, slots=True)
class Part:
    """The changes of one weight in the payload: first the places, if it has any, then the numbers."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    places: int | None
    """Bytes of the places; None: the weight is sent whole."""
    changed: int
    """How many numbers are sent."""


@dataclass(frozen=True, slots=True)
class Changes:
    """The changes of a bucket of weights."""

    parts: Sequence[Part]
    payload: torch.Tensor
    """uint8 bytes on the CPU."""


EncodedWeight = tuple[Part, list[torch.Tensor]]
"""The changes of a weight, and the pieces of their payload."""


@dataclass(frozen=True)
class EncodedBucket:
    """A bucket, from which the entries of SGLang's ``serialized_named_tensors`` are made."""

    header: _Header
    payload: torch.Tensor
    """uint8 bytes on the CPU."""

    @cached_property
    def first(self) -> str:
        """The entry of an engine's first tensor-parallel rank: header and payload."""
        return _entry(self.header, self.payload)

    def by_rank(self, ranks: int, url: str = "") -> list[str]:
        """Return the entries of an engine of so many tensor-parallel ranks.

        Args:
            ranks: how many.
            url: where the first rank fetches the payload; empty: it is in that rank's entry.
        """
        header = self.header
        if url:
            header = {**header, "url": url}
        without_payload = _entry(header, self.payload.new_empty(0))
        return [without_payload if url else self.first, *[without_payload] * (ranks - 1)]


def probe_entries(url: str, ranks: int) -> list[str]:
    """Return the entries of a request with which an engine tries to fetch one byte; see `try_fetch`."""
    return EncodedBucket({"bytes": 1}, torch.zeros(1, dtype=torch.uint8)).by_rank(ranks, url)


def encode(name: str, new: torch.Tensor, old: torch.Tensor | None) -> EncodedWeight:
    """Return the changes of a weight.

    Args:
        name: of the weight.
        new: the weight.
        old: what the receiver has, of the same dtype and shape; None: nothing.

    Raises:
        WeightChangesError: a number that would be sent is not finite.
    """
    flat, size = new.detach().reshape(-1), new.element_size()
    dtype, shape = str(new.dtype).removeprefix("torch."), tuple(new.shape)
    if old is not None:
        words = flat.view(_WORDS[size])
        changed = (words != old.reshape(-1).view(words.dtype)).nonzero()[:, 0]
        if not len(changed):
            return Part(name, dtype, shape, 0, 0), []
        places, values = _places(changed), words[changed].view(new.dtype)
        if len(places) + len(values) * size < len(flat) * size:
            _check_finite(name, values)
            return Part(name, dtype, shape, len(places), len(values)), [places, values.view(torch.uint8)]
    _check_finite(name, flat)
    return Part(name, dtype, shape, None, len(flat)), [flat.view(torch.uint8)]


def _check_finite(name: str, values: torch.Tensor) -> None:
    if bool(_is_nan(values).any()) or (values.dtype != _FLOAT8 and bool(torch.isinf(values).any())):
        raise WeightChangesError(f"the weight {name} has a number that is not finite")


def _is_nan(values: torch.Tensor) -> torch.Tensor:
    """Return where numbers are NaN; float8_e4m3fn has no infinity, and torch compares none of its numbers."""
    return (values.view(torch.uint8) & 127) == 127 if values.dtype == _FLOAT8 else torch.isnan(values)


def _places(changed: torch.Tensor) -> torch.Tensor:
    gaps = torch.diff(changed, prepend=changed.new_full((1,), -1)) - 1
    ends = (gaps // _SKIP + 1).cumsum(0)
    places = torch.full((int(ends[-1]),), _SKIP, dtype=torch.uint8, device=changed.device)
    places[ends - 1] = (gaps % _SKIP).to(torch.uint8)
    return places


def positions(places: torch.Tensor) -> torch.Tensor:
    """Return the indices of the changed numbers in the flat weight."""
    ends = places != _SKIP
    encoded = places.to(torch.int64).cumsum(0)[ends]
    return encoded + torch.arange(len(encoded), device=places.device)


def read(parts: Sequence[Part], payload: torch.Tensor) -> list[tuple[Part, torch.Tensor | None, torch.Tensor]]:
    """Return each part with the indices of its numbers in the flat weight (None: all of them), and the numbers."""
    decoded, at = [], 0
    for part in parts:
        indices = None
        if part.places is not None:
            indices, at = positions(payload[at : at + part.places]), at + part.places
        dtype: torch.dtype = getattr(torch, part.dtype)
        end = at + part.changed * dtype.itemsize
        # A view would need an offset that the dtype divides.
        decoded.append((part, indices, payload[at:end].clone().view(dtype)))
        at = end
    return decoded


class _Header(TypedDict, total=False):
    """What each rank reads of a bucket. One of changes has all but ``weights``, one of whole weights these and ``bytes``."""

    bytes: int
    url: str
    """Where the first rank fetches the payload, if it is not in its entry."""
    weights: list[tuple[str, str, list[int]]]
    base: str | None
    held: str
    number: int
    last: bool
    sha256: str
    parts: list[tuple[str, str, list[int], int | None, int]]


class _RankGroup(Protocol):
    """SGLang's group of ranks."""

    world_size: int
    rank_in_group: int
    ranks: list[int]
    device_group: dist.ProcessGroup


class _LoadsWeights(Protocol):
    """SGLang's model."""

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> object:
        """Load whole weights by Hugging Face name."""


def encode_changes(changes: Changes, *, base: str | None, held: str, number: int, last: bool) -> EncodedBucket:
    """Return a bucket of changes as it is sent.

    Args:
        changes: of the bucket.
        base: name of the weights to which they are changes; None: all weights are sent whole.
        held: name of the weights that the receiver has after the last bucket.
        number: of the bucket, from 0.
        last: whether no bucket follows.
    """
    header: _Header = {
        "bytes": len(changes.payload),
        "base": base,
        "held": held,
        "number": number,
        "last": last,
        "sha256": hashlib.sha256(changes.payload.numpy().data).hexdigest(),
        "parts": [(part.name, part.dtype, [*part.shape], part.places, part.changed) for part in changes.parts],
    }
    return EncodedBucket(header, changes.payload)


def encode_whole(flat: torch.Tensor, weights: Sequence[tuple[str, str, Sequence[int]]]) -> EncodedBucket:
    """Return a bucket of whole weights as it is sent; see `load_bucket`.

    Args:
        flat: uint8 bytes of all weights on the CPU, without padding.
        weights: name, dtype and shape of each, in the order of ``flat``. None begins where its dtype cannot.
    """
    header: _Header = {"bytes": len(flat), "weights": [(name, dtype, [*shape]) for name, dtype, shape in weights]}
    return EncodedBucket(header, flat)


def _entry(header: _Header, payload: torch.Tensor) -> str:
    encoded = torch.frombuffer(bytearray(json.dumps(header).encode()), dtype=torch.uint8)
    return base64.b64encode(pickle.dumps([("header", encoded), ("payload", payload)])).decode()


def _decode(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[_Header, torch.Tensor]:
    """Return header and payload of a rank's entry."""
    tensors = dict(named)
    header: _Header = json.loads(tensors["header"].cpu().numpy().tobytes())
    return header, tensors["payload"]


def _decode_shared(named: Sequence[tuple[str, torch.Tensor]]) -> tuple[_Header, torch.Tensor | None]:
    """Return header and payload of a bucket, which the engine's first tensor-parallel rank broadcasts to the others.

    The payload is None on all ranks if the sender has ended, or has given up this request: an exception would end SGLang.
    """
    header, payload = _decode(named)
    group = _tensor_parallel_group() if header["bytes"] else None
    is_first = group is None or group.rank_in_group == 0
    if header["bytes"] and (url := header.get("url")):
        fetched = _fetch_if_served(url, header["bytes"]) if is_first else None
        is_served = payload.new_full((1,), fetched is not None)
        if group is not None:
            dist.broadcast(is_served, src=group.ranks[0], group=group.device_group)
        if not bool(is_served):
            return header, None
        payload = payload if fetched is None else fetched.to(payload.device)
    if not is_first:
        payload = payload.new_empty(header["bytes"])
    if group is not None:
        dist.broadcast(payload, src=group.ranks[0], group=group.device_group)
    return header, payload


def _fetch_if_served(url: str, size: int) -> torch.Tensor | None:
    """Return the payload; None if the sender, which serves it as long as it waits for the engine, no longer does.

    Raises:
        OSError, HTTPException: see `fetch`.
    """
    try:
        return fetch(url, size, _ATTEMPTS)
    except urllib.error.URLError as error:
        if isinstance(error.reason, ConnectionRefusedError) or getattr(error, "code", None) == HTTPStatus.NOT_FOUND:
            return None
        raise


def _tensor_parallel_group() -> _RankGroup | None:
    """Return SGLang's group of several tensor-parallel ranks; None if there is one rank, or no SGLang in this process."""
    distributed = sys.modules.get("sglang.srt.distributed")
    if distributed is None or not (dist.is_available() and dist.is_initialized()):
        return None
    group: _RankGroup = distributed.get_tp_group()
    return group if group.world_size > 1 else None


def fetch(url: str, size: int, attempts: int, timeout_s: float = _FETCH_S) -> torch.Tensor:
    """Return ``size`` bytes from the sender.

    Raises:
        OSError: they do not come.
        HTTPException: what answers there speaks no HTTP.
    """
    payload = torch.empty(size, dtype=torch.uint8)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for attempt in range(1, attempts + 1):
        try:
            with opener.open(url, timeout=timeout_s) as reply:
                at, view = 0, payload.numpy().data
                while at < size:
                    count = reply.readinto(view[at:])
                    if not count:
                        raise ConnectionError(f"{url} ended after {at} of {size} bytes")
                    at += count
                return payload
        except (OSError, HTTPException):
            if attempt == attempts:
                raise
            time.sleep(attempt)
    raise AssertionError("the loop returns or raises")


def try_fetch(model: object, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Fetch a payload if that is possible, and load nothing: a custom weight loader. The sender sees whether it was fetched."""
    header, _ = _decode(named_tensors)
    group = _tensor_parallel_group()
    if group is None or group.rank_in_group == 0:
        with suppress(OSError, HTTPException):
            fetch(header["url"], header["bytes"], 1, _PROBE_S)


class ReceivedWeights:
    """The name of the weights that a receiver has."""

    def __init__(self) -> None:
        self.name: str | None = None

    def receive(
        self, named: Sequence[tuple[str, torch.Tensor]]
    ) -> tuple[list[tuple[Part, torch.Tensor | None, torch.Tensor]], str]:
        """Check a bucket that `encode_changes` made, in an engine with one rank; see `check`."""
        return self.check(*_decode(named))

    def check(
        self, header: _Header, payload: torch.Tensor
    ) -> tuple[list[tuple[Part, torch.Tensor | None, torch.Tensor]], str]:
        """Check a bucket; return what `read` returns, and the name of the weights after it.

        Until it is applied nothing is held.

        Raises:
            WeightChangesError: it is damaged, or of other weights than are held.
        """
        if hashlib.sha256(payload.cpu().numpy().data).hexdigest() != header["sha256"]:
            raise WeightChangesError("the changes of weights are damaged: they have another SHA-256 sum than was sent")
        base = header["base"] if header["number"] == 0 else _partial(header["held"], header["number"])
        if base is not None and base != self.name:
            raise WeightChangesError(
                f"the changes are to the weights {base}, and here are {self.name}: send all weights first"
            )
        self.name = None
        parts = [
            Part(name, dtype, tuple(shape), places, changed) for name, dtype, shape, places, changed in header["parts"]
        ]
        new_name = header["held"] if header["last"] else _partial(header["held"], header["number"] + 1)
        return read(parts, payload), new_name


def _partial(held: str, number: int) -> str:
    return f"{held}, {number} buckets"


def load_changes(model: Any, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Apply a bucket of changes to an SGLang model: its custom weight loader.

    Every weight is passed to the model's ``load_weights`` with NaN in place of what has not changed, and NaN is not written
    into its parameters. So fused and sharded weights are loaded as SGLang loads whole ones.

    Raises:
        WeightChangesError: they are damaged, are changes to other weights, or the model does not load weights by copies.
    """
    received = getattr(model, _HELD, None) or ReceivedWeights()
    setattr(model, _HELD, received)
    header, payload = _decode_shared(named_tensors)
    if payload is None:
        return
    changes, new_name = received.check(header, payload)
    with _Masked(model.parameters()):
        model.load_weights((change[0].name, _fill_with_nan(*change)) for change in changes)
    broken = [_is_nan(parameter).any() for parameter in model.parameters() if parameter.dtype in _FLOATS]
    if bool(torch.stack(broken).any()):
        raise WeightChangesError(
            "this model does not load weights by copies into its parameters: set weights.transport=tensor"
        )
    received.name = new_name


def load_bucket(model: _LoadsWeights, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Load a bucket of whole weights into an SGLang model, as SGLang's ``flattened_bucket`` does: a custom weight loader."""
    header, payload = _decode_shared(named_tensors)
    if payload is None:
        return
    weights, at = [], 0
    for name, dtype_name, shape in header["weights"]:
        dtype: torch.dtype = getattr(torch, dtype_name)
        end = at + math.prod(shape) * dtype.itemsize
        weights.append((name, payload[at:end].view(dtype).view(shape)))
        at = end
    model.load_weights(weights)


def _fill_with_nan(part: Part, indices: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    """Return a weight with NaN in place of what was not sent."""
    if indices is None:
        weight = values
    else:
        words = _WORDS[values.element_size()]
        nan = torch.tensor(float("nan")).to(values.dtype).view(words)
        weight = nan.to(values.device).repeat(math.prod(part.shape))
        weight[indices] = values.view(words)
    weight = weight.view(values.dtype).view(part.shape)
    setattr(weight, _SYNCHRONOUS, True)
    return weight


class _Masked(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Leaves out NaN in copies into parameters."""

    def __init__(self, parameters: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._storages = {parameter.untyped_storage().data_ptr() for parameter in parameters}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default and args[0].untyped_storage().data_ptr() in self._storages:
            into, source, *options = args
            if into.dtype not in _FLOATS:
                raise WeightChangesError(
                    f"a parameter of {into.dtype} cannot take changes: set weights.transport=tensor for quantized engines"
                )
            if (into.dtype == _FLOAT8) != (source.dtype == _FLOAT8):
                raise WeightChangesError(f"a parameter of {into.dtype} cannot take changes of {source.dtype}")
            source = source.to(device=into.device, dtype=into.dtype)
            words = _WORDS[into.element_size()]
            merged = torch.where(_is_nan(source), into.view(words), source.view(words))
            args = (into, merged.view(into.dtype), *options)
        return func(*args, **(kwargs or {}))
