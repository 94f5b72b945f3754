"""Generations at one address, an engine's or a router's: requests, replies, and what a pause cuts in two.

`read_reply` is the only place where a generation is checked and believed.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import aiohttp
import msgspec

from agentrl.core.background import first_ended
from agentrl.core.errors import EngineError, EngineLostError, SamplerError
from agentrl.core.lineup import MAIN
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.client.adapters import adapter_version
from agentrl.inference.client.engine_state import EngineState
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.inference.client.prefix_ages import PrefixAges, block_use
from agentrl.inference.client.request_images import check_expansion, with_images
from agentrl.inference.client.segments import (
    Segment,
    Vocabulary,
    experts_options,
    join,
    read_experts,
    read_support,
    support_options,
)
from agentrl.obs.waiting import REQUEST, waiting

KEEPING = ("retract", "in_place")
"""Pause modes in which an engine keeps its requests."""
_ABORT_RETRY_S = 0.2
_PASSES = 4
"""Replies that are read in an iteration of the event loop: the engine gets requests early, and few iterations are needed."""
ROUNDING = 1e-4
"""Log-probabilities up to this value above 0 are rounding errors of the engine, and become 0."""
_MAX_ID = 2**31 - 1
TokenId = Annotated[int, msgspec.Meta(ge=0, le=_MAX_ID)]
_Count = Annotated[int, msgspec.Meta(ge=0)]


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
    replied: bool = False
    """The engine has replied: what happens to it now does not concern the request."""


class _Turnstile:
    """Lets few tasks pass, and the next ones when the event loop has run what was ready then.

    The requests of a batch often end in the same decoding step. If all replies were read first, the engine would idle until
    the last one is: so each reply becomes the next request of its episode, which the engine prefills, while the others wait.
    """

    def __init__(self) -> None:
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._passes = _PASSES
        """Tasks that may pass now; fewer than all until the next iteration of the event loop."""

    async def enter(self) -> None:
        """Wait for the tasks that were here before."""
        loop = asyncio.get_running_loop()
        if self._passes == _PASSES:
            loop.call_soon(self._open)
        if self._passes:
            self._passes -= 1
            return
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _open(self) -> None:
        self._passes = _PASSES
        while self._waiting and self._passes:
            entry = self._waiting.popleft()
            if not entry.done():  # its task was cancelled otherwise
                entry.set_result(None)
                self._passes -= 1
        if self._passes < _PASSES:
            asyncio.get_running_loop().call_soon(self._open)


class GenerationClient(ABC):
    """A `Sampler` over one address.

    Generations wait until it is `ready`. One that a pause with mode ``abort`` cuts off keeps its tokens and continues
    with a second request after the pause, so that the version of every token is known. With mode ``restart`` it begins
    again, and its tokens are discarded.
    """

    def __init__(self, http: EngineHttp, vocabulary: Vocabulary | None = None, *, knows_ages: bool = False) -> None:
        """Send requests through ``http``.

        Args:
            http: of the address.
            vocabulary: of the policy; see `read_reply` and `join` for what needs it.
            knows_ages: keep `prefix_ages`.
        """
        self.prefix_ages = PrefixAges() if knows_ages else None
        """Which versions computed the cached prefixes; None: only the version that samples."""
        self.discarded_tokens = 0
        """Tokens of generations that began again after a pause."""
        self.unanswered = 0
        """Requests without a reply."""
        self._http = http
        self._vocabulary = vocabulary
        self._requests: dict[str, _Request] = {}
        self._turnstile = _Turnstile()
        self._numbers = itertools.count()
        """Numbers of requests: a repeated request may meet its predecessor, which the engine has not dropped yet."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether generations may start now."""

    def adapter(self, policy: str) -> str | None:
        """Return the name of the LoRA adapter that generations of a policy use; None: the engine's weights alone.

        Raises:
            SamplerError: there is no such policy.
        """
        if policy != MAIN:
            raise SamplerError(f"policy={policy!r}: the engine at {self._http.url} serves one policy, {MAIN!r}")
        return None

    def state(self) -> EngineState:
        """Return what another process needs to send generations here."""
        knows_ages = self.prefix_ages is not None
        owner, key = self._weights_owner(), self._cache_key()
        return replace(
            self._engine_state(), ready=self.ready, weights_owner=owner, cache_key=key, knows_ages=knows_ages
        )

    def _engine_state(self) -> EngineState:
        """Return the fields of `state` that kinds of clients have differently."""
        return EngineState(self._http.url, (self._http.url,))

    def _weights_owner(self) -> str:
        """Return what every weight version of the engine must end with, see `weights_version`; empty: anything."""
        return ""

    def _cache_key(self) -> str | None:
        """Return what separates the prefixes of requests in the engine's cache: only those of one key are reused."""
        return None

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
            SamplerError: the engine refused (with its message) or failed, or has no such policy.
            EngineLostError: it could not be reached.
            ConfigError: the engine's tokens of images are not those of the prompt, or the policy takes no images.
            EngineError: another client has changed the engine's weights.
        """
        if request_id in self._requests:
            raise SamplerError(f"request_id={request_id!r} is already in progress")
        request = self._requests[request_id] = _Request()
        sampled: Segment | None = None
        try:
            while True:
                await self._ready_or_aborted(request)
                if request.aborted.is_set():
                    break
                request.pause, request.updated, request.replied = None, False, False
                # SGLang aborts every request whose id starts with the given one: the suffix keeps r1 from aborting r10.
                request.sent_id = f"{request_id}:{next(self._numbers)}"
                ids = [*prompt.token_ids, *(sampled.generation.token_ids if sampled is not None else ())]
                remaining = params.max_new_tokens + len(prompt.token_ids) - len(ids)
                body = generate_body(ids, params, remaining, request.sent_id, self.adapter(policy))
                body |= experts_options(params, sampled) | support_options(params)
                if (key := self._cache_key()) is not None:
                    body["extra_key"] = key
                image_token = None if self._vocabulary is None else self._vocabulary.image_token_id
                sent_body = with_images(body, prompt.images, image_token, request_id)
                self.unanswered += 1
                try:
                    with waiting(REQUEST, f"to the engine {self._http.url}"):
                        content = await self._http.generate(sent_body, key=session_id)
                finally:
                    self.unanswered -= 1
                    request.replied = True
                await self._turnstile.enter()
                version_of = partial(version_number, owner=self._weights_owner(), url=self._http.url)
                segment = read_reply(
                    content, body, request_id, self._vocabulary, has_images=bool(prompt.images), version_of=version_of
                )
                if not prompt.images:  # blocks are known by their ids, which are those of all images of a size
                    self._note_blocks(ids, segment.generation)
                if request.updated and not segment.exact:
                    raise SamplerError(
                        f"request {request_id} was sampled by more than one version of the weights, and the engine "
                        "reports one: pause it with mode='abort' before an update"
                    )
                sampled = segment if sampled is None else join(sampled, segment, params.stop, self._vocabulary)
                if sampled.generation.finish_reason is not FinishReason.ABORT or request.aborted.is_set():
                    break
                if request.pause == "restart":
                    self.discarded_tokens += len(sampled.generation.token_ids)
                    sampled = None
                elif request.pause != "abort":
                    raise SamplerError(
                        f"the engine at {self._http.url} aborted request {request_id}, and no client requested that"
                    )
                elif len(sampled.generation.token_ids) == params.max_new_tokens:
                    return replace(sampled.generation, finish_reason=FinishReason.LENGTH)
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
        return Generation((), (), FinishReason.ABORT, (), 0, request_id) if sampled is None else sampled.generation

    @abstractmethod
    async def abort(self, request_id: str) -> None:
        """Abort a request and wait until its `generate` returns; unknown requests are ignored.

        Raises:
            SamplerError: no engine accepted the abort.
        """

    def _note_blocks(self, ids: Sequence[int], generation: Generation) -> None:
        """Record what a reply reports about cached blocks."""
        if self.prefix_ages is not None:
            self.prefix_ages.add(block_use(ids, generation))

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
            if not request.replied:
                request.pause = mode

    def note_update(self) -> None:
        """Record for all requests in progress that an engine received weights."""
        for request in self._requests.values():
            if not request.replied and request.pause in KEEPING:
                request.updated = True

    @property
    def keeps_requests(self) -> bool:
        """Whether a paused engine keeps any request, to continue it after the pause."""
        return any(request.pause in KEEPING and not request.replied for request in self._requests.values())

    async def _ready_or_aborted(self, request: _Request) -> None:
        if self.ready:
            return
        with waiting("engine", self._http.url, "which is paused"):
            async with first_ended(self.wait_ready(), request.aborted.wait()) as (ready, _):
                if ready.done():
                    ready.result()


def generate_body(
    ids: list[int], params: SamplingParams, max_new_tokens: int, rid: str, adapter: str | None = None
) -> dict[str, Any]:
    """Return the body for ``/generate``, with the engine's LoRA adapter of this name."""
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
    body = {"input_ids": ids, "sampling_params": sampling, "return_logprob": True, "rid": rid}
    return body if adapter is None else body | {"lora_path": adapter}


