"""Waits of another process: kept there until they are sent, and passed here to the listeners of the run."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Collection, Sequence
from time import monotonic
from typing import NamedTuple

from agentrl.obs.waiting import WaitListener, WaitRegistry, current_wait, waiting

GROUP = "group"
"""The kind of the outermost waits of a runner process, whose details are the number of its group."""


class WaitBegun(NamedTuple):
    """A wait has begun."""

    number: int
    """Number of the wait in its process."""
    outer: int
    """Number of the wait that it is nested in; -1: none that is sent."""
    kind: str
    details: str
    at: float
    """On `time.monotonic`'s clock of its process."""


class WaitEnded(NamedTuple):
    """A wait has ended."""

    number: int
    details: str
    at: float
    error: str
    """Name of the error's class; empty if there was none."""


class WaitLog(WaitListener):
    """Keeps the begins and ends of waits until they are sent."""

    def __init__(self) -> None:
        self.kinds: Collection[str] | None = None
        """Kinds that are sent, besides `GROUP`; None: all."""
        self._numbers = itertools.count()
        self._open: dict[waiting, int] = {}
        self._events: deque[WaitBegun | WaitEnded] = deque()
        """Any thread adds to it."""

    def on_begin(self, wait: waiting) -> None:
        """Keep a begin."""
        if self.kinds is not None and wait.kind not in self.kinds and wait.kind != GROUP:
            return
        outer = wait.parent
        while isinstance(outer, waiting) and outer not in self._open:
            outer = outer.parent
        self._open[wait] = number = next(self._numbers)
        outer_number = self._open[outer] if isinstance(outer, waiting) else -1
        self._events.append(WaitBegun(number, outer_number, wait.kind, wait.details, wait.since))

    def on_end(self, wait: waiting, ended_at: float, error: str) -> None:
        """Keep an end."""
        if (number := self._open.pop(wait, None)) is not None:
            self._events.append(WaitEnded(number, wait.details, ended_at, error))

    def take(self) -> list[WaitBegun | WaitEnded]:
        """Return what was kept since the last call."""
        return [self._events.popleft() for _ in range(len(self._events))]


class RemoteWait(waiting):
    """A wait of another process."""

    __slots__ = ("process",)

    def __init__(self, process: int, begun: WaitBegun, parent: waiting | WaitRegistry, since: float) -> None:
        super().__init__(begun.kind, begun.details)
        self.process = process
        """Number of the runner, from 0."""
        self.parent, self.since = parent, since

    def set_details(self, details: str) -> None:
        """Replace the details."""
        self._details = (details,)


class RemoteWaits:
    """Passes the waits of a runner process to the listeners of the context in which it is created.

    Args:
        process: number of the runner.
        outer: returns the wait in which a group with a number was given to the runner.
    """

    def __init__(self, process: int, outer: Callable[[int], waiting | WaitRegistry | None]) -> None:
        self._process, self._outer = process, outer
        self._registry = None if (wait := current_wait()) is None else wait.waits
        self._open: dict[int, RemoteWait] = {}
        self._groups: dict[int, waiting | WaitRegistry] = {}
        self._clock_offset = float("inf")
        """From the other process's clock to this one's, as far as it is known: the least delay of a message."""

    def receive(self, sent_at: float, events: Sequence[WaitBegun | WaitEnded], *, progress: bool) -> None:
        """Pass on waits of a message that was sent at a time of the other clock; ``progress``: one has ended without error."""
        if self._registry is None:
            return
        self._clock_offset = min(self._clock_offset, monotonic() - sent_at)
        if progress:
            self._registry.last_progress = monotonic()
        for event in events:
            if isinstance(event, WaitBegun):
                self._begin(event, self._registry)
            elif (wait := self._open.pop(event.number, None)) is not None:
                wait.set_details(event.details)
                self._end(wait, event.at + self._clock_offset, event.error)
            else:
                self._groups.pop(event.number, None)

    def end_all(self, error: str) -> None:
        """End all waits of a process that is gone."""
        for wait in reversed(self._open.values()):
            self._end(wait, monotonic(), error)
        self._open.clear()
        self._groups.clear()
        self._clock_offset = float("inf")

    def _begin(self, begun: WaitBegun, registry: WaitRegistry) -> None:
        if begun.kind == GROUP:
            self._groups[begun.number] = self._outer(int(begun.details)) or registry
            return
        parent = self._open.get(begun.outer) or self._groups.get(begun.outer, registry)
        self._open[begun.number] = wait = RemoteWait(self._process, begun, parent, begun.at + self._clock_offset)
        for listener in registry.listeners:
            listener.on_begin(wait)

    def _end(self, wait: RemoteWait, ended_at: float, error: str) -> None:
        assert self._registry is not None, "it has begun"
        for listener in self._registry.listeners:
            listener.on_end(wait, ended_at, error)
