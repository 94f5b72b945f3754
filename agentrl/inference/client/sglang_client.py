"""The client of every engine that speaks SGLang's protocol: sampling, and steering the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import httpx

from agentrl.core.errors import EngineError, SamplerError
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.inference.base import MemoryPart
from agentrl.inference.client.engine_memory import EngineMemory
from agentrl.inference.client.http import Refused, Transport
from agentrl.inference.client.requests import Flights
from agentrl.inference.client.segments import version_number
from agentrl.inference.client.weight_updates import Control, RefusedControl, WeightUpdates

if TYPE_CHECKING:
    import torch


class SGLangClient:
    """A `Sampler` and an `EngineControl` for one engine, and the gate before it.

    While the engine is paused or gets new weights through this client, generations wait here; see `Flights`.
    """

    def __init__(self, url: str, *, timeout_s: float = 300.0, flights: Flights | None = None, number: int = 0) -> None:
        """Remember the engine's address; ``timeout_s`` is how long a generation may take.

        ``flights`` are those of a router before it: generations that may be this engine's, and that it is to stop;
        ``number`` says which of several engines it is.
        """
        self.url = url
        self.number = number
        self._transport = Transport(url, timeout_s)
        self._flights = flights or Flights(self._transport, self)
        self._ranks: int | None = None
        """What `ranks` returns, once it was asked for."""
        self._open: asyncio.Event | None = None
        """Cleared while the engine is paused; None: never has been."""
        self._control = Control(self._transport, url)
        self._updates = WeightUpdates(self._control, self._paused, lambda: self._paused() and self._flights.held)
        self._memory = EngineMemory(self._control, self._updates)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    # Sampler

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`.

        Raises:
            SamplerError: the engine refused (with its words) or failed, or ``policy`` is another than ``main``.
            EngineLostError: it could not be reached.
        """
        return await self._flights.generate(prompt, params, session_id=session_id, request_id=request_id, policy=policy)

    async def abort(self, request_id: str) -> None:
        """Stop a request and wait until its `generate` ends; one that is not under way is left alone."""
        await self._flights.abort(request_id, self.stop)

    async def stop(self, rid: str) -> None:
        """Have the engine end requests whose id begins with ``rid``; one that has none is content.

        Raises:
            SamplerError: it does not answer.
        """
        try:
            await self._transport.post("/abort_request", {"rid": rid})
        except (Refused, httpx.HTTPError) as error:
            raise SamplerError(f"the engine at {self.url} does not abort {rid}: {error}") from error

    async def close_session(self, session_id: str) -> None:
        """Do nothing: engines drop what was not used for the longest time."""

    @property
    def closed(self) -> bool:
        """Whether it is paused, gets weights or lacks memory, so that no generation may start."""
        return self._paused() or self._updates.closed or self._memory.out

    async def opened(self) -> None:
        """Wait while `closed`; `SamplerError` where it got only a part of an update."""
        while self.closed:
            await self._opened().wait()
            await self._memory.opened()
            await self._updates.opened()

    def _paused(self) -> bool:
        return self._open is not None and not self._open.is_set()

    # EngineControl

    async def healthy(self) -> bool:
        """Return whether the engine answers, and its scheduler does."""
        try:
            # Not /health, for which SGLang samples a token: that takes a second, and ends an engine without memory.
            await self._transport.get("/server_info", retries=0)
        except (Refused, httpx.HTTPError):
            return False
        return True

    async def pause(self, mode: str = "retract") -> None:
        """Stop sampling; see `agentrl.inference.base.EngineControl`."""
        self._opened().clear()
        self._flights.paused(mode)
        try:
            await self._control.call("/pause_generation", {"mode": mode})
        except EngineError:
            self._opened().set()
            raise

    async def resume(self) -> None:
        """Go on sampling."""
        await self._control.call("/continue_generation", {})
        self._opened().set()

    async def update_from_disk(self, folder: Path, version: int) -> None:
        """Load a Hugging Face folder's weights."""
        await self._updates.from_disk(folder, version)
        self._flights.updated()

    async def update_from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        """Take one bucket of weights."""
        await self._updates.from_tensors(named, version, last=last)
        self._flights.updated()

    async def update_from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Take one bucket of weights that lie on the engine's GPUs."""
        await self._updates.from_handles(handles, version, last=last)
        self._flights.updated()

    async def release_memory(self) -> None:
        """Give weights and KV cache back."""
        await self._memory.release()

    async def take_back_memory(self, part: MemoryPart) -> None:
        """Take memory again."""
        await self._memory.take_back(part)

    async def ranks(self) -> int:
        """Return the engine's tensor-parallel size."""
        if self._ranks is not None:
            return self._ranks
        info = await self._control.call("/server_info", None)
        try:
            self._ranks = int(info["tp_size"])
            return self._ranks
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"the engine at {self.url} tells no tp_size in /server_info: {error}") from error

    async def join_group(self, group: WeightGroup, first_rank: int) -> None:
        """Join a group that weights are broadcast in."""
        body = {
            "master_address": group.host,
            "master_port": group.port,
            "rank_offset": first_rank,
            "world_size": group.size,
            "group_name": group.name,
            "backend": group.backend,
        }
        await self._control.call("/init_weights_update_group", body, once=True)

    async def leave_group(self, group: WeightGroup) -> None:
        """Leave a group."""
        await self._control.call("/destroy_weights_update_group", {"group_name": group.name})

    async def begin_update(self) -> None:
        """Let no generation start until the update has ended."""
        await self._updates.begin()

    async def update_from_group(
        self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool
    ) -> None:
        """Take one bucket that is broadcast."""
        await self._updates.from_group(group, specs, version, last=last)
        self._flights.updated()

    async def cancel_update(self) -> None:
        """Close an update that broke off."""
        await self._updates.cancel()

    async def checksums(self) -> dict[str, str]:
        """Return what ``/weights_checker`` gives: of each weight 64 bits.

        Raises:
            EngineError: the engine has no such endpoint, holds shards, or has given its weights back.
        """
        self._updates.present()
        try:
            reply = await self._control.call("/weights_checker", {"action": "checksum"})
        except RefusedControl as error:
            if error.status == 404:
                reply = None
            else:
                raise
        parts = reply.get("ranks") or [] if isinstance(reply, dict) else []
        if len(parts) != 1:
            raise EngineError(
                f"the engine at {self.url} gives no checksums that can be compared (it has {len(parts)} parts with "
                "checksums, 1 is wanted): set weights.check=version"
            )
        return {str(name): str(value) for name, value in parts[0]["checksums"].items()}

    async def checksum_kind(self) -> Literal["sha256", "words"]:
        """Return how it makes `checksums`."""
        info = await self._control.call("/server_info", None)
        device = info.get("device") if isinstance(info, dict) else None
        return "sha256" if device in (None, "cpu") else "words"

    async def version(self) -> int:
        """Return the policy version that samples now."""
        info = await self._control.call("/model_info", None)
        try:
            return version_number(info["weight_version"])
        except (KeyError, TypeError, SamplerError) as error:
            raise EngineError(f"the engine at {self.url} tells no version: {error}") from error

    async def flush(self) -> None:
        """Drop the prefix cache, as soon as the engine runs nothing: it may take a request that it has answered for one still.

        Raises:
            EngineError: it is paused or gets weights, or does not become idle.
        """
        await self._updates.idle()

    def _opened(self) -> asyncio.Event:
        if self._open is None:
            self._open = asyncio.Event()
            self._open.set()
        return self._open
