"""Generations under way at one address, an engine's or a router's, each in as many requests as it takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import httpx

from agentrl.core.errors import EngineLostError, SamplerError
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.client.http import Refused, Transport
from agentrl.inference.client.segments import Part, join, read_part
from agentrl.obs.waiting import waiting

_KEEPING = ("retract", "in_place")
"""Modes of a pause in which an engine keeps its requests."""
_ABORT_AGAIN_S = 0.2


class Gate(Protocol):
    """What holds generations back."""

    @property
    def closed(self) -> bool:
        """Whether `opened` would wait or raise."""
        ...

    async def opened(self) -> None:
        """Wait until generations may start.

        Raises:
            SamplerError: none may, until somebody has done something about it.
        """
        ...


@dataclass(slots=True)
class _Flight:
    """A generation under way."""

    rid: str
    sent: str = ""
    """Id of the engine's request now."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Its caller asked to stop it."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """`Flights.generate` is leaving."""
    pause: str | None = None
    """The engine was paused in this mode while the request was under way."""
    spans: bool = False
    """Weights changed while the engine held it paused."""


class Flights:
    """Sends generations, and knows of each what became of its engine meanwhile.

    They wait at the gate while it is closed. One that a pause with mode ``abort`` cut off keeps its tokens and goes on
    with a second request once the gate opens, so that the version of every token is known.
    """

    def __init__(self, transport: Transport, gate: Gate) -> None:
        """Send through ``transport`` whatever passes ``gate``."""
        self._transport = transport
        self._gate = gate
        self._under_way: dict[str, _Flight] = {}
        self._numbers = itertools.count()
        """Of requests: one that is begun anew may meet its forerunner, which the engine has not dropped yet."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`.

        Raises:
            SamplerError: the engine refused (with its words) or failed, or ``policy`` is another than ``main``.
            EngineLostError: it could not be reached.
        """
        if policy != "main":
            raise SamplerError(f"policy={policy!r}: this engine serves one policy, 'main'")
        if request_id in self._under_way:
            raise SamplerError(f"request_id={request_id!r} is under way already")
        flight = _Flight(request_id)
        self._under_way[request_id] = flight
        url = self._transport.url
        try:
            whole = await self._parts(prompt, params, session_id, flight)
        except Refused as error:
            if error.lost:
                raise EngineLostError(f"the router at {url} has lost request {request_id}: {error}") from error
            raise SamplerError(f"the engine at {url} refuses request {request_id}: {error}") from error
        except httpx.HTTPError as error:
            lost = isinstance(error, httpx.NetworkError | httpx.RemoteProtocolError | httpx.ConnectTimeout)
            kind = EngineLostError if lost else SamplerError
            raise kind(f"the engine at {url} does not answer: {type(error).__name__} {error}") from error
        finally:
            flight.ended.set()
            del self._under_way[request_id]
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
        while True:
            await self._opened_or_aborted(flight)
            if flight.aborted.is_set():
                return whole or Part([], [], FinishReason.ABORT, (), 0, "", [], True)
            flight.pause, flight.spans = None, False
            # SGLang aborts every request whose id starts with the one given: an end mark keeps r1 from aborting r10.
            flight.sent = f"{flight.rid}:{next(self._numbers)}"
            body = generate_body(ids, params, left, flight.sent, texts=whole is not None)
            with waiting("engine", self._transport.url):
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

    async def _opened_or_aborted(self, flight: _Flight) -> None:
        """Wait at the gate, unless the caller stops the flight."""
        if not self._gate.closed:
            return
        waits = [asyncio.ensure_future(self._gate.opened()), asyncio.ensure_future(flight.aborted.wait())]
        try:
            with waiting("engine", self._transport.url, "which is paused"):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
        finally:
            for wait in waits:
                wait.cancel()

    async def abort(self, request_id: str, stop: Callable[[str], Awaitable[None]]) -> None:
        """Stop a generation and wait until it ends; one that is not under way is left alone.

        ``stop`` tells an engine to end the request with an id, and is called again until the generation has ended: the
        abort may have overtaken the request on another connection.
        """
        flight = self._under_way.get(request_id)
        if flight is None:
            return
        flight.aborted.set()
        while not flight.ended.is_set():
            await stop(flight.sent)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(flight.ended.wait(), _ABORT_AGAIN_S)

    def paused(self, mode: str) -> None:
        """Take note that an engine is being paused."""
        for flight in self._under_way.values():
            flight.pause = mode

    @property
    def held(self) -> bool:
        """Whether a paused engine keeps any, to go on with them after the pause."""
        return any(flight.pause in _KEEPING for flight in self._under_way.values())

    def updated(self) -> None:
        """Take note that an engine got weights."""
        for flight in self._under_way.values():
            flight.spans = flight.spans or flight.pause in _KEEPING


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
