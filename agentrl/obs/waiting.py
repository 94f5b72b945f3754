"""Registry of what a run is waiting for: code that may hang registers itself while it waits.

::

    with waiting("tool", "search", "call search-1"):
        result = await client.call(call)

A wait costs a microsecond or two, or the lookup of a context variable without a watchdog (`agentrl.obs.watchdog`). Waits
nest by context: a wait in a task or thread (`asyncio.to_thread`) that was started inside another wait is nested in that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar, Token
from dataclasses import dataclass
from time import monotonic
from types import TracebackType
from typing import Protocol

Detail = str | Callable[[], str]
"""A detail of a wait; a function is called when a report is written, in the watchdog's thread."""

PHASE = "phase"
"""The kind of the outermost waits; a report groups the others by them."""
START = "start"
"""The details of the phase in which services start."""
TURN = "turn"
"""The kind of the wait around a turn of an episode. Reports omit it: the wait around the episode has the turn's number."""
REQUEST = "request"
"""The kind of the wait for an engine's response to a generation."""
TOOL = "tool"
"""The kind of the wait for a tool call."""
ROLLOUT = "rollout"
"""The kind of the wait around an attempt at an episode."""

_inside: ContextVar[WaitRegistry | waiting | None] = ContextVar("agentrl_waiting", default=None)


class waiting:
    """Context manager that registers a wait; an exit without an error counts as progress.

    Args:
        kind: one word, such as ``engine``, ``tool`` or ``environment``; reports count waits by kind.
        details: what exactly is waited for; see `Detail`.
    """

    __slots__ = ("_details", "kind", "parent", "since", "waits")

    parent: waiting | WaitRegistry
    """The wait in which this one is nested."""
    since: float
    """When it began, on `time.monotonic`'s clock."""

    def __init__(self, kind: str, *details: Detail) -> None:
        self.kind = kind
        self.waits: WaitRegistry | None = None
        """The registry of the run; None without a watchdog."""
        self._details = details

    def __enter__(self) -> None:
        """Register the wait."""
        outer = _inside.get()
        if outer is None:
            return
        waits = outer.waits
        assert waits is not None, "an outer wait has a registry"
        self.parent, self.waits, self.since = outer, waits, monotonic()
        waits.open.add(self)
        _inside.set(self)
        for listener in waits.listeners:
            listener.on_begin(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Remove the wait."""
        waits = self.waits
        if waits is None:
            return
        waits.open.discard(self)
        ended_at = monotonic()
        if error is None:
            waits.last_progress = ended_at
        for listener in waits.listeners:
            listener.on_end(self, ended_at, "" if kind is None else kind.__name__)
        # A coroutine that is closed before its end may exit in another context.
        if _inside.get() is self:
            _inside.set(self.parent)

    @property
    def details(self) -> str:
        """What exactly is waited for."""
        text = ""
        for detail in self._details:
            if word := detail if isinstance(detail, str) else detail():
                text = f"{text}, {word}" if text else word
        return text

    @property
    def text(self) -> str:
        """The kind and the details of the wait."""
        return f"{self.kind} {self.details}".strip()


def current_wait() -> WaitRegistry | waiting | None:
    """Return the innermost wait of this context, or the registry outside of all; None without a watchdog."""
    return _inside.get()


class WaitListener(Protocol):
    """Is called at the begin and the end of each wait, in the thread that waits. It must not raise."""

    def on_begin(self, wait: waiting) -> None:
        """Take note of a wait that has begun."""
        ...

    def on_end(self, wait: waiting, ended_at: float, error: str) -> None:
        """Take note of the end of a wait, at ``ended_at`` on `time.monotonic`'s clock, with the name of the error's class."""
        ...


@dataclass(frozen=True, slots=True)
class WaitReport:
    """A wait as shown in a report."""

    kind: str
    text: str
    """The wait with the outer waits: ``rollout 3/0/1, turn 2: tool search, call search-1``."""
    phase: str
    """Phase of the run: ``step 3: rollout``; empty outside of all phases."""
    seconds: float
    """Seconds since the wait began."""


class WaitRegistry:
    """All current waits of a run. `waiting` registers waits in contexts that were entered or created after `enter`."""

    def __init__(self, listeners: Sequence[WaitListener] = ()) -> None:
        self.listeners = tuple(listeners)
        """They are called in this order."""
        self.waits = self
        """The registry itself, so that it can stand in for an outer wait."""
        self.open: set[waiting] = set()
        """Waits in progress; added and removed by any thread."""
        self.last_progress = monotonic()
        """Time of the last exit without an error, on `time.monotonic`'s clock."""

    def enter(self) -> Token[WaitRegistry | waiting | None]:
        """Register the waits of this context, and of tasks started in it, until `leave`."""
        return _inside.set(self)

    def leave(self, token: Token[WaitRegistry | waiting | None]) -> None:
        """Stop registering waits."""
        _inside.reset(token)

    def innermost_waits(self) -> list[WaitReport]:
        """Return the innermost waits, the longest first."""
        waits = list(self.open)
        outer = {id(wait.parent) for wait in waits}
        clock = monotonic()
        inner = sorted((wait for wait in waits if id(wait) not in outer), key=lambda wait: wait.since)
        return [_report(wait, clock - wait.since, self.open) for wait in inner]


def _report(innermost: waiting, seconds: float, still_open: set[waiting]) -> WaitReport:
    words: list[str] = []
    phase = ""
    wait: waiting | WaitRegistry = innermost
    while isinstance(wait, waiting):
        if wait is not innermost and wait not in still_open:
            pass  # a task that was started inside it outlives it
        elif wait.kind == PHASE:
            phase = wait.details
        elif wait.kind != TURN:
            words.insert(0, wait.text)
        wait = wait.parent
    return WaitReport(innermost.kind, ": ".join(words), phase, seconds)
