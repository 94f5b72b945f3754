"""The client of every engine that speaks SGLang's protocol: sampling, and steering the engine."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx

from agentrl.errors import EngineError, EngineLostError, SamplerError
from agentrl.obs.waiting import waiting
from agentrl.protocols import MemoryPart, TensorSpec, WeightGroup
from agentrl.sampler.control import Control, RefusedControl, WeightUpdates
from agentrl.sampler.memory import EngineMemory
from agentrl.sampler.parts import Part, join, read_part, version_number
from agentrl.sampler.transport import Refused, Transport
from agentrl.types import FinishReason, Generation, Prompt, SamplingParams

if TYPE_CHECKING:
    import torch


_ABORT_AGAIN_S = 0.2


@dataclass(slots=True)
class _Flight:
    """A generation under way."""

    rid: str
    sent: str = ""
    """Id of the engine's request now."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Its caller asked to stop it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """`SGLangClient.generate` is leaving."""
    pause: str | None = None
    """The engine was paused in this mode while the request was under way."""
    spans: bool = False
    """Weights changed while the engine held it paused."""


class SGLangClient:
    """A `Sampler` and an `EngineControl` for one engine, or for a router before several.

    While the engine is paused or gets new weights through this client, generations wait here. One that a pause with
    mode ``abort`` cut off keeps its tokens and goes on with a second request after `resume`, so that the version of every
    token is known.
    """

    def __init__(self, url: str, *, timeout_s: float = 300.0) -> None:
        """Remember the engine's address; ``timeout_s`` is how long a generation may take."""
        self.url = url
        self._transport = Transport(url, timeout_s)
        self._flights: dict[str, _Flight] = {}
        self._open: asyncio.Event | None = None
        """Cleared while the engine is paused; None: never has been."""
        self._control = Control(self._transport, url)
        self._updates = WeightUpdates(self._control, self._paused)
        self._memory = EngineMemory(self._transport, self._control, self._updates)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._transport.aclose()

    # Sampler

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.protocols.Sampler`.

        Raises:
            SamplerError: the engine refused (with its words) or failed, or ``policy`` is another than ``main``.
            EngineLostError: it could not be reached.
        """
        if policy != "main":
            raise SamplerError(f"policy={policy!r}: this engine serves one policy, 'main'")
        if request_id in self._flights:
            raise SamplerError(f"request_id={request_id!r} is under way already")
        flight = _Flight(request_id)
        self._flights[request_id] = flight
        try:
            whole = await self._parts(prompt, params, session_id, flight)
        except Refused as error:
            raise SamplerError(f"the engine at {self.url} refuses request {request_id}: {error}") from error
        except httpx.HTTPError as error:
            lost = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError | httpx.ConnectTimeout)
            kind = EngineLostError if lost else SamplerError
            raise kind(f"the engine at {self.url} does not answer: {type(error).__name__} {error}") from error
        finally:
            flight.ended.set()
            del self._flights[request_id]
        return Generation(
            token_ids=tuple(whole.token_ids),
            logprobs=tuple(whole.logprobs),
            finish_reason=whole.finish,
            versions=whole.versions,
            cached_tokens=whole.cached_tokens,
            request_id=request_id,
        )

    async def _parts(self, prompt: Prompt, params: SamplingParams, session_id: str, flight: _Flight) -> Part:
        whole: Part | None = None
        ids, left = list(prompt.token_ids), params.max_new_tokens
        for number in itertools.count():
            await self._opened_or_aborted(flight)
            if flight.aborted.is_set():
                return whole or Part([], [], FinishReason.ABORT, (), 0, "", [], True)
            flight.pause, flight.spans = None, False
            # SGLang aborts every request whose id starts with the one given: an end mark keeps r1 from aborting r10.
            flight.sent = f"{flight.rid}:{number}"
            body = generate_body(ids, params, left, flight.sent, texts=number > 0)
            with waiting("engine", self.url):
                part = read_part(await self._transport.post("/generate", body, key=session_id))
            if flight.spans and not part.exact:
                raise SamplerError(
                    f"request {flight.rid} was sampled by more than one version of the weights, and the engine reports "
                    "one: pause it with mode='abort' before an update"
                )
            whole = part if whole is None else join([whole, part], params.stop)
            if whole.finish is not FinishReason.ABORT or flight.pause != "abort":
                return whole
            ids, left = ids + part.token_ids, left - len(part.token_ids)
        raise AssertionError("count() does not end")

    async def _opened_or_aborted(self, flight: _Flight) -> None:
        """Wait while the engine is paused, gets weights or lacks memory, unless the caller stops the flight."""
        if not self._paused() and not self._updates.closed and not self._memory.out:
            return
        waits = [asyncio.ensure_future(self._gate()), asyncio.ensure_future(flight.aborted.wait())]
        try:
            with waiting("engine", self.url, "which is paused"):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
        finally:
            for wait in waits:
                wait.cancel()

    async def _gate(self) -> None:
        while self._paused() or self._memory.out or self._updates.closed:
            await self._opened().wait()
            await self._memory.opened()
            await self._updates.opened()

    def _paused(self) -> bool:
        return self._open is not None and not self._open.is_set()

    async def abort(self, request_id: str) -> None:
        """Stop a request and wait until its `generate` ends; one that is not under way is left alone."""
        flight = self._flights.get(request_id)
        if flight is None:
            return
        flight.aborted.set()
        while not flight.ended.is_set():
            try:
                await self._transport.post("/abort_request", {"rid": flight.sent})
            except (Refused, httpx.HTTPError) as error:
                raise SamplerError(f"the engine at {self.url} does not abort {request_id}: {error}") from error
            # The abort may have overtaken the request on another connection; then it is sent again.
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flight.ended.wait(), _ABORT_AGAIN_S)

    async def close_session(self, session_id: str) -> None:
        """Do nothing: engines drop what was not used for the longest time."""

    # EngineControl

    async def healthy(self) -> bool:
        """Return whether the engine answers."""
        return await self._memory.healthy()

    async def pause(self, mode: str = "retract") -> None:
        """Stop sampling; see `agentrl.protocols.EngineControl`."""
        self._opened().clear()
        for flight in self._flights.values():
            flight.pause = mode
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
        self._mark_spans()

    async def update_from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        """Take one bucket of weights."""
        await self._updates.from_tensors(named, version, last=last)
        self._mark_spans()

    async def update_from_handles(self, handles: Sequence[str], version: int, *, last: bool) -> None:
        """Take one bucket of weights that lie on the engine's GPUs."""
        await self._updates.from_handles(handles, version, last=last)
        self._mark_spans()

    async def release_memory(self) -> None:
        """Give weights and KV cache back."""
        await self._memory.release()

    async def take_back_memory(self, part: MemoryPart) -> None:
        """Take memory again."""
        await self._memory.take_back(part)

    async def ranks(self) -> int:
        """Return the engine's tensor-parallel size."""
        info = await self._control.call("/server_info", None)
        try:
            return int(info["tp_size"])
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
        self._mark_spans()

    async def cancel_update(self) -> None:
        """Close an update that broke off."""
        await self._updates.cancel()

    async def checksums(self) -> dict[str, str]:
        """Return what ``/weights_checker`` gives: of each weight 64 bits of SHA-256.

        Raises:
            EngineError: the engine has no such endpoint, holds shards, or hashes on a GPU, in a way of its own.
        """
        self._updates.present()
        device = (await self._control.call("/server_info", None) or {}).get("device")
        try:
            reply = await self._control.call("/weights_checker", {"action": "checksum"})
        except RefusedControl as error:
            if error.status == 404:
                reply = None
            else:
                raise
        parts = reply.get("ranks") or [] if isinstance(reply, dict) else []
        if device not in (None, "cpu") or len(parts) != 1:
            raise EngineError(
                f"the engine at {self.url} gives no checksums that can be compared (it runs on {device or 'cpu'} and "
                f"has {len(parts)} parts with checksums, 1 on a CPU is wanted): set weights.check=version"
            )
        return {str(name): str(value) for name, value in parts[0]["checksums"].items()}

    async def version(self) -> int:
        """Return the policy version that samples now."""
        info = await self._control.call("/model_info", None)
        try:
            return version_number(info["weight_version"])
        except (KeyError, TypeError, SamplerError) as error:
            raise EngineError(f"the engine at {self.url} tells no version: {error}") from error

    async def flush(self) -> None:
        """Drop the prefix cache."""
        await self._control.call("/flush_cache", {})

    def _opened(self) -> asyncio.Event:
        if self._open is None:
            self._open = asyncio.Event()
            self._open.set()
        return self._open

    def _mark_spans(self) -> None:
        for flight in self._flights.values():
            flight.spans = flight.spans or flight.pause in ("retract", "in_place")


def generate_body(
    ids: list[int], params: SamplingParams, max_new_tokens: int, rid: str, *, texts: bool = False
) -> dict[str, Any]:
    """Return what is posted to ``/generate``; with ``texts`` the reply has each token's text, where stop strings need it."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "no_stop_trim": True,
        # The text must be that in which the engine looks for stop strings.
        "skip_special_tokens": False,
    }
    if params.stop:
        sampling["stop"] = list(params.stop)
    if params.stop_token_ids:
        sampling["stop_token_ids"] = list(params.stop_token_ids)
    if params.ignore_eos:
        sampling["ignore_eos"] = True
    if params.seed is not None:
        sampling["sampling_seed"] = params.seed
    body: dict[str, Any] = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}
    if texts and params.stop:
        body["return_text_in_logprobs"] = True
    return body
