"""What a run waits for now: every place where it may hang says so while it is in there.

::

    with waiting("tool", "search", "call search-1"):
        result = await client.call(call)

Costs a microsecond or two, and nothing but a look at a context variable where nobody watches (`agentrl.obs.watchdog`).
Waits nest by context: those of a task or a thread (`asyncio.to_thread`) that was started inside another wait belong to it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass
from time import monotonic
from types import TracebackType

Detail = str | Callable[[], str]
"""A word of what is waited for; a function is asked when a report is written, in the watchdog's thread."""

PHASE = "phase"
"""The kind of the outermost waits: a report names them first."""

_inside: ContextVar[Waits | waiting | None] = ContextVar("agentrl_waiting", default=None)


class waiting:
    """While entered, the run is known to wait for this; an exit without an error is progress.

    Args:
        kind: one word: ``engine``, ``tool``, ``environment``, …; reports count by it.
        details: which one; see `Detail`.

    """

    __slots__ = ("_details", "kind", "parent", "since", "waits")

    parent: waiting | Waits
    """The wait that this one is part of."""
    since: float
    """When it began, on `time.monotonic`'s clock."""

    def __init__(self, kind: str, *details: Detail) -> None:
        self.kind = kind
        self.waits: Waits | None = None
        """Those of the run; None where nobody watches."""
        self._details = details

    def __enter__(self) -> None:
        """Begin to wait."""
        outer = _inside.get()
        if outer is None:
            return
        waits = outer.waits
        assert waits is not None, "a wait that others are inside of is watched"
        self.parent, self.waits, self.since = outer, waits, monotonic()
        waits.open.add(self)
        _inside.set(self)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the wait."""
        waits = self.waits
        if waits is None:
            return
        waits.open.discard(self)
        if error is None:
            waits.moved = monotonic()
        # A coroutine that is thrown away ends in whichever context that happens in.
        if _inside.get() is self:
            _inside.set(self.parent)

    @property
    def text(self) -> str:
        """What is waited for, in a few words."""
        words = [detail if isinstance(detail, str) else detail() for detail in self._details]
        return " ".join((self.kind, ", ".join(word for word in words if word))).strip()


@dataclass(frozen=True, slots=True)
class Waiting:
    """One wait as a report shows it."""

    kind: str
    text: str
    """What is waited for, and for whom: ``rollout 3/0/1, turn 2: tool search, call search-1``."""
    phase: str
    """What the run does: ``step 3: rollout``; empty outside of all phases."""
    seconds: float
    """How long by now."""


class Waits:
    """All waits of a run. `waiting` adds to it in the contexts that are entered or made after `enter`."""

    def __init__(self) -> None:
        self.waits = self
        """As a wait's."""
        self.open: set[waiting] = set()
        """Those that go on; added and removed by any thread."""
        self.moved = monotonic()
        """When one last ended well."""

    def enter(self) -> Token[Waits | waiting | None]:
        """Take the waits of this context, and of what is started in it, until `leave`."""
        return _inside.set(self)

    def leave(self, token: Token[Waits | waiting | None]) -> None:
        """Take no more."""
        _inside.reset(token)

    def now(self) -> list[Waiting]:
        """Return what is waited for, the longest wait first; of waits inside each other the innermost."""
        some = list(self.open)
        outer = {id(one.parent) for one in some}
        clock = monotonic()
        inner = sorted((one for one in some if id(one) not in outer), key=lambda one: one.since)
        return [_shown(one, clock - one.since, self.open) for one in inner]


def _shown(innermost: waiting, seconds: float, still_open: set[waiting]) -> Waiting:
    words: list[str] = []
    phase = ""
    one: waiting | Waits = innermost
    while isinstance(one, waiting):
        if one is not innermost and one not in still_open:
            pass  # a task that was started in it has outlived it
        elif one.kind == PHASE:
            phase = one.text.removeprefix(PHASE).strip()
        else:
            words.insert(0, one.text)
        one = one.parent
    return Waiting(innermost.kind, ": ".join(words), phase, seconds)
