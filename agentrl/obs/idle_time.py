"""Idle time of engines and learner by cause, from the waits of a run."""

from __future__ import annotations

import heapq
import threading
from collections import Counter
from time import monotonic
from typing import NamedTuple

from agentrl.obs.waiting import PHASE, REQUEST, ROLLOUT, WaitListener, waiting

LEARNER_PHASES = frozenset(("train", "scores", "teachers"))
"""Phases in which the learner computes."""
SYNC, EVALUATION, START = "weights", "evaluation", "start"
"""Names of other phases: the weight sync, the evaluation, and the start of the run, which is not counted."""
ENGINE_CAUSES = ("learner", "weight_sync", "tools", "long_tail", "evaluation", "other")
"""Why an engine has no request: the learner computes, weights are synced, all episodes that could use it wait for tools,
environments or rewards, fewer episodes than engines are left, an evaluation does one of these, or none of them."""


class _Change(NamedTuple):
    """Change of the number of waits of a kind."""

    at: float
    kind: str
    name: str
    """The engine of a request; the phase of an episode or of the trainer."""
    change: int


class IdleTime(WaitListener):
    """Measures, as a `WaitListener`, how long engines had no request in progress and the learner nothing to compute.

    Engines are seen as the clients see them: with ``sampler.router=sglang`` all count as one.

    Args:
        engines: number of engines.
        slots: most requests that the run can have in progress.
        delay_s: changes are counted so many seconds later, in their order, as those of other processes come late.
    """

    def __init__(self, engines: int, slots: int, delay_s: float = 0.0) -> None:
        self._names: dict[waiting, str] = {}
        self._engines = engines
        self._slots = slots
        self._delay_s = delay_s
        self._lock = threading.Lock()
        self._uncounted: list[_Change] = []
        """Heap of changes within the delay."""
        self._phases: Counter[str] = Counter()
        self._requests: Counter[str] = Counter()
        """Requests in progress by engine."""
        self._episodes: Counter[bool] = Counter()
        """Episodes in progress, by whether they are evaluations."""
        self._reset(monotonic() - delay_s)

    def _reset(self, begin: float) -> None:
        self._begin = self._last = begin
        self._idle = dict.fromkeys(ENGINE_CAUSES, 0.0)
        """Seconds without a request by cause, summed over engines."""
        self._learner_s = self._episode_s = self._tail_s = self._tools_s = 0.0

    def on_begin(self, wait: waiting) -> None:
        """Count a phase, an episode or a request that begins."""
        if wait.kind in (PHASE, ROLLOUT, REQUEST):
            self._names[wait] = name = wait.details if wait.kind == REQUEST else _phase(wait)
            self._add(_Change(wait.since, wait.kind, name, 1))

    def on_end(self, wait: waiting, ended_at: float, error: str) -> None:
        """Count a wait that ends."""
        if wait.kind in (PHASE, ROLLOUT, REQUEST):
            self._add(_Change(ended_at, wait.kind, self._names.pop(wait), -1))

    def _add(self, change: _Change) -> None:
        with self._lock:
            heapq.heappush(self._uncounted, change)
            self._count_until(change.at - self._delay_s)

    def _count_until(self, until: float) -> None:
        """Count the changes until a time."""
        while self._uncounted and self._uncounted[0].at <= until:
            change = heapq.heappop(self._uncounted)
            self._add_until(change.at)
            if change.kind == REQUEST:
                self._requests[change.name] += change.change
            elif change.kind == ROLLOUT:
                self._episodes[change.name == EVALUATION] += change.change
            else:
                self._phases[change.name] += change.change
                if change.name == START:
                    self._reset(change.at)

    def _add_until(self, until: float) -> None:
        """Add the seconds since the last change."""
        seconds = max(0.0, until - self._last)
        self._last = max(self._last, until)
        episodes, running = self._episodes[False], sum(self._requests.values())
        idle = self._engines - sum(count > 0 for count in self._requests.values())
        if idle > 0:
            self._idle[self._cause(episodes, running)] += idle * seconds
        if any(self._phases[name] for name in LEARNER_PHASES):
            self._learner_s += seconds
        if episodes:
            self._episode_s += seconds
            used = min(episodes, self._slots)
            self._tail_s += (self._slots - used) * seconds
            self._tools_s += max(0, used - running) * seconds

    def _cause(self, episodes: int, running: int) -> str:
        if self._phases[SYNC]:
            return "weight_sync"
        if episodes:
            return "tools" if episodes > running else "long_tail"
        if self._episodes[True] or self._phases[EVALUATION]:
            return "evaluation"
        return "learner" if any(self._phases[name] for name in LEARNER_PHASES) else "other"

    def metrics(self) -> dict[str, float]:
        """Return the shares since the last call, or since the start of the run."""
        with self._lock:
            current_time = monotonic() - self._delay_s
            self._count_until(current_time)
            self._add_until(current_time)
            seconds = current_time - self._begin
            if seconds <= 0:
                return {}
            shares = {cause: self._idle[cause] / (seconds * self._engines) for cause in ENGINE_CAUSES}
            metrics = {"engine_idle/total": sum(shares.values()), "learner_idle/total": 1 - self._learner_s / seconds}
            metrics |= {f"engine_idle/{cause}": share for cause, share in shares.items()}
            if self._episode_s > 0:
                slot_seconds = self._episode_s * self._slots
                metrics |= {
                    "slot_idle/tools": self._tools_s / slot_seconds,
                    "slot_idle/long_tail": self._tail_s / slot_seconds,
                }
            self._reset(current_time)
        return metrics


def _phase(wait: object) -> str:
    while isinstance(wait, waiting):
        if wait.kind == PHASE:
            return wait.details.rpartition(", ")[2]
        wait = wait.parent
    return ""
