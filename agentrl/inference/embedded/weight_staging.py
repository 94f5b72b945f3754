"""Staging of weight updates: buckets are kept until the last one arrives, and then loaded all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.core.errors import EngineError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.broadcast_group import BroadcastGroup
from agentrl.distributed.flat_bucket import total_bytes, views
from agentrl.distributed.sglang_loader.agentrl_weight_delta import ReceivedWeights, WeightChangesError
from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.weights import check_load_format
from agentrl.models.weight_checksum import tensor_checksum

_TIMEOUT_S = 300.0
"""Timeout of joining a group, and of each broadcast, in seconds."""


class WeightStaging:
    """Receives weights for a scheduler's model, which samples with all weights of a version or with none of them.

    Buckets are staged until the last one arrives, so the weights need twice their memory.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Stage weights for the model of ``scheduler``."""
        self._scheduler = scheduler
        self._staged: dict[str, Tensor] = {}
        self._held = ReceivedWeights()
        self._groups: dict[str, BroadcastGroup] = {}

    def discard(self) -> None:
        """Drop the staged buckets of an update that did not complete."""
        if self._staged:
            self.forget()
        self._staged.clear()

    def forget(self) -> None:
        """Record that the weights have no name: changes to weights with a name are refused."""
        self._held.name = None

    async def stage(self, named: Sequence[tuple[str, Tensor]], version: str | None, *, last: bool, flush: bool) -> None:
        """Stage a bucket; after the ``last`` one load all of them as ``version``, and drop the prefix cache with ``flush``.

        Raises:
            BadRequestError: it does not fit the model; nothing of it is staged.
        """
        self.forget()
        await self._stage(named, version, last=last, flush=flush)

    async def stage_changes(
        self, named: Sequence[tuple[str, Tensor]], version: str | None, *, last: bool, flush: bool
    ) -> None:
        """Stage a bucket of changes; otherwise like `stage`.

        Raises:
            BadRequestError: it is damaged, or of other weights than the model has.
        """
        weights = dict(self._scheduler.model.parameters())
        try:
            changes, new_name = self._held.receive(named)
        except (WeightChangesError, KeyError, TypeError, ValueError) as error:
            raise BadRequestError(str(error)) from error
        self._scheduler.model.check_weights([(header.name, torch.Size(header.shape)) for header, _, _ in changes])
        changed_weights = []
        for header, indices, values in changes:
            tensor = weights[header.name].detach().clone()
            if indices is None:
                tensor.copy_(values.view(header.shape))
            else:
                tensor.view(-1)[indices] = values.to(tensor.dtype)
            changed_weights.append((header.name, tensor))
        await self._stage(changed_weights, version, last=last, flush=flush)
        self._held.name = new_name

    async def _stage(
        self, named: Sequence[tuple[str, Tensor]], version: str | None, *, last: bool, flush: bool
    ) -> None:
        self._scheduler.model.check_weights([(name, tensor.shape) for name, tensor in named])
        self._staged.update(named)
        if last:
            async with self._scheduler.update(version, flush=flush):
                self._scheduler.model.load_weights(list(self._staged.items()))
            self._staged.clear()

    async def join_group(self, body: Mapping[str, Any]) -> None:
        """Join the group of an ``/init_weights_update_group`` body.

        Raises:
            BadRequestError: the group exists already, or not all ranks joined in time.
        """
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

    async def leave_group(self, name: object) -> None:
        """Leave a group after its current broadcast has ended or failed.

        Raises:
            BadRequestError: the group does not exist.
        """
        group = self._groups.pop(str(name), None)
        if group is None:
            raise BadRequestError(f"group_name={name!r}: the group to be destroyed does not exist")
        await asyncio.to_thread(group.close)

    async def receive_broadcast(self, body: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Receive the bucket that an ``/update_weights_from_distributed`` body describes.

        Raises:
            BadRequestError: they do not fit the model, the group does not exist, or the broadcast failed.
        """
        as_one = body.get("load_format") is not None
        if as_one:
            check_load_format(body)
        group = self._groups.get(str(body.get("group_name")))
        if group is None:
            raise BadRequestError(f"Failed to receive weights: there is no group {body.get('group_name')!r}")
        flat, named = _allocate(body)
        self._scheduler.model.check_weights([(name, tensor.shape) for name, tensor in named])
        try:
            await asyncio.to_thread(group.broadcast, [flat] if as_one else [tensor for _, tensor in named])
        except EngineError as error:
            raise BadRequestError(f"Failed to receive weights: {error}") from error
        return named

    def checksums(self) -> dict[str, str]:
        """Return the SHA-256 checksum of each weight by name.

        Raises:
            BadRequestError: the weights' memory was released.
        """
        self._scheduler.model.check_present()
        return {name: tensor_checksum(tensor) for name, tensor in self._scheduler.model.parameters()}


def _allocate(body: Mapping[str, Any]) -> tuple[Tensor, list[tuple[str, Tensor]]]:
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
