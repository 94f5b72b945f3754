"""Engines in virtual time: requests share an engine's decoding steps, whose seconds grow with the number of requests."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.fleet.router import RoutedSampler
from benchmarks.workload import EpisodePlan


@dataclass(frozen=True, slots=True)
class EngineRates:
    """The speed of an engine on one GPU.

    The defaults are from SGLang on one H200 with a random 0.6B model: 14,800 tokens/s with 64 requests of 512 prompt and 256 new
    tokens, 23,900 with 256, and a prefill of three times the learner's tokens/s, which computes gradients too.
    """

    step_s: float = 2.19e-3
    """Seconds of a decoding step without requests."""
    request_s: float = 25.3e-6
    """Seconds that each request adds to it."""
    prefill_tokens_per_s: float = 250e3
    """Prompt tokens that are not in the prefix cache; nothing is decoded meanwhile."""
    max_running: int = 256
    """Requests that decode at the same time; others wait."""
    keeps_cache: bool = False
    """A weight sync keeps keys and values (``weights.pause=in_place``). Else it drops them, and the contexts of requests in
    progress are computed again (``abort``, ``retract``)."""


@dataclass(slots=True, eq=False)
class _Request:
    """A request at an engine. Lengths are in tokens of the engine."""

    group: str
    prompt: float
    """Tokens of the first prompt, which the group's requests share in the prefix cache."""
    tokens: float
    """To sample."""
    context: float
    """Before them."""
    prefill: float
    """Tokens of the context that are not in the prefix cache."""
    done: asyncio.Future[None]
    began: float = 0.0
    """The engine's progress when it began."""
    versions: list[tuple[float, int]] = field(default_factory=list)
    """From this number of sampled tokens on, this policy version."""


