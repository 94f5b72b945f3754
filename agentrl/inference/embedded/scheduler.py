"""Continuous batching: admission of requests, steps of the model, pauses, and the points at which weights may change.

Everything runs on the event loop's thread, one `ForwardBatch` at a time; between steps the loop serves HTTP. More Python
threads would only compete for the interpreter lock; the model uses its own threads for arithmetic.
"""

from __future__ import annotations

import asyncio
import base64
from collections import deque
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agentrl.inference.embedded.adapters import Adapter, AdapterTable
from agentrl.inference.embedded.forward_batch import Segment
from agentrl.inference.embedded.images import PromptImages
from agentrl.inference.embedded.kv_slots import NoSlot, SlotAssignment, SlotTable
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.replies import BadRequestError
from agentrl.inference.embedded.request import GenerateInput, Request
from agentrl.inference.embedded.sampling import as_uint64, prompt_logprobs, sample
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.models.module_outputs import ModuleOutputs

PAUSE_MODES = ("abort", "retract", "in_place")
MEMORY_PARTS = ("weights", "kv_cache")
_PREFILL_TOKENS = 8192
"""Most prompt tokens of a step, unless one request alone has more."""
_SCORE_LOGITS = 1 << 26
"""Most logits of the requests that begin in a step, unless one request alone has more: 256 MiB."""
_LOOP_ITERATIONS = 4
"""Iterations of the event loop between steps: as many as a request needs from its socket to the queue."""


