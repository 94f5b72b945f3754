"""Limits of an episode: turns, tokens, time."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of one episode; the configuration's ``rollout.*`` and ``sampler.max_new_tokens``."""

    max_turns: int
    """Turns of the policy in the whole episode, branches included."""
    max_tokens: int
    """Tokens of one context, prompt and observations included; branches and rewritten conversations count separately."""
    max_seconds: float
    """Seconds of the environment and its tools; see `EpisodeClock`."""
    max_new_tokens: int
    """Tokens of one turn."""

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could be sampled."""
        for name in self.__slots__:
            if getattr(self, name) <= 0:
                raise ValueError(f"rollout limit {name}={getattr(self, name)} must be above 0")

    def room(self, prompt_tokens: int) -> int:
        """Return the number of tokens that the next turn may have after a prompt of ``prompt_tokens``; 0 or less: none."""
        return min(self.max_new_tokens, self.max_tokens - prompt_tokens)


class EpisodeClock:
    """The time limit of an attempt at an episode: an async context manager that raises `TimeoutError` when time is up.

    It counts the time of environment, user code and tools. It stops while engines have a request, and while a tool server
    takes longer than the tool may: outages, queues, pauses and retries are not the policy's time. How much a policy samples is
    limited by turns and tokens.
    """

    def __init__(self, seconds: float, grace: float = 0.0) -> None:
        """Start a clock with ``seconds`` left; the context manager allows ``grace`` seconds more."""
        self.seconds = seconds
        """Seconds that it was started with."""
        self._loop = asyncio.get_running_loop()
        self._end = self._loop.time() + seconds
        self._grace = grace
        self._timeout = asyncio.timeout_at(self._end + grace)
        self._entered = False
        self._stops = 0
        """Concurrent `pause` sections."""
        self._stopped_at = self._counted = 0.0

    @property
    def seconds_left(self) -> float:
        """Seconds left; 0 or less: time is up."""
        return self._end - (self._stopped_at if self._stops else self._loop.time())

    @property
    def expired(self) -> bool:
        """Whether the context manager has raised `TimeoutError`."""
        return self._timeout.expired()

    @contextmanager
    def pause(self, counted: float = 0.0) -> Iterator[None]:
        """Stop the clock; of the time until the exit at most ``counted`` seconds count. Sections may overlap."""
        if not self._stops:
            self._stopped_at, self._counted = self._loop.time(), 0.0
            self._reschedule(None)
        self._stops += 1
        self._counted = max(self._counted, counted)
        try:
            yield
        finally:
            self._stops -= 1
            if not self._stops:
                passed = self._loop.time() - self._stopped_at
                self._end += max(0.0, passed - self._counted)
                self._reschedule(self._end + self._grace)

    def raise_nothing(self) -> None:
        """Raise no `TimeoutError` any more: the caller watches `seconds_left`, and ends what it runs itself."""
        self._grace = math.inf
        self._reschedule(None)

    def _reschedule(self, when: float | None) -> None:
        if self._entered and not self._timeout.expired():
            self._timeout.reschedule(None if self._grace == math.inf else when)

    async def __aenter__(self) -> EpisodeClock:
        """Enforce the limit in this task until the exit."""
        await self._timeout.__aenter__()
        self._entered = True
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the enforcement."""
        self._entered = False
        await self._timeout.__aexit__(kind, error, traceback)