class Finish(msgspec.Struct):
    """Why a request ended."""

    type: str
    """SGLang's word."""
    matched: object = None
    """The token or string that ended it, if one did."""


class _Span(msgspec.Struct):
    start: _Count
    version: str | int


class _Meta(msgspec.Struct):
    """``meta_info``. A request that was aborted before it ran has no counts and no log-probabilities."""

    finish_reason: Finish
    id: str
    output_token_logprobs: list[tuple[float, TokenId, str | None]] | None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: _Count = 0
    spec_verify_ct: _Count = 0
    weight_version: str | int = "default"
    weight_versions: list[_Span] | None = None
    routed_experts: str | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float | list[float]] | None = None


class _Reply(msgspec.Struct):
    meta_info: _Meta
    output_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


# It refuses what is no number, such as NaN, and what no float can hold.
_REPLIES = msgspec.json.Decoder(_Reply)
NOT_A_REPLY = (ValueError, RecursionError)
"""What decoders of replies raise."""


INITIAL_VERSIONS = ("default", "0")
"""Weight versions of engines that have received no weights, of SGLang and of the embedded engine."""


def version_number(name: object, owner: str = "", url: str = "") -> int:
    """Return a weight version as a number; SGLang calls the weights it started with ``default``: 0.

    Args:
        name: the version, and after a hyphen who has sent the weights, if they say so.
        owner: who must have sent them; empty: it does not matter.
        url: of the engine, for the message.

    Raises:
        SamplerError: it is not a number, so it was not set by agentrl.
        EngineLostError: the engine has restarted with its first weights.
        EngineError: another client has sent the weights.
    """
    text = str(name)
    number, _, sender = text.partition("-")
    if owner and sender != owner:
        if text in INITIAL_VERSIONS:
            raise EngineLostError(f"the engine at {url} has lost the weights that this run sent: it was restarted")
        raise EngineError(
            f"the engine at {url} has weights that this run did not send (weight_version {text[:100]!r}): another run or "
            "program updates the same engine. An engine serves one run at a time: stop the other run, or set another sampler.url"
        )
    if number == "default":
        return 0
    if not (number.isascii() and number.isdigit() and len(number) < 10):
        raise SamplerError(
            f"the engine's weight_version is {text[:100]!r}: agentrl sets whole numbers, who changed it?"
        )
    return int(number)


