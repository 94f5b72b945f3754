"""New weights for the engine: buckets are kept aside until the last one, and then taken all at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from agentrl.core.errors import EngineError
from agentrl.distributed.base import WeightGroup
from agentrl.distributed.broadcast_group import BroadcastGroup
from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.models.weight_checksum import digest

_TIMEOUT_S = 300.0
"""Seconds that joining a group, and then each tensor, may take."""


class Incoming:
    """Takes weights for a scheduler's model, so that it samples with all of a version's or with none.

    A bucket that does not flush the prefix cache waits for one that does. Memory for the weights is taken twice then.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        """Serve ``scheduler``."""
        self._scheduler = scheduler
        self._waiting: dict[str, Tensor] = {}
        self._groups: dict[str, BroadcastGroup] = {}

    def drop(self) -> None:
        """Forget buckets whose last one did not come."""
        self._waiting.clear()

    async def take(self, named: Sequence[tuple[str, Tensor]], version: str | None, *, last: bool) -> None:
        """Take a bucket.

        Raises:
            BadRequestError: it does not fit the model; nothing of it is taken.
        """
        self._scheduler.model.check_weights([(name, tensor.shape) for name, tensor in named])
        self._waiting.update(named)
        if last:
            async with self._scheduler.update(version):
                self._scheduler.model.load_weights(list(self._waiting.items()))
            self.drop()

    async def join(self, body: Mapping[str, Any]) -> None:
        """Join the group of ``/init_weights_update_group``.

        Raises:
            BadRequestError: it is there already, or not all ranks come.
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
            raise BadRequestError(f"backend={group.backend!r}: the embedded engine has gloo")
        if group.name in self._groups:
            raise BadRequestError(f"group_name={group.name!r} is there already")
        try:
            self._groups[group.name] = await asyncio.to_thread(BroadcastGroup.join, group, rank, timeout_s=_TIMEOUT_S)
        except EngineError as error:
            raise BadRequestError(str(error)) from error

    async def leave(self, name: object) -> None:
        """Leave a group, once a broadcast that is under way in it has ended or failed.

        Raises:
            BadRequestError: there is none of that name.
        """
        group = self._groups.pop(str(name), None)
        if group is None:
            raise BadRequestError(f"group_name={name!r}: the group to be destroyed does not exist")
        await asyncio.to_thread(group.close)

    async def receive(self, body: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
        """Return the tensors that a bucket's request announces, once they have come.

        Raises:
            BadRequestError: they would not fit the model, there is no such group, or the broadcast broke off.
        """
        if body.get("load_format") is not None:
            raise BadRequestError(f"load_format={body['load_format']!r}: not in the embedded engine")
        group = self._groups.get(str(body.get("group_name")))
        if group is None:
            raise BadRequestError(f"Failed to receive weights: there is no group {body.get('group_name')!r}")
        named = _empty(body)
        self._scheduler.model.check_weights([(name, tensor.shape) for name, tensor in named])
        try:
            await asyncio.to_thread(group.broadcast, [tensor for _, tensor in named])
        except EngineError as error:
            raise BadRequestError(f"Failed to receive weights: {error}") from error
        return named

    def checksums(self) -> dict[str, str]:
        """Return a `digest` of every weight that the engine has now.

        Raises:
            BadRequestError: it has given their memory back.
        """
        self._scheduler.model.check_present()
        return {name: digest(tensor) for name, tensor in self._scheduler.model.parameters()}


def _empty(body: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Return memory for the tensors that a request announces."""
    named = []
    try:
        for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"], strict=True):
            kind = getattr(torch, dtype)
            if not isinstance(kind, torch.dtype):
                raise BadRequestError(f"dtypes has {dtype!r}, which is none of torch")
            named.append((str(name), torch.empty([int(size) for size in shape], dtype=kind)))
    except (KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise BadRequestError(f"names, dtypes and shapes: {type(error).__name__} {error}") from error
    return named