class Scheduler:
    """Runs requests on a model by continuous batching."""

    def __init__(self, model: Model, stops: StopMatcher, slots: int, seed: int, version: str) -> None:
        """Create a scheduler without requests; ``version`` is the version of the weights that the model has."""
        self.model = model
        self.version = version
        self.adapters = AdapterTable()
        """LoRA adapters that requests may name."""
        self._stops = stops
        self._table = SlotTable(slots, model.context)
        self._seeds = np.random.default_rng(seed)  # of requests without sampling_seed
        self._namespaces: dict[tuple[int, str | None], int] = {}
        """Number of each adapter and extra key: prefixes are reused within one."""
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._paused: str | None = None
        self._updates = 0
        """Weight updates and memory releases in progress: no request is admitted."""
        self._update_open = False
        """Between /begin_weight_update and /end_weight_update."""
        self._released: set[str] = set()
        """Memory parts that were released."""
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()

    # Requests

    def submit(self, prompt: GenerateInput) -> Request:
        """Queue a request; its ``done`` resolves when it ends.

        Raises:
            BadRequestError: the model can never serve it.
        """
        if not prompt.token_ids or not all(isinstance(token, int) for token in prompt.token_ids):
            raise BadRequestError("input_ids must be a list of token ids, or of such lists")
        token_ids, images = self._place_images(prompt)
        count, context = len(token_ids), self.model.context
        if prompt.score_from is not None and not 0 <= prompt.score_from < count:
            raise BadRequestError(
                f"logprob_start_len={prompt.score_from} is not the index of one of the {count} input_ids"
            )
        if count >= context:
            raise BadRequestError(
                f"The input ({count} tokens) is longer than the model's context length ({context} tokens)."
            )
        limit = prompt.options.max_new_tokens if prompt.score_from is None else 0
        if count + limit > context:
            raise BadRequestError(
                f"{count} tokens of input and max_new_tokens={limit} exceed the model's maximum context "
                f"length of {context} tokens: they are {count + limit} tokens."
            )
        if prompt.experts_from is not None and not (self.model.has_experts and 0 <= prompt.experts_from <= count):
            raise BadRequestError(
                f"routed_experts_start_len={prompt.experts_from} with {count} input_ids: the model has no experts that can be "
                "returned, or the prompt no such token"
            )
        outside = next((token for token in token_ids if not 0 <= token < self.model.vocabulary), None)
        if outside is not None:
            raise BadRequestError(f"token id {outside} is outside the vocabulary of {self.model.vocabulary}")
        options = prompt.options
        # As in SGLang, no token ends a request with ignore_eos.
        ends: frozenset[int] = frozenset() if options.ignore_eos else options.stop_token_ids | self.model.end_ids
        request = Request(
            input=prompt,
            prompt=np.array(token_ids, np.int32),
            done=asyncio.get_running_loop().create_future(),
            limit=limit,
            stop_ids=ends,
            may_stop=self._stops.may_complete(options.stop) if options.stop else None,
            seed=as_uint64(self._new_seed() if options.sampling_seed is None else options.sampling_seed),
            adapter=None if prompt.adapter is None else self.adapters.get(prompt.adapter),
            images=images,
        )
        self._waiting.append(request)
        self._wake.set()
        return request

    def _place_images(self, prompt: GenerateInput) -> tuple[list[int], PromptImages | None]:
        """Return the ids of a prompt with the tokens of its images in full, and its images."""
        if not prompt.images:
            return prompt.token_ids, None
        if self.model.images is None:
            raise BadRequestError(
                f"image_data: the model {self.model.folder} takes no images, or has no image processor"
            )
        return self.model.images.place(prompt.token_ids, prompt.images, prompt.image_spans)

    def _new_seed(self) -> int:
        return int(self._seeds.integers(1 << 63))

    def abort(self, which: Callable[[Request], bool], why: str = "Aborted") -> None:
        """End all requests for which ``which`` is true; their output so far is their reply."""
        for request in [*self._running, *self._waiting]:
            if which(request):
                self._end(request, {"type": "abort", "message": why})
        self._remove_finished()

    def reply(self, request: Request) -> dict[str, Any]:
        """Return the reply to a request that has ended, in SGLang's format.

        ``weight_versions``, as of SGLang 0.5.23, are exact even if the weights changed during the generation.
        """
        options, stop = request.options, request.stop_text
        trimmed = None if options.no_stop_trim else stop
        ids = request.output
        if not options.no_stop_trim and stop is None and ids and ids[-1] in request.stop_ids:
            ids = ids[:-1]
        meta: dict[str, Any] = {
            "id": request.input.rid,
            "finish_reason": request.finish,
            "prompt_tokens": len(request.prompt),
            "completion_tokens": len(request.output),
            "cached_tokens": max(request.cached, 0),
            "weight_version": request.versions[-1][1] if request.versions else self.version,
            "weight_versions": _version_spans(request),
        }
        if request.input.logprobs:
            pairs = zip(request.logprobs, request.output, strict=True)
            meta["output_token_logprobs"] = [[lp, token, None] for lp, token in pairs]
        if request.support is not None:
            meta["output_token_sampling_mask"] = [support.token_ids for support in request.supports]
            meta["output_token_sampling_logprobs"] = [
                support.logprobs if request.support == "support" else support.sampled_logprob
                for support in request.supports
            ]
        if request.score_from is not None:  # the first has none, as in SGLang, whatever comes before it
            scored = zip([None, *request.scores], request.prompt[request.score_from :].tolist(), strict=False)
            meta["input_token_logprobs"] = [[lp, token, None] for lp, token in scored]
        if request.experts is not None:
            meta["routed_experts"] = base64.b64encode(request.experts.tobytes()).decode("ascii")
        text = self._stops.text(ids, trimmed, skip_special=options.skip_special_tokens)
        reply = {"text": text, "output_ids": request.output, "meta_info": meta}
        return reply | {"prompt_token_ids": request.prompt.tolist()} if request.input.returns_prompt else reply

    # The loop

    async def run(self) -> None:
        """Compute steps, forever; an error fails all requests and is raised."""
        try:
            while True:
                if not self._step():
                    self._wake.clear()
                    await self._wake.wait()
                for _ in range(_LOOP_ITERATIONS):
                    await asyncio.sleep(0)
        except BaseException as error:
            for request in [*self._running, *self._waiting]:
                if not request.done.done():
                    request.done.set_exception(RuntimeError(f"the engine failed: {error}"))
            raise

    def _step(self) -> bool:
        """Compute one step; return False if there is nothing to compute."""
        if self._paused is not None or self._released:
            return False
        segments = [
            request.segment(int(self._table.held[request.slot]), np.array(request.output[-1:], np.int32))
            for request in self._running
        ]
        for request, segment in zip(self._running, segments, strict=True):
            self._table.append(request.slot, int(segment.tokens[0]))
        if not self._updates:
            segments += self._admit()
        if not segments:
            return False
        logits, order = self._compute(segments)
        self._table.mark_computed()
        requests = [self._running[index] for index in order]
        if any(request.score_from is not None for request in requests):
            logits, requests = self._score(logits, requests, [segments[index].kept for index in order])
        if requests:
            sampled = sample(logits, requests, batch_invariant=self.model.batch_invariant)
            for request, token, logprob, support in zip(requests, *sampled, strict=True):
                if support is not None:
                    request.supports.append(support)
                self._append(request, token, logprob)
        self._remove_finished()
        return True

    def _compute(self, segments: list[Segment]) -> tuple[Tensor, list[int]]:
        """Compute the segments of the running requests, those of each adapter together; see `Model.compute`."""
        by_adapter: dict[Adapter | None, list[int]] = {}
        for index, request in enumerate(self._running):
            by_adapter.setdefault(request.adapter, []).append(index)
        parts, order = [], list[int]()
        for adapter, indices in by_adapter.items():
            logits, inner = self.model.compute([segments[index] for index in indices], adapter)
            parts.append(logits)
            order += [indices[at] for at in inner]
        return parts[0] if len(parts) == 1 else torch.cat(parts), order

    def _score(self, logits: Tensor, requests: list[Request], logit_counts: list[int]) -> tuple[Tensor, list[Request]]:
        """End the requests that are scored; return the logits of the others' next tokens, and the others."""
        sampled: list[tuple[Tensor, Request]] = []
        for rows, request in zip(torch.split(logits, logit_counts), requests, strict=True):
            if request.score_from is None:
                sampled.append((rows, request))
                continue
            scored_ids = request.prompt[request.score_from + 1 :]
            request.scores = prompt_logprobs(rows[:-1], scored_ids, batch_invariant=self.model.batch_invariant)
            self._end(request, {"type": "length", "length": 0})
        rows_of = [rows for rows, _ in sampled]
        return torch.cat(rows_of) if rows_of else logits[:0], [request for _, request in sampled]

    def _admit(self) -> list[Segment]:
        """Assign slots to waiting requests in order, and return their tokens to be computed."""
        segments: list[Segment] = []
        budget, logits = _PREFILL_TOKENS, _SCORE_LOGITS
        deferred: list[Request] = []
        while self._waiting and budget > 0 and logits > 0:
            request = self._waiting[0]
            tokens = request.tokens()
            adapter = 0 if request.adapter is None else request.adapter.number
            namespace = self._namespaces.setdefault((adapter, request.input.extra_key), len(self._namespaces))
            assigned = self._table.assign(request.keys(), request.score_from, namespace)
            if assigned is NoSlot.FULL:
                break
            self._waiting.popleft()
            if not isinstance(assigned, SlotAssignment):
                deferred.append(request)
                continue
            slot, cached = assigned.slot, assigned.cached
            if assigned.source != slot:
                self.model.cache.copy(assigned.source, slot, cached)
            request.slot = slot
            request.cached = cached if request.cached < 0 else request.cached
            logit_count = 1 if request.score_from is None else len(tokens) - request.score_from
            logits -= logit_count * self.model.vocabulary
            segments.append(request.segment(cached, tokens[cached:], logit_count))
            budget -= len(tokens) - cached
            self._running.append(request)
        self._waiting.extendleft(reversed(deferred))
        return segments

    def _append(self, request: Request, token: int, logprob: float) -> None:
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
        first = request.input.experts_from
        if first is not None and request.slot >= 0:
            computed = int(self._table.held[request.slot])
            request.experts = self.model.experts(request.slot, min(first, computed), computed)
        request.end(finish)
        self._release_slot(request)

    def _release_slot(self, request: Request) -> None:
        if request.slot >= 0:
            self._table.release(request.slot)
            request.slot = -1

    def _remove_finished(self) -> None:
        """Remove requests that have ended from the queue and the running batch."""
        self._running = [request for request in self._running if request.finish is None]
        if any(request.finish is not None for request in self._waiting):
            self._waiting = deque(request for request in self._waiting if request.finish is None)
        if not self._running:
            self._idle.set()

    # Pauses, memory and weight updates

    def load(self) -> tuple[int, int, int]:
        """Return the number of requests that have a slot, of those that wait, and of slots."""
        return len(self._running), len(self._waiting), len(self._table.active)

    def pause(self, mode: str) -> None:
        """Stop computing steps. ``abort`` ends all requests; ``retract`` frees their slots, and their tokens are computed
        again after `resume`; ``in_place`` keeps their keys and values.

        Raises:
            BadRequestError: the mode is unknown.
        """
        if mode not in PAUSE_MODES:
            raise BadRequestError(f"mode={mode!r}: must be one of {', '.join(PAUSE_MODES)}")
        self._paused = mode
        if mode == "abort":
            self.abort(lambda request: True, "Aborted by pause_generation")
        elif mode == "retract":
            for request in self._running:
                self._release_slot(request)
            self._waiting.extendleft(reversed(self._running))
            self._running = []
        # Updates that waited for running requests may continue now: nothing is computed.
        self._idle.set()

    def resume(self) -> None:
        """Continue computing steps.

        Raises:
            BadRequestError: a weight update is in progress.
        """
        if self._update_open:
            raise BadRequestError("a weight update is in progress: end it with /end_weight_update")
        self._paused = None
        self._wake.set()

    def flush(self) -> None:
        """Drop the prefix cache; running requests continue."""
        self._table.flush()

    async def release_memory(self, parts: Collection[str]) -> None:
        """Release memory when the running requests have ended; other requests wait until all of it is allocated again.

        Raises:
            BadRequestError: a weight update is in progress, paused requests use the memory, or a part was released already.
        """
        _check_parts(parts)
        if self._updates:
            raise BadRequestError("a weight update is in progress: end it first")
        async with self._no_forward():
            if self._running:
                raise BadRequestError("paused requests use the memory: let them end first")
            if self._released & set(parts):
                raise BadRequestError(f"{sorted(self._released & set(parts))} was released already")
            self._released |= set(parts)
            if "kv_cache" in parts:
                self._table.flush()
                self.model.cache.release()
            if "weights" in parts:
                self.model.release_weights()

    def resume_memory(self, parts: Collection[str]) -> None:
        """Allocate released memory again; weights are NaN until a weight update.

        Raises:
            BadRequestError: a part was not released.
        """
        _check_parts(parts)
        if set(parts) - self._released:
            raise BadRequestError(f"{sorted(set(parts) - self._released)} was not released")
        self._released -= set(parts)
        if "weights" in parts:
            self.model.allocate_weights()
        self._wake.set()

    async def module_outputs(self, token_ids: list[int]) -> ModuleOutputs:
        """Return the outputs of the model's modules for the last of the tokens, and drop the prefix cache.

        Raises:
            BadRequestError: these are no tokens of a prompt, or paused requests use the memory.
        """
        fits = 0 < len(token_ids) < self.model.context
        if not fits or not all(isinstance(token, int) and 0 <= token < self.model.vocabulary for token in token_ids):
            raise BadRequestError(f"input_ids must be a list of 1 to {self.model.context - 1} token ids")
        async with self._no_forward():
            if self._running:
                raise BadRequestError("paused requests use the memory: let them end first")
            self._table.flush()
            return self.model.module_outputs(np.array(token_ids, np.int32))

    def begin_update(self) -> None:
        """Begin a weight update: no request is admitted until `end_update`.

        Raises:
            BadRequestError: one is in progress.
        """
        if self._update_open:
            raise BadRequestError("a weight update is in progress: end it with /end_weight_update")
        self._update_open = True
        self._updates += 1

    def end_update(self) -> None:
        """End a weight update: requests are admitted again.

        Raises:
            BadRequestError: none is in progress.
        """
        if not self._update_open:
            raise BadRequestError("no weight update is in progress: begin one with /begin_weight_update")
        self._update_open = False
        self._updates -= 1
        self._wake.set()

    async def wait_idle(self) -> None:
        """Wait until no request runs, or the engine is paused."""
        while self._paused is None and self._running:
            self._idle.clear()
            await self._idle.wait()

    @asynccontextmanager
    async def update(self, version: str | None, *, flush: bool = True) -> AsyncIterator[None]:
        """Context in which weights may be changed; at its end the prefix cache is dropped with ``flush``, and ``version`` set."""
        async with self._no_forward():
            yield
            if flush:
                self._table.flush()
            self.adapters.clear()
            if version is not None:
                self.version = version

    @asynccontextmanager
    async def _no_forward(self) -> AsyncIterator[None]:
        """Context without forward passes: running requests have ended or are paused, and none is admitted."""
        self._updates += 1
        try:
            await self.wait_idle()
            yield
        finally:
            self._updates -= 1
            self._wake.set()


def _check_parts(parts: Collection[str]) -> None:
    unknown = sorted(set(parts) - set(MEMORY_PARTS))
    if unknown:
        raise BadRequestError(f"tags={unknown}: the memory parts of the embedded engine are {', '.join(MEMORY_PARTS)}")


def _version_spans(request: Request) -> list[dict[str, Any]]:
    ends = [*(start for start, _ in request.versions[1:]), len(request.output)]
    return [
        {"version": version, "start": start, "end": end}
        for (start, version), end in zip(request.versions, ends, strict=bool(request.versions))
    ]