def read_reply(
    content: bytes,
    body: Mapping[str, Any],
    request_id: str,
    vocabulary: Vocabulary | None = None,
    *,
    has_images: bool = False,
    version_of: Callable[[object], int] = version_number,
) -> Segment:
    """Return the tokens of a reply of ``/generate``.

    Args:
        content: the reply.
        body: the request that it answers, with the tokens of images in full.
        request_id: for the generation.
        vocabulary: of the policy; None: ids are not compared with its size.
        has_images: the prompt has images, which the engine has expanded.
        version_of: reads a weight version, see `version_number`.

    Raises:
        SamplerError: it is not a reply to this request: another prompt length, other ids, impossible values.
        ConfigError: the engine has expanded images to other tokens; see `check_expansion`.
        EngineError: see `version_number`.
    """
    try:
        reply = _REPLIES.decode(content)
    except NOT_A_REPLY as error:
        raise SamplerError(f"the engine's reply to {request_id} is not one: {error}") from error
    meta = reply.meta_info
    if has_images and meta.id == body["rid"]:
        check_expansion(body["input_ids"], reply.prompt_token_ids, meta.prompt_tokens, request_id)
    entries = meta.output_token_logprobs
    # Columns, and functions that read them whole: loops over tokens would take most of the time of a turn.
    logprobs, ids, _ = zip(*entries, strict=True) if entries else ((), (), ())
    highest = max(logprobs, default=0.0)
    finish = _finish_reason(meta.finish_reason.type)
    if fault := _fault(reply, ids, highest, finish, body, vocabulary):
        raise SamplerError(f"the engine's reply to {request_id} {fault}")
    adapter = body.get("lora_path")
    if adapter is not None:  # it samples the whole request, whatever the engine's newest version is
        version_of(meta.weight_version)  # of the base model
        versions: tuple[tuple[int, int], ...] = ((0, adapter_version(adapter)),) if ids else ()
    elif meta.weight_versions is not None:
        # SGLang names one for a request that was aborted before its first token, too.
        spans = [span for span in meta.weight_versions if span.start < len(ids)]
        versions = tuple((span.start, version_of(span.version)) for span in spans)
    else:
        versions = ((0, version_of(meta.weight_version)),) if ids else ()
    sampled = read_support(
        meta.output_token_sampling_mask,
        meta.output_token_sampling_logprobs,
        ids,
        meta.id,
        body.get("sampling_logprobs_mode"),
        vocabulary,
    )
    if sampled is not None:
        logprobs = sampled.logprobs
    elif highest > 0:
        logprobs = tuple(min(value, 0.0) for value in logprobs)
    generation = Generation(
        token_ids=ids,
        logprobs=logprobs,
        finish_reason=finish,
        versions=versions,
        cached_tokens=meta.cached_tokens,
        verified=meta.spec_verify_ct,
        request_id=request_id,
        experts_from=body.get("routed_experts_start_len", 0),
        experts=read_experts(
            meta.routed_experts,
            len(body["input_ids"]) + len(ids),
            body,
            vocabulary,
            aborted=finish is FinishReason.ABORT,
        ),
        support=None if sampled is None else sampled.support,
    )
    return Segment(generation, exact=adapter is not None or meta.weight_versions is not None)


