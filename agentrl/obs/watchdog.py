"""The watchdog: reports what a stalled run is waiting for."""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import queue
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

from agentrl.config.secret_values import hide_secrets
from agentrl.obs.waiting import PHASE, WaitListener, WaitRegistry, WaitReport

SHOWN = 8
"""Most waits in a report on the console; the log has all of them."""
SHOWN_CALLS = 3
"""Most stack frames of a blocked event loop in a report on the console."""
LOOP_TIMEOUT_S = 1.0
"""An event loop that does not run a callback within this time is blocked."""
RECHECK_S = 1.0
"""Most seconds until progress after a report is noticed, and between two looks at the event loop."""
BLOCKED_S = 30.0
"""An event loop that has run no callback for so long is reported, whatever else ends: all episodes wait for it."""


class Watchdog:
    """Context manager that reports all waits when none has ended for ``stall_warning_s`` seconds, on SIGUSR1, and when the
    event loop has been blocked for `BLOCKED_S`.

    Without progress it reports again after twice, four times, … this time. It runs in a separate thread, so that a blocked
    event loop is reported too. Enter it inside the event loop to be watched. SIGUSR1 reports only if that is in the main thread.

    Args:
        stall_warning_s: seconds; 0 reports on SIGUSR1 only.
        print_report: prints a report; called in the watchdog's thread.
        log: file for full reports, with a traceback of each thread of this process.
        listeners: called at the begin and the end of each wait.
    """

    def __init__(
        self,
        stall_warning_s: float,
        print_report: Callable[[str], None],
        log: Path | None = None,
        listeners: Sequence[WaitListener] = (),
    ) -> None:
        self._stall_warning_s = stall_warning_s
        self._print_report = print_report
        self._log = log
        self._waits = WaitRegistry(listeners)
        self._orders: queue.SimpleQueue[str] = queue.SimpleQueue()  # may be filled by a signal handler
        self._asked_loop_at: float | None = None
        """When the event loop was last requested to run a callback; None once it has."""
        self._has_reported_block = False
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Watchdog:
        """Start the watchdog's thread."""
        self._loop = asyncio.get_running_loop()
        self._watched = threading.get_ident()
        self._handles_signal = threading.current_thread() is threading.main_thread()
        if self._handles_signal:
            self._before = signal.signal(signal.SIGUSR1, self._on_signal)
        self._token = self._waits.enter()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        """Stop the watchdog's thread."""
        self._waits.leave(self._token)
        if self._handles_signal:
            signal.signal(signal.SIGUSR1, self._before)
        self._orders.put("end")
        self._thread.join()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._orders.put("report")

    def _watch(self) -> None:
        seen, reports = self._waits.last_progress, 0
        while True:
            due = seen + self._stall_warning_s * 2**reports
            seconds_left = due - time.monotonic()
            try:
                order = self._orders.get(timeout=self._timeout(seconds_left, reports))
            except queue.Empty:
                order = ""
            if order == "end":
                return
            self._check_loop()
            last_progress = self._waits.last_progress
            if order == "report":
                self._report(f"requested by SIGUSR1; the last wait ended {_age(time.monotonic() - last_progress)} ago")
            if last_progress != seen:
                if reports:
                    self._print_report(f"watchdog: the run continues, after {_age(last_progress - seen)}")
                seen, reports = last_progress, 0
            elif self._stall_warning_s and time.monotonic() >= due:
                self._report(f"nothing has ended for {_age(time.monotonic() - seen)}")
                reports += 1

    def _timeout(self, seconds_left: float, reports: int) -> float | None:
        if not self._stall_warning_s:
            return None
        return max(0.0, min(seconds_left, RECHECK_S, self._stall_warning_s / 4 if reports else RECHECK_S))

    def _check_loop(self) -> None:
        now = time.monotonic()
        if self._asked_loop_at is None:
            self._asked_loop_at, self._has_reported_block = now, False
            with contextlib.suppress(RuntimeError):  # it was closed
                self._loop.call_soon_threadsafe(self._on_loop_answer)
        elif now - self._asked_loop_at >= BLOCKED_S and not self._has_reported_block:
            self._has_reported_block = True
            self._report(
                f"the event loop has been blocked for {_age(now - self._asked_loop_at)}, and all episodes wait for it"
            )

    def _on_loop_answer(self) -> None:
        self._asked_loop_at = None

    def _report(self, why: str) -> None:
        waits = self._waits.innermost_waits()
        blocked = self._blocked_loop()
        full = f" (in full, with all threads: {self._log})" if self._log is not None else ""
        self._print_report("\n".join([f"watchdog: {why}{full}", *blocked[: SHOWN_CALLS + 1], *_lines(waits, SHOWN)]))
        if self._log is None:
            return
        lines = [f"{time.strftime('%Y-%m-%d %H:%M:%S')} {why}", *blocked, *_lines(waits, len(waits))]
        with contextlib.suppress(OSError):  # of a full disk: the watch continues
            self._log.parent.mkdir(parents=True, exist_ok=True)
            with self._log.open("a", encoding="utf-8") as log:
                log.write(hide_secrets("\n".join(lines)) + "\n")
                log.flush()
                faulthandler.dump_traceback(log)
                log.write("\n")

    def _blocked_loop(self) -> list[str]:
        """Return the stack of a blocked event loop, the innermost call first; empty if it is not blocked."""
        responds = threading.Event()
        try:
            self._loop.call_soon_threadsafe(responds.set)
        except RuntimeError:  # it was closed
            return []
        if responds.wait(LOOP_TIMEOUT_S):
            return []
        frame = sys._current_frames().get(self._watched)
        calls = traceback.extract_stack(frame)[::-1] if frame is not None else []
        return [
            "  the event loop is blocked by a call in",
            *(f"    {call.filename}:{call.lineno} in {call.name}" for call in calls),
        ]


def _lines(waits: list[WaitReport], most: int) -> list[str]:
    """Return the longest waits, grouped by phase, and the number of the others by kind."""
    if not waits:
        return ["  there is no registered wait"]
    lines: list[str] = []
    phase = None
    for wait in waits[:most]:
        if wait.phase != phase:
            phase = wait.phase
            lines.append(f"  {phase or 'outside of all phases'}, waiting for")
        since = time.strftime("%H:%M:%S", time.localtime(time.time() - wait.seconds))
        lines.append(f"    {wait.text or 'its own work'}, since {since} ({_age(wait.seconds)})")
    if other_kinds := Counter("the phase itself" if wait.kind == PHASE else wait.kind for wait in waits[most:]):
        lines.append("    and " + ", ".join(f"{count} more: {kind}" for kind, count in other_kinds.most_common()))
    return lines


def _age(seconds: float) -> str:
    minutes, seconds_left = divmod(seconds, 60)
    return f"{int(minutes)}m{int(seconds_left):02d}s" if minutes else f"{seconds_left:.1f}s"
