"""Says what a run that does not get on waits for."""

from __future__ import annotations

import asyncio
import faulthandler
import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType, TracebackType

from agentrl.obs.waiting import PHASE, Waiting, Waits

SHOWN = 8
"""Waits in a report on the console; the log has all."""
SHOWN_CALLS = 3
"""Of the calls that hold up the event loop."""
LOOP_S = 1.0
"""An event loop that takes longer to do nothing is held up."""
AFTER_S = 1.0
"""How soon a run that goes on after a report is noticed."""


class Watchdog:
    """While entered, reports what is waited for once nothing has ended for ``stall_warning_s`` seconds, and on SIGUSR1 at once.

    It reports again after twice, four times, … as long without progress. A thread of its own does it, so that a blocked
    event loop is reported too. Enter it in the main thread (signals), inside the event loop that it is to watch.

    Args:
        stall_warning_s: seconds; 0 reports on SIGUSR1 only.
        say: prints a report; called in the watchdog's thread.
        log: gets every report in full, with where each thread of this process stands.

    """

    def __init__(self, stall_warning_s: float, say: Callable[[str], None], log: Path | None = None) -> None:
        self._stall_warning_s = stall_warning_s
        self._say = say
        self._log = log
        self._waits = Waits()
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()  # may be filled by a signal handler
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Begin."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._before = signal.signal(signal.SIGUSR1, self._asked)
        self._token = self._waits.enter()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End."""
        self._waits.leave(self._token)
        signal.signal(signal.SIGUSR1, self._before)
        self._orders.put("end")
        self._thread.join()

    def _asked(self, number: int, frame: FrameType | None) -> None:
        self._orders.put("report")

    def _watch(self) -> None:
        seen, reports = self._waits.moved, 0
        while True:
            due = seen + self._stall_warning_s * 2**reports
            left = due - time.monotonic()
            try:
                order = self._orders.get(timeout=self._patience(left, reports))
            except queue.Empty:
                order = ""
            if order == "end":
                return
            moved = self._waits.moved
            if order == "report":
                self._report(f"asked by SIGUSR1; something last ended {_age(time.monotonic() - moved)} ago")
            if moved != seen:
                if reports:
                    self._say(f"watchdog: the run goes on, after {_age(moved - seen)}")
                seen, reports = moved, 0
            elif self._stall_warning_s and time.monotonic() >= due:
                self._report(f"nothing has ended for {_age(time.monotonic() - seen)}")
                reports += 1

    def _patience(self, left: float, reports: int) -> float | None:
        if not self._stall_warning_s:
            return None
        return max(0.0, min(left, AFTER_S, self._stall_warning_s / 4) if reports else left)

    def _report(self, why: str) -> None:
        waits = self._waits.now()
        held_up = self._held_up()
        where = f" (in full, with all threads: {self._log})" if self._log is not None else ""
        self._say("\n".join([f"watchdog: {why}{where}", *held_up[: SHOWN_CALLS + 1], *_lines(waits, SHOWN)]))
        if self._log is None:
            return
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("a", encoding="utf-8") as log:
            lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}", *held_up, *_lines(waits, len(waits))]
            log.write("\n".join(lines) + "\n")
            log.flush()
            faulthandler.dump_traceback(log)
            log.write("\n")

    def _held_up(self) -> list[str]:
        """Return where the event loop stands, the innermost call first, unless it turns."""
        turns = threading.Event()
        try:
            self._loop.call_soon_threadsafe(turns.set)
        except RuntimeError:  # it was closed
            return []
        if turns.wait(LOOP_S):
            return []
        frame = sys._current_frames().get(self._watched)
        calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
        return [
            "  the event loop is held up, by a call in",
            *(f"    {call.filename}:{call.lineno} in {call.name}" for call in calls),
        ]


def _lines(waits: list[Waiting], most: int) -> list[str]:
    """Return the longest waits, those of a phase under its name, and a count of the others."""
    if not waits:
        return ["  it waits for nothing that agentrl knows of"]
    lines: list[str] = []
    phase = None
    for one in waits[:most]:
        if one.phase != phase:
            phase = one.phase
            lines.append(f"  {phase or 'outside of all phases'}, waiting for")
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - one.seconds))
        lines.append(f"    {one.text or 'its own work'}, since {since} ({_age(one.seconds)})")
    if rest := Counter("the phase itself" if one.kind == PHASE else one.kind for one in waits[most:]):
        lines.append("    and " + ", ".join(f"{count} more: {kind}" for kind, count in rest.most_common()))
    return lines


def _age(seconds: float) -> str:
    minutes, rest = divmod(seconds, 60)
    return f"{int(minutes)}m{int(rest):02d}s" if minutes else f"{rest:.1f}s"
