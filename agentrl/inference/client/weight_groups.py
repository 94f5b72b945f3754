"""Membership of an SGLang engine in process groups of weight broadcasts."""

from __future__ import annotations

from agentrl.core.errors import EngineError
from agentrl.distributed.base import WeightGroup
from agentrl.inference.client.control import ControlEndpoint


class SGLangWeightGroups:
    """Process groups of one engine; see `agentrl.inference.base.WeightGroups`."""

    def __init__(self, control: ControlEndpoint) -> None:
        """Use the engine behind ``control``."""
        self._control = control
        self._ranks: int | None = None
        """Cached return value of `ranks`."""

    async def ranks(self) -> int:
        """Return the engine's tensor-parallel size."""
        if self._ranks is not None:
            return self._ranks
        info = await self._control.call("/server_info", None)
        try:
            self._ranks = int(info["tp_size"])
            return self._ranks
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(
                f"the engine at {self._control.url} reports no tp_size in /server_info: {error}"
            ) from error

    async def join(self, group: WeightGroup, first_rank: int) -> None:
        """Join a group; not repeated if the connection fails."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": first_rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._control.call("/init_weights_update_group", body, once=True)

    async def leave(self, group: WeightGroup) -> None:
        """Leave a group."""
        await self._control.call("/destroy_weights_update_group", {"group_name": group.name})
