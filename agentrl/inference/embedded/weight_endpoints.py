"""Endpoints of SGLang that update and check the engine's weights.

The model samples with all weights of a version or with none of them: buckets are staged until the last one arrives, and
then loaded all at once, so the weights need twice their memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import torch
from starlette.responses import Response
from starlette.routing import Route
from torch import Tensor

from agentrl.core.errors import EngineError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.broadcast_group import BroadcastGroup
from agentrl.distributed.flat_bucket import total_bytes, views
from agentrl.distributed.sglang_loader import LOADER
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import ReceivedWeights, WeightChangesError
from agentrl.inference.embedded.adapters import check_sums
from agentrl.inference.embedded.replies import BadRequestError, Body, json_reply, with_body
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.weights import check_load_format, read_bucket, read_named
from agentrl.models.weight_checksum import tensor_checksum

_TIMEOUT_S = 300.0
"""Timeout of joining a group, and of each broadcast, in seconds."""

Named = Sequence[tuple[str, Tensor]]


class WeightEndpoints:
    """Weight updates from disk, from tensors in the body and from a broadcast, LoRA adapters, and checksums."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Serve weight updates of the model of ``scheduler``."""
        self._scheduler = scheduler
        self._model = scheduler.model
        self._staged: dict[str, Tensor] = {}
        self._held = ReceivedWeights()
        """The name of the weights; without one, changes to weights with a name are refused."""
        self._groups: dict[str, BroadcastGroup] = {}

    def routes(self) -> list[Route]:
        """Return the routes; all of them take POST."""
        handlers = {
            "/begin_weight_update": self._begin_update,
            "/end_weight_update": self._end_update,
            "/update_weights_from_tensor": self._update_from_tensor,
            "/update_weights_from_disk": self._update_from_disk,
            "/init_weights_update_group": self._join_group,
            "/update_weights_from_distributed": self._update_from_distributed,
            "/destroy_weights_update_group": self._leave_group,
            "/weights_checker": self._check_weights,
            "/load_lora_adapter_from_tensors": self._load_adapter,
            "/unload_lora_adapter": self._unload_adapter,
            "/update_weight_version": self._update_version,
        }
        return [Route(path, with_body(handler), methods=["POST"]) for path, handler in handlers.items()]

    async def _begin_update(self, body: Body) -> Response:
        """Admit no request until `_end_update`, and wait for the running ones."""
        self._scheduler.begin_update()
        self._discard()
        await self._scheduler.wait_idle()
        return _success_reply()

    async def _end_update(self, body: Body) -> Response:
        self._discard()
        self._scheduler.end_update()
        return _success_reply()

    def _discard(self) -> None:
        """Drop the staged buckets of an update that did not complete."""
        if self._staged:
            self._held.name = None
        self._staged.clear()

    async def _update_from_tensor(self, body: Body) -> Response:
        """Load the tensors in the body; begin and end are optional, as in SGLang before 0.5.23."""
        serialized = body.get("serialized_named_tensors") or []
        if body.get("load_format") == LOADER:
            changed_weights, new_name = self._apply_changes(read_named(serialized))
            await self._stage(changed_weights, body)
            self._held.name = new_name
            return _success_reply()
        check_load_format(body)
        named = read_bucket(serialized)
        self._held.name = None
        await self._stage(named, body)
        return _success_reply()

    def _apply_changes(self, named: Named) -> tuple[Named, str | None]:
        """Return the weights that a bucket of changes changes, and the name of all weights with them.

        Raises:
            BadRequestError: it is damaged, or of other weights than the model has.
        """
        weights = dict(self._model.parameters())
        try:
            changes, new_name = self._held.receive(named)
        except (WeightChangesError, KeyError, TypeError, ValueError) as error:
            raise BadRequestError(str(error)) from error
        self._model.check_weights([(header.name, torch.Size(header.shape)) for header, _, _ in changes])
        changed_weights = []
        for header, indices, values in changes:
            tensor = weights[header.name].detach().clone()
            if indices is None:
                tensor.copy_(values.view(header.shape))
            else:
                tensor.view(-1)[indices] = values.to(tensor.dtype)
            changed_weights.append((header.name, tensor))
        return changed_weights, new_name

    async def _stage(self, named: Named, body: Body) -> None:
        """Stage a bucket. One that flushes the cache or has a version is the last one: all of them are loaded.

        Raises:
            BadRequestError: it does not fit the model; nothing of it is staged.
        """
        self._model.check_weights([(name, tensor.shape) for name, tensor in named])
        self._staged.update(named)
        if _flushes(body) or body.get("weight_version") is not None:
            async with self._scheduler.update(_version(body), flush=_flushes(body)):
                self._model.load_weights(list(self._staged.items()))
            self._staged.clear()

    async def _update_from_disk(self, body: Body) -> Response:
        folder = body.get("model_path")
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise BadRequestError(f"model_path={folder!r} is not a folder")
        async with self._scheduler.update(_version(body), flush=_flushes(body)):
            self._held.name = None
            self._model.load_folder(Path(folder))
        return _success_reply()

    async def _join_group(self, body: Body) -> Response:
        try:
            group = WeightGroup(
                name=str(body["group_name"]),
                host=str(body["master_address"]),
                port=int(body["master_port"]),
                size=int(body["world_size"]),
                backend=str(body.get("backend", "nccl")),
            )
            rank = int(body["rank_offset"])
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequestError(f"init_weights_update_group: {type(error).__name__} {error}") from error
        if group.backend != "gloo":
            raise BadRequestError(f"backend={group.backend!r}: the embedded engine supports gloo only")
        if group.name in self._groups:
            raise BadRequestError(f"group_name={group.name!r} exists already")
        try:
            self._groups[group.name] = await asyncio.to_thread(BroadcastGroup.join, group, rank, timeout_s=_TIMEOUT_S)
        except EngineError as error:
            raise BadRequestError(str(error)) from error
        return _success_reply()

    async def _update_from_distributed(self, body: Body) -> Response:
        """Load tensors that rank 0 of a process group broadcasts; otherwise as `_update_from_tensor`."""
        as_one = body.get("load_format") is not None
        if as_one:
            check_load_format(body)
        group = self._groups.get(str(body.get("group_name")))
        if group is None:
            raise BadRequestError(f"Failed to receive weights: there is no group {body.get('group_name')!r}")
        flat, named = _allocate(body)
        self._model.check_weights([(name, tensor.shape) for name, tensor in named])
        try:
            await asyncio.to_thread(group.broadcast, [flat] if as_one else [tensor for _, tensor in named])
        except EngineError as error:
            raise BadRequestError(f"Failed to receive weights: {error}") from error
        self._held.name = None
        await self._stage(named, body)
        return _success_reply()

    async def _leave_group(self, body: Body) -> Response:
        """Leave a process group after its current broadcast has ended or failed."""
        name = body.get("group_name")
        group = self._groups.pop(str(name), None)
        if group is None:
            raise BadRequestError(f"group_name={name!r}: the group to be destroyed does not exist")
        await asyncio.to_thread(group.close)
        return _success_reply()

    async def _load_adapter(self, body: Body) -> Response:
        """Load a LoRA adapter, which requests name as ``lora_path``."""
        check_load_format(body)
        name, config = body.get("lora_name"), body.get("config_dict")
        if not isinstance(name, str) or not name or not isinstance(config, dict):
            raise BadRequestError("load_lora_adapter_from_tensors needs lora_name and config_dict")
        named = read_bucket(body.get("serialized_named_tensors") or [])
        check_sums(named, body.get("expected_checksums") or {})
        self._scheduler.adapters.add(name, self._model.merged(config, named))
        return _success_reply()

    async def _unload_adapter(self, body: Body) -> Response:
        self._scheduler.adapters.remove(body.get("lora_name"))
        return _success_reply()

    async def _update_version(self, body: Body) -> Response:
        """Set the version that the engine reports; weights stay."""
        self._scheduler.version = str(body.get("new_version"))
        return _success_reply()

    async def _check_weights(self, body: Body) -> Response:
        if body.get("action", "checksum") != "checksum":
            raise BadRequestError(f"action={body['action']!r}: the embedded engine supports checksum only")
        self._model.check_present()
        checksums = await asyncio.to_thread(
            lambda: {name: tensor_checksum(tensor) for name, tensor in self._model.parameters()}
        )
        return json_reply({"success": True, "message": "Success.", "ranks": [{"checksums": checksums}]})


def _version(body: Body) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


def _flushes(body: Body) -> bool:
    return body.get("flush_cache") is not False


def _success_reply() -> Response:
    return json_reply({"success": True, "message": "Success", "num_paused_requests": 0})


def _allocate(body: Body) -> tuple[Tensor, list[tuple[str, Tensor]]]:
    """Return uninitialised bytes, and the tensors in them, of the names, dtypes and shapes of a body."""
    try:
        specs = [
            TensorSpec(str(name), str(dtype), tuple(int(size) for size in shape))
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True)
        ]
        flat = torch.empty(total_bytes(*specs), dtype=torch.uint8)
        return flat, views(specs, flat)
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadRequestError(f"names, dtypes and shapes: {type(error).__name__} {error}") from error