class _Engine:
    """One engine, a `agentrl.core.sampler.Sampler`: the running requests progress alike, a token in each decoding step."""

    def __init__(
        self, plans: Mapping[str, EpisodePlan], rates: EngineRates, token_scale: float, ids: tuple[int, int]
    ) -> None:
        self._plans, self._scale, self._ids = plans, token_scale, ids
        self.rates = rates
        self.version = 0
        self.busy_s = 0.0
        self.cached: dict[str, float] = {}
        """Tokens in the prefix cache, by session; by group for the first prompt."""
        self.prefilled = 0.0
        """Tokens of contexts that were computed."""
        self._turns: Counter[str] = Counter()
        """Requests of each session so far."""
        self._heap: list[tuple[float, int, _Request]] = []
        """Running requests by the progress at which they end."""
        self._waiting: deque[_Request] = deque()
        self._order = itertools.count()
        self._progress = 0.0
        """Tokens that a request has sampled that runs since the beginning."""
        self._prefill_s = 0.0
        """Seconds of prefill that are left."""
        self._since = 0.0
        self._paused = False
        self._timer: asyncio.TimerHandle | None = None

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Return the planned number of tokens when they are sampled."""
        plan, turn = self._plans[session_id], self._turns[session_id]
        self._turns[session_id] += 1
        group = session_id.rpartition("/")[0]
        context = self._scale * (plan.prompt + sum(map(sum, plan.turns[:turn])))
        cached = max(self.cached.get(session_id, 0.0), self.cached.get(group, 0.0))
        size = plan.turns[turn][0]
        done = asyncio.get_running_loop().create_future()
        prompt_size = self._scale * plan.prompt
        request = _Request(group, prompt_size, self._scale * size, context, context - cached, done)
        self.cached[group] = prompt_size
        version = self.version
        self._add(request)
        await done
        if self.version == version or self.rates.keeps_cache:
            self.cached[session_id] = context + request.tokens
        starts = {min(size - 1, int(at / self._scale)): version for at, version in request.versions}
        ids = (self._ids[0],) * (size - 1) + (self._ids[1],)
        versions = tuple(sorted(starts.items()))
        return Generation(ids, (-0.5,) * size, FinishReason.STOP, versions, int(cached), request_id)

    async def abort(self, request_id: str) -> None:
        """Do nothing: a simulation ends with its requests."""

    async def close_session(self, session_id: str) -> None:
        """Forget the session."""
        del self._turns[session_id]

    def _add(self, request: _Request) -> None:
        """Begin a request, or let it wait."""
        self._advance()
        self._waiting.append(request)
        self._fill()

    def pause(self) -> None:
        """Stop decoding."""
        self._advance()
        self._paused = True
        self._schedule()

    def resume(self, version: int) -> None:
        """Continue with a policy version."""
        self._advance()
        self._paused, self.version = False, version
        for _, _, request in self._heap:
            sampled = self._progress - request.began
            if request.versions[-1][0] >= sampled:
                request.versions.pop()
            request.versions.append((sampled, version))
        if not self.rates.keeps_cache:
            self._drop_cache()
        self._schedule()

    def _drop_cache(self) -> None:
        """Compute the contexts of running requests again, with the prompt of a group once."""
        self.cached = {request.group: request.prompt for _, _, request in self._heap}
        added = (request.context - request.prompt + self._progress - request.began for _, _, request in self._heap)
        self._prefill(sum(self.cached.values()) + sum(added))

    def _prefill(self, tokens: float) -> None:
        self.prefilled += tokens
        self._prefill_s += tokens / self.rates.prefill_tokens_per_s

    def _advance(self) -> None:
        """Bring the progress to the present."""
        current_time = asyncio.get_running_loop().time()
        passed, self._since = current_time - self._since, current_time
        if self._paused or not self._heap:
            return
        self.busy_s += passed
        prefill_s = min(passed, self._prefill_s)
        self._prefill_s -= prefill_s
        self._progress += (passed - prefill_s) / self._step_s()

    def _step_s(self) -> float:
        return self.rates.step_s + len(self._heap) * self.rates.request_s

    def _fill(self) -> None:
        """Begin waiting requests as far as there is room."""
        while self._waiting and len(self._heap) < self.rates.max_running:
            request = self._waiting.popleft()
            request.began, request.versions = self._progress, [(0.0, self.version)]
            self._prefill(request.prefill)
            heapq.heappush(self._heap, (self._progress + request.tokens, next(self._order), request))
        self._schedule()

    def _schedule(self) -> None:
        """Set the timer to the end of the next request."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._heap and not self._paused:
            left_s = self._prefill_s + max(0.0, self._heap[0][0] - self._progress) * self._step_s()
            self._timer = asyncio.get_running_loop().call_later(left_s, self._finish)

    def _finish(self) -> None:
        """End the requests that have all of their tokens."""
        self._advance()
        while self._heap and self._heap[0][0] <= self._progress + 1e-6:
            request = heapq.heappop(self._heap)[2]
            if not request.done.done():
                request.done.set_result(None)
        self._fill()


class ScriptedEngines:
    """Engines for planned episodes that take as long as real ones, behind the router of a run.

    A weight sync pauses all engines and drops their caches, as ``weights.pause=abort`` does.

    Args:
        plans: by session. Entries may be added at any time.
        count: engines.
        rates: of each.
        token_scale: tokens of an engine for each planned token.
        token_id: is sampled, again and again.
        end_token_id: is sampled last.
    """

    def __init__(
        self,
        plans: Mapping[str, EpisodePlan],
        count: int,
        rates: EngineRates,
        token_scale: float,
        token_id: int,
        end_token_id: int,
    ) -> None:
        self.sampler = RoutedSampler()
        """Samples with all engines."""
        self._engines = [_Engine(plans, rates, token_scale, (token_id, end_token_id)) for _ in range(count)]
        for number, engine in enumerate(self._engines):
            self.sampler.add(f"engine-{number}", engine)

    def pause(self) -> None:
        """Stop decoding."""
        for engine in self._engines:
            engine.pause()

    def resume(self, version: int) -> None:
        """Continue with a policy version."""
        for engine in self._engines:
            engine.resume(version)

    def busy_s(self) -> float:
        """Return the seconds in which an engine had a request, averaged over engines."""
        return sum(engine.busy_s for engine in self._engines) / len(self._engines)

    def prefilled_tokens(self) -> float:
        """Return the tokens of contexts that all engines have computed."""
        return sum(engine.prefilled for engine in self._engines)
