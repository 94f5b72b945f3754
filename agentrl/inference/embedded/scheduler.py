"""Continuous batching: who waits, who runs, and when the weights may change.

Everything happens on the event loop's thread, one `Step` at a time; between steps the loop serves HTTP. Python threads
would only fight over the interpreter, and torch uses its own for the arithmetic.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import numpy as np

from agentrl.inference.embedded.counter_rng import as_word
from agentrl.inference.embedded.errors import BadRequestError
from agentrl.inference.embedded.forward_batch import Segment
from agentrl.inference.embedded.kv_slots import Place, SlotTable, Wait
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import Asked, Request
from agentrl.inference.embedded.sampling import sample
from agentrl.inference.embedded.stop_strings import StopMatcher

PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_PARTS = ("weights", "kv_cache")
_PREFILL_TOKENS = 8192
"""Prompt tokens a step computes at most, unless one request alone has more."""
_TURNS = 4
"""Turns of the event loop between steps: what a request needs from its socket to the queue."""


class Scheduler:
    """Runs requests on a model."""

    def __init__(self, model: Model, stops: StopMatcher, slots: int, seed: int, version: str) -> None:
        """Take the model; ``version`` names the weights that it has now."""
        self.model = model
        self.version = version
        self._stops = stops
        self._table = SlotTable(slots, model.context)
        self._seeds = np.random.default_rng(seed)  # of requests that bring none
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._paused: str | None = None
        self._updates = 0
        self._window = False
        self._out: set[str] = set()
        """Parts of the memory that were given back."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # Requests

    def submit(self, asked: Asked) -> Request:
        """Queue a generation; its ``done`` tells when it has ended.

        Raises:
            BadRequestError: it can never be served.
        """
        count, context = len(asked.token_ids), self.model.context
        if not count or not all(isinstance(token, int) for token in asked.token_ids):
            raise BadRequestError("input_ids must be a list of token ids, or of such lists")
        if count >= context:
            raise BadRequestError(
                f"The input ({count} tokens) is longer than the model's context length ({context} tokens)."
            )
        outside = next((token for token in asked.token_ids if not 0 <= token < self.model.vocabulary), None)
        if outside is not None:
            raise BadRequestError(f"token id {outside} is outside the vocabulary of {self.model.vocabulary}")
        options = asked.options
        # As in SGLang, no token at all ends a request with ignore_eos.
        ends: frozenset[int] = frozenset() if options.ignore_eos else options.stop_token_ids | self.model.end_ids
        request = Request(
            prompt=np.array(asked.token_ids, np.int32),
            options=options,
            rid=asked.rid,
            logprobs_wanted=asked.logprobs,
            texts_wanted=asked.texts,
            done=asyncio.get_running_loop().create_future(),
            limit=min(options.max_new_tokens, context - count),
            stop_ids=ends,
            may_stop=self._stops.may_complete(options.stop) if options.stop else None,
            seed=as_word(self._new_seed() if options.sampling_seed is None else options.sampling_seed),
        )
        self._waiting.append(request)
        self._wake.set()
        return request

    def _new_seed(self) -> int:
        return int(self._seeds.integers(1 << 63))

    def abort(self, which: Callable[[Request], bool], why: str = "Aborted") -> None:
        """End all requests that ``which`` is true of; they keep what they have."""
        for request in [*self._running, *self._waiting]:
            if which(request):
                self._end(request, {"type": "abort", "message": why})
        self._sweep()

    def reply(self, request: Request) -> dict[str, Any]:
        """Return the answer to a request that has ended, in SGLang's words (those of 0.5.23: ``weight_versions`` are
        exact even where the weights changed on the way).
        """
        options, stop = request.options, request.stop_text
        trimmed = None if options.no_stop_trim else stop
        ids = request.output
        if not options.no_stop_trim and stop is None and ids and ids[-1] in request.stop_ids:
            ids = ids[:-1]
        meta: dict[str, Any] = {
            "id": request.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": max(request.cached, 0),
            "weight_version": request.versions[-1][1] if request.versions else self.version,
            "weight_versions": _spans(request),
        }
        if request.logprobs_wanted:
            texts = self._stops.texts() if request.texts_wanted else None
            pairs = zip(request.logprobs, request.output, strict=True)
            meta["output_token_logprobs"] = [[lp, token, texts[token] if texts else None] for lp, token in pairs]
        text = self._stops.text(ids, trimmed, skip_special=options.skip_special_tokens)
        return {"text": text, "output_ids": request.output, "meta_info": meta}

    # The loop

    async def run(self) -> None:
        """Compute steps as long as there is something to do; ends only with an error, which fails all requests."""
        try:
            while True:
                if not self._step():
                    self._wake.clear()
                    await self._wake.wait()
                for _ in range(_TURNS):
                    await asyncio.sleep(0)
        except BaseException as error:
            for request in [*self._running, *self._waiting]:
                if not request.done.done():
                    request.done.set_exception(RuntimeError(f"the engine failed: {error}"))
            raise

    def _step(self) -> bool:
        """Compute one step; False where there is nothing to compute."""
        if self._paused is not None or self._out:
            return False
        segments = [
            Segment(r.slot, int(self._table.held[r.slot]), np.array(r.output[-1:], np.int32)) for r in self._running
        ]
        for request, segment in zip(self._running, segments, strict=True):
            self._table.append(request.slot, int(segment.tokens[0]))
        if not self._updates:
            segments += self._admit()
        if not segments:
            return False
        logits, order = self.model.compute(segments)
        self._table.computed()
        requests = [self._running[index] for index in order]
        tokens, logprobs = sample(logits, requests)
        for request, token, logprob in zip(requests, tokens, logprobs, strict=True):
            self._take(request, token, logprob)
        self._sweep()
        return True

    def _admit(self) -> list[Segment]:
        """Give slots to waiting requests, in order; return what is to be computed for them."""
        segments: list[Segment] = []
        budget = _PREFILL_TOKENS
        later: list[Request] = []
        while self._waiting and budget > 0:
            request = self._waiting[0]
            tokens = request.tokens()
            place = self._table.place(tokens)
            if place is Wait.FULL:
                break
            self._waiting.popleft()
            if not isinstance(place, Place):
                later.append(request)
                continue
            if place.source != place.slot:
                self.model.cache.copy(place.source, place.slot, place.cached)
            request.slot = place.slot
            request.cached = place.cached if request.cached < 0 else request.cached
            segments.append(Segment(place.slot, place.cached, tokens[place.cached :]))
            budget -= len(tokens) - place.cached
            self._running.append(request)
        self._waiting.extendleft(reversed(later))
        return segments

    def _take(self, request: Request, token: int, logprob: float) -> None:
        if not request.versions or request.versions[-1][1] != self.version:
            request.versions.append((len(request.output), self.version))
        request.output.append(token)
        request.logprobs.append(logprob)
        if token in request.stop_ids:
            self._end(request, {"type": "stop", "matched": token})
            return
        if request.may_stop is not None and request.may_stop[token]:
            request.stop_text = self._stops.find(request.output, request.options.stop)
            if request.stop_text is not None:
                self._end(request, {"type": "stop", "matched": request.stop_text})
                return
        if len(request.output) >= request.limit:
            self._end(request, {"type": "length", "length": len(request.output)})

    def _end(self, request: Request, finish: dict[str, Any]) -> None:
        request.end(finish)
        self._drop_slot(request)

    def _drop_slot(self, request: Request) -> None:
        if request.slot >= 0:
            self._table.release(request.slot)
            request.slot = -1

    def _sweep(self) -> None:
        """Forget requests that have ended."""
        self._running = [request for request in self._running if request.finish is None]
        if any(request.finish is not None for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if request.finish is None)
        if not self._running:
            self._idle.set()

    # Control

    def pause(self, mode: str) -> None:
        """Stop computing. ``abort`` ends all requests, ``retract`` lets them start over from their tokens when things
        go on, ``in_place`` keeps their keys and values.

        Raises:
            BadRequestError: there is no such mode.
        """
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"mode={mode!r}: must be one of {', '.join(PAUSE_MODES)}")
        self._paused = mode
        if mode == "abort":
            self.abort(lambda request: True, "Aborted by pause_generation")
        elif mode == "retract":
            for request in self._running:
                self._drop_slot(request)
            self._waiting.extendleft(reversed(self._running))
            self._running = []
        # Updates that waited for running requests may go on now: nothing is computed.
        self._idle.set()

    def resume(self) -> None:
        """Go on computing.

        Raises:
            BadRequestError: a weight update is half done.
        """
        if self._window:
            raise BadRequestError("a weight update is under way: end it with /end_weight_update")
        self._paused = None
        self._wake.set()

    def flush(self) -> None:
        """Drop the prefix cache; what runs goes on."""
        self._table.flush()

    async def release(self, parts: Collection[str]) -> None:
        """Give memory back once what runs has ended; other requests wait until all of it is there again.

        Raises:
            BadRequestError: an update or paused requests hold it, or a part is out already.
        """
        _check_parts(parts)
        if self._updates:
            raise BadRequestError("a weight update is under way: end it first")
        async with self._still():
            if self._running:
                raise BadRequestError("paused requests hold the memory: let them end first")
            if self._out & set(parts):
                raise BadRequestError(f"{sorted(self._out & set(parts))} was given back already")
            self._out |= set(parts)
            if "kv_cache" in parts:
                self._table.flush()
                self.model.cache.drop()
            if "weights" in parts:
                self.model.drop_weights()

    def take_back(self, parts: Collection[str]) -> None:
        """Take memory again; that of weights holds no numbers until an update has come.

        Raises:
            BadRequestError: a part is there.
        """
        _check_parts(parts)
        if set(parts) - self._out:
            raise BadRequestError(f"{sorted(set(parts) - self._out)} was not given back")
        self._out -= set(parts)
        if "weights" in parts:
            self.model.take_weights()
        self._wake.set()

    def begin_update(self) -> None:
        """Open the window in which tensors are taken; see `update`.

        Raises:
            BadRequestError: it is open.
        """
        if self._window:
            raise BadRequestError("a weight update is under way: end it with /end_weight_update")
        self._window = True
        self._updates += 1

    def end_update(self) -> None:
        """Close the window: requests start again.

        Raises:
            BadRequestError: it is not open.
        """
        if not self._window:
            raise BadRequestError("no weight update is under way: begin one with /begin_weight_update")
        self._window = False
        self._updates -= 1
        self._wake.set()

    async def drained(self) -> None:
        """Wait until nothing runs, or the engine is paused."""
        while self._paused is None and self._running:
            self._idle.clear()
            await self._idle.wait()

    @asynccontextmanager
    async def update(self, version: str | None) -> AsyncIterator[None]:
        """Change weights inside; afterwards the prefix cache is empty and ``version`` samples."""
        async with self._still():
            yield
            self._table.flush()
            if version is not None:
                self.version = version

    @asynccontextmanager
    async def _still(self) -> AsyncIterator[None]:
        """Inside, running requests have ended, or stand still because of a pause, and none starts."""
        self._updates += 1
        try:
            await self.drained()
            yield
        finally:
            self._updates -= 1
            self._wake.set()


def _check_parts(parts: Collection[str]) -> None:
    unknown = sorted(set(parts) - set(MEMORY_PARTS))
    if unknown:
        raise BadRequestError(f"tags={unknown}: the embedded engine's memory has the parts {', '.join(MEMORY_PARTS)}")


def _spans(request: Request) -> list[dict[str, Any]]:
    ends = [*(start for start, _ in request.versions[1:]), len(request.output)]
    return [
        {"version": version, "start": start, "end": end}
        for (start, version), end in zip(request.versions, ends, strict=bool(request.versions))
    ]