def _fault(
    reply: _Reply,
    ids: Sequence[int],
    highest: float,
    finish: FinishReason,
    body: Mapping[str, Any],
    vocabulary: Vocabulary | None,
) -> str | None:
    """Return what is wrong with a reply to the request ``body``, or None."""
    meta, count = reply.meta_info, len(ids)
    if meta.id != body["rid"]:
        return f"is to {meta.id[:100]!r}, not to {body['rid']!r}"
    if ids or finish is not FinishReason.ABORT:
        prompt, most = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
        if meta.prompt_tokens != prompt:
            return f"counts {meta.prompt_tokens} prompt tokens, {prompt} were sent"
        if meta.completion_tokens != count:
            return f"counts {meta.completion_tokens} tokens and has {count}"
        if not 0 < count <= most:
            return f"has {count} tokens, 1 to {most} were requested"
    if reply.output_ids is not None and reply.output_ids != list(ids):
        return "has output_ids that are not those of its output_token_logprobs"
    size, last = _MAX_ID if vocabulary is None else vocabulary.size, max(ids, default=-1)
    if last >= size:
        return f"has the token id {last}, but the policy has {size} tokens: is model.path the engine's model?"
    if highest > ROUNDING:
        return f"has a log-probability of {highest}"
    ends, matched = body["sampling_params"].get("stop_token_ids"), meta.finish_reason.matched
    if isinstance(matched, int) and ends and matched not in ends:
        return (
            f"ended at token {matched}, which ends no turn of model.path: does the engine's model have another eos_token_id in "
            "config.json or generation_config.json?"
        )
    return None


def _finish_reason(kind: str) -> FinishReason:
    try:
        return FinishReason(kind)
    except ValueError:
        raise SamplerError(f"the engine ended a generation with finish_reason {kind[:100]!r}") from None
