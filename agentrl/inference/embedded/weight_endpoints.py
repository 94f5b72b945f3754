"""Endpoints of SGLang that update and check the engine's weights."""

from __future__ import annotations

import asyncio
from pathlib import Path

from starlette.responses import Response
from starlette.routing import Route

from agentrl.distributed.sglang_loader import LOADER
from agentrl.inference.embedded.adapters import check_sums
from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.replies import Body, json_reply, with_body
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.weight_staging import WeightStaging
from agentrl.inference.embedded.weights import check_load_format, read_bucket, read_named


class WeightEndpoints:
    """Weight updates from disk, from tensors in the body and from a broadcast, LoRA adapters, and checksums."""

    def __init__(self, scheduler: Scheduler) -> None:
        """Serve weight updates of the model of ``scheduler``."""
        self._scheduler = scheduler
        self._staging = WeightStaging(scheduler)

    def routes(self) -> list[Route]:
        """Return the routes; all of them take POST."""
        handlers = {
            "/begin_weight_update": self.begin_update,
            "/end_weight_update": self.end_update,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/update_weights_from_disk": self.update_from_disk,
            "/init_weights_update_group": self.init_group,
            "/update_weights_from_distributed": self.update_from_distributed,
            "/destroy_weights_update_group": self.destroy_group,
            "/weights_checker": self.check_weights,
            "/load_lora_adapter_from_tensors": self.load_adapter,
            "/unload_lora_adapter": self.unload_adapter,
            "/update_weight_version": self.update_version,
        }
        return [Route(path, with_body(handler), methods=["POST"]) for path, handler in handlers.items()]

    async def begin_update(self, body: Body) -> Response:
        """Admit no request until `end_update`, and wait for the running ones."""
        self._scheduler.begin_update()
        self._staging.discard()
        await self._scheduler.wait_idle()
        return _success_reply()

    async def end_update(self, body: Body) -> Response:
        """Admit requests again."""
        self._staging.discard()
        self._scheduler.end_update()
        return _success_reply()

    async def update_from_tensor(self, body: Body) -> Response:
        """Load the tensors in the body; begin and end are optional, as in SGLang before 0.5.23."""
        serialized = body.get("serialized_named_tensors") or []
        if body.get("load_format") == LOADER:
            await self._staging.stage_changes(
                read_named(serialized), _version(body), last=_is_last(body), flush=_flushes(body)
            )
            return _success_reply()
        check_load_format(body)
        named = read_bucket(serialized)
        await self._staging.stage(named, _version(body), last=_is_last(body), flush=_flushes(body))
        return _success_reply()

    async def update_from_disk(self, body: Body) -> Response:
        """Load the weights of the folder ``model_path``."""
        folder = body.get("model_path")
        if not isinstance(folder, str) or not Path(folder).is_dir():
            raise BadRequestError(f"model_path={folder!r} is not a folder")
        async with self._scheduler.update(_version(body), flush=_flushes(body)):
            self._staging.forget()
            self._scheduler.model.load_folder(Path(folder))
        return _success_reply()

    async def init_group(self, body: Body) -> Response:
        """Join a process group in which weights are broadcast."""
        await self._staging.join_group(body)
        return _success_reply()

    async def update_from_distributed(self, body: Body) -> Response:
        """Load tensors that rank 0 of a process group broadcasts; otherwise as `update_from_tensor`."""
        named = await self._staging.receive_broadcast(body)
        await self._staging.stage(named, _version(body), last=_is_last(body), flush=_flushes(body))
        return _success_reply()

    async def destroy_group(self, body: Body) -> Response:
        """Leave a process group."""
        await self._staging.leave_group(body.get("group_name"))
        return _success_reply()

    async def load_adapter(self, body: Body) -> Response:
        """Load a LoRA adapter, which requests name as ``lora_path``."""
        check_load_format(body)
        name, config = body.get("lora_name"), body.get("config_dict")
        if not isinstance(name, str) or not name or not isinstance(config, dict):
            raise BadRequestError("load_lora_adapter_from_tensors needs lora_name and config_dict")
        named = read_bucket(body.get("serialized_named_tensors") or [])
        check_sums(named, body.get("expected_checksums") or {})
        self._scheduler.adapters.add(name, self._scheduler.model.merged(config, named))
        return _success_reply()

    async def unload_adapter(self, body: Body) -> Response:
        """Unload a LoRA adapter; requests in progress keep it."""
        self._scheduler.adapters.remove(body.get("lora_name"))
        return _success_reply()

    async def update_version(self, body: Body) -> Response:
        """Set the version that the engine reports; weights stay."""
        self._scheduler.version = str(body.get("new_version"))
        return _success_reply()

    async def check_weights(self, body: Body) -> Response:
        """Return the checksum of each weight."""
        if body.get("action", "checksum") != "checksum":
            raise BadRequestError(f"action={body['action']!r}: the embedded engine supports checksum only")
        checksums = await asyncio.to_thread(self._staging.checksums)
        return json_reply({"success": True, "message": "Success.", "ranks": [{"checksums": checksums}]})


def _version(body: Body) -> str | None:
    version = body.get("weight_version")
    return None if version is None else str(version)


def _flushes(body: Body) -> bool:
    return body.get("flush_cache") is not False


def _is_last(body: Body) -> bool:
    """Return whether the staged buckets are to be loaded: a bucket that flushes the cache or has a version is the last one."""
    return _flushes(body) or body.get("weight_version") is not None


def _success_reply() -> Response:
    return json_reply({"success": True, "message": "Success", "num_paused_requests": 0})
