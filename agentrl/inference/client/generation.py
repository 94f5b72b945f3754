"""Generations at one address, an engine's or a router's: requests, their replies, and what a pause cuts in two."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import aiohttp
import orjson

from agentrl.core.errors import EngineLostError, SamplerError
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.obs.waiting import waiting

_KEEPING = ("retract", "in_place")
"""Pause modes in which an engine keeps its requests."""
_ABORT_RETRY_S = 0.2


@dataclass(slots=True)
class _Request:
    """A generation in progress."""

    sent_id: str = ""
    """Id of the current request at the engine."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Its caller wants it to end."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    """`GenerationClient.generate` is about to return or raise."""
    pause: str | None = None
    """Mode in which the engine was paused during the request; None: it was not."""
    updated: bool = False
    """Weights changed while the paused engine kept the request."""


class GenerationClient(ABC):
    """A `Sampler` over one address.

    Generations wait until it is `ready`. One that a pause with mode ``abort`` cuts off keeps its tokens and continues
    with a second request after the pause, so that the version of every token is known.
    """

    def __init__(self, http: EngineHttp) -> None:
        """Send requests through ``http``."""
        self._http = http
        self._requests: dict[str, _Request] = {}
        self._numbers = itertools.count()
        """Of requests: a repeated one may meet its predecessor, which the engine has not dropped yet."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether generations may start now."""

    @abstractmethod
    async def wait_ready(self) -> None:
        """Wait until generations may start.

        Raises:
            SamplerError: an engine holds weights that must not be sampled with.
        """

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample one turn; see `agentrl.core.sampler.Sampler`.

        Raises:
            SamplerError: the engine refused (with its message) or failed, or ``policy`` is not ``main``.
            EngineLostError: it could not be reached.
        """
        if policy != "main":
            raise SamplerError(f"policy={policy!r}: this engine serves one policy, 'main'")
        if request_id in self._requests:
            raise SamplerError(f"request_id={request_id!r} is already in progress")
        request = self._requests[request_id] = _Request()
        whole: Segment | None = None
        ids, left = list(prompt.token_ids), params.max_new_tokens
        try:
            while True:
                await self._ready_or_aborted(request)
                if request.aborted.is_set():
                    break
                request.pause, request.updated = None, False
                # SGLang aborts every request whose id starts with the given one: the suffix keeps r1 from aborting r10.
                request.sent_id = f"{request_id}:{next(self._numbers)}"
                body = generate_body(ids, params, left, request.sent_id, texts=whole is not None)
                with waiting("engine", self._http.url):
                    async with self._http.request("POST", "/generate", body, key=session_id) as reply:
                        content = await reply.read()
                segment = read_reply(content, request_id)
                if request.updated and not segment.exact:
                    raise SamplerError(
                        f"request {request_id} was sampled by more than one version of the weights, and the engine "
                        "reports one: pause it with mode='abort' before an update"
                    )
                whole = segment if whole is None else join(whole, segment, params.stop)
                if whole.generation.finish_reason is not FinishReason.ABORT or request.pause != "abort":
                    break
                ids, left = ids + list(segment.generation.token_ids), left - len(segment.generation.token_ids)
        except ErrorReply as error:
            if error.engine_lost:
                raise EngineLostError(
                    f"the router at {self._http.url} has lost request {request_id}: {error}"
                ) from error
            raise SamplerError(f"the engine at {self._http.url} refuses request {request_id}: {error}") from error
        except CONNECTION_ERRORS as error:
            lost = not isinstance(error, TimeoutError) or isinstance(error, aiohttp.ConnectionTimeoutError)
            kind = EngineLostError if lost else SamplerError
            raise kind(f"the engine at {self._http.url} does not answer: {type(error).__name__} {error}") from error
        finally:
            request.ended.set()
            del self._requests[request_id]
        return Generation((), (), FinishReason.ABORT, (), 0, request_id) if whole is None else whole.generation

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort a request and wait until its `generate` returns; unknown requests are ignored.

        Raises:
            SamplerError: no engine accepted the abort.
        """

    async def close_session(self, session_id: str) -> None:  # noqa: B027 - no engine has anything to close
        """Do nothing: engines and routers drop what was not used for the longest time."""

    async def abort_at(self, request_id: str, stop: Callable[[str], Awaitable[None]]) -> None:
        """Abort a request at one engine and wait until its `generate` returns; unknown requests are ignored.

        ``stop`` makes the engine end the request with an id. It is called again until the generation has ended, since
        the abort may overtake the request on another connection.
        """
        request = self._requests.get(request_id)
        if request is None:
            return
        request.aborted.set()
        while not request.ended.is_set():
            await stop(request.sent_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(request.ended.wait(), _ABORT_RETRY_S)

    def note_pause(self, mode: str) -> None:
        """Record for all requests in progress that an engine is being paused."""
        for request in self._requests.values():
            request.pause = mode

    def note_update(self) -> None:
        """Record for all requests in progress that an engine received weights."""
        for request in self._requests.values():
            request.updated = request.updated or request.pause in _KEEPING

    @property
    def kept_by_pause(self) -> bool:
        """Whether a paused engine keeps any request, to continue it after the pause."""
        return any(request.pause in _KEEPING for request in self._requests.values())

    async def _ready_or_aborted(self, request: _Request) -> None:
        if self.ready:
            return
        waits = [asyncio.ensure_future(self.wait_ready()), asyncio.ensure_future(request.aborted.wait())]
        try:
            with waiting("engine", self._http.url, "which is paused"):
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            if waits[0].done():
                waits[0].result()
        finally:
            for wait in waits:
                wait.cancel()


def generate_body(
    ids: list[int], params: SamplingParams, max_new_tokens: int, rid: str, *, texts: bool = False
) -> dict[str, Any]:
    """Return the body for ``/generate``. With ``texts`` and stop strings the reply has the text of each token."""
    sampling: dict[str, Any] = {
        "max_new_tokens": max_new_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k,
        "no_stop_trim": True,
        # The text must be the one in which the engine looks for stop strings.
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


@dataclass(frozen=True, slots=True)
class Segment:
    """The tokens of one or more requests of a turn, with what is needed to join further ones to them."""

    generation: Generation
    text: str
    """Text of all tokens, special ones included; empty if the engine has no tokenizer."""
    token_texts: Sequence[str]
    """Text of each token; empty strings unless it was requested."""
    exact: bool
    """Whether the versions are the engine's own, token by token, and not one for the whole reply."""


def read_reply(content: bytes, request_id: str) -> Segment:
    """Return what a reply of ``/generate`` says.

    Raises:
        SamplerError: it is not JSON, it lacks ids or log-probabilities, or the engine failed.
    """
    try:
        reply = orjson.loads(content)
        meta = reply["meta_info"]
        entries = meta["output_token_logprobs"] or []
        finish = meta["finish_reason"]
        ids = tuple(entry[1] for entry in entries)
        if ids != tuple(reply.get("output_ids", ids)):
            raise SamplerError("the engine's output_ids are not those of its output_token_logprobs")
        if "weight_versions" in meta:
            # SGLang names one for a request that was aborted before its first token, too.
            spans = [span for span in meta["weight_versions"] if span["start"] < len(ids)]
            versions = tuple((int(span["start"]), version_number(span["version"])) for span in spans)
        else:
            versions = ((0, version_number(meta.get("weight_version", "default"))),) if ids else ()
        generation = Generation(
            token_ids=ids,
            logprobs=tuple(float(entry[0]) for entry in entries),
            finish_reason=_finish_reason(finish),
            versions=versions,
            cached_tokens=int(meta.get("cached_tokens", 0)),
            request_id=request_id,
        )
        texts = [entry[2] or "" for entry in entries]
        return Segment(generation, reply.get("text") or "", texts, exact="weight_versions" in meta)
    except orjson.JSONDecodeError as error:
        raise SamplerError(f"the engine's reply is not JSON: {content[:200]!r}") from error
    except (KeyError, TypeError, IndexError) as error:
        raise SamplerError(f"the engine's reply has no {error}: {content[:200].decode(errors='replace')}") from error


def version_number(name: object) -> int:
    """Return a weight version as a number; SGLang calls the weights it started with ``default``: 0.

    Raises:
        SamplerError: it is not a number, so it was not set by agentrl.
    """
    text = str(name)
    if text == "default":
        return 0
    if not text.lstrip("-").isdigit():
        raise SamplerError(f"the engine's weight_version is {text!r}: agentrl sets whole numbers, who changed it?")
    return int(text)


def join(left: Segment, right: Segment, stops: Sequence[str]) -> Segment:
    """Return two consecutive segments of a turn as one; a stop string across the border ends the turn there.

    Engines look for stop strings only in the tokens of one request, so they miss such a string. Tokens after the one
    that completes it are dropped, as if they had not been sampled.
    """
    before, after = left.generation, right.generation
    count, finish = len(after.token_ids), after.finish_reason
    completed = _completed_stop(left.text, right.token_texts, stops) if stops else None
    if completed is not None:
        count, finish = completed, FinishReason.STOP
    versions = list(before.versions)
    for start, version in after.versions:
        if start < count and (not versions or versions[-1][1] != version):
            versions.append((len(before.token_ids) + start, version))
    generation = replace(
        before,
        token_ids=before.token_ids + after.token_ids[:count],
        logprobs=before.logprobs + after.logprobs[:count],
        finish_reason=finish,
        versions=tuple(versions),
    )
    texts = [*left.token_texts, *right.token_texts[:count]]
    return Segment(generation, left.text + right.text, texts, left.exact and right.exact)


def _completed_stop(left: str, right: Sequence[str], stops: Sequence[str]) -> int | None:
    """Return how many tokens of ``right`` complete the first stop string that begins in ``left``, or None."""
    longest = max(len(stop) for stop in stops)
    tail = left[-(longest - 1) :] if longest > 1 else ""
    text = tail
    for count, token in enumerate(right, 1):
        text += token
        for stop in stops:
            at = text.find(stop)
            if 0 <= at < len(tail):
                return count
        if len(text) >= len(tail) + longest:
            return None
    return None


def _finish_reason(finish: object) -> FinishReason:
    kind = finish.get("type") if isinstance(finish, Mapping) else finish
    try:
        return FinishReason(str(kind))
    except ValueError:
        raise SamplerError(f"the engine ended a generation with finish_reason {finish!r}") from None
