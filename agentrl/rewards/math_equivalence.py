r"""Equivalence of two mathematical expressions, by math-verify in worker processes.

Parsing and simplifying an expression of a policy may take unlimited time or memory (``9^{9^{9}}``), in calls that neither
a signal nor a thread can interrupt. So it runs in worker processes that can be killed: a small pool for the whole
program, each process started when first needed. A worker ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import subprocess
import sys
import threading
import time

from agentrl.rewards import notation
from agentrl.rewards.math_worker import READABLE, READY, SAME, UNREADABLE

LIMIT_S = 6.0
"""Seconds for one pair of expressions; math-verify's own limits, of 2 s each, mostly apply first."""
START_S = 120.0
"""Seconds a worker may take to import its libraries."""
WORKERS = max(2, min(8, os.cpu_count() or 1))
"""Maximal number of worker processes."""


def equivalent(answer: str, label: str) -> bool:
    r"""Return whether two expressions, LaTeX or plain, are equivalent: ``\frac{1}{2}`` and ``0.5`` are, ``4\%`` and ``0.04``.

    Words are compared as text. A unit counts if both have one.

    An answer that cannot be parsed, or not compared within `LIMIT_S`, is not equivalent, and neither is an answer that ends two
    workers. May be called from any thread, and blocks it.

    Raises:
        ValueError: the label cannot be parsed.
        RuntimeError: a worker does not start.
    """
    return _POOL.equivalent(answer, label)


class WorkerPool:
    """A pool of worker processes.

    Args:
        size: maximal number of processes; further callers wait.
        limit_s: seconds for one pair of expressions.
    """

    def __init__(self, size: int = WORKERS, limit_s: float = LIMIT_S) -> None:
        self.limit_s = limit_s
        """Seconds for one pair of expressions."""
        self._slots = threading.BoundedSemaphore(size)
        self._idle: list[_Worker] = []
        atexit.register(self.close)

    def equivalent(self, answer: str, label: str) -> bool:
        """Return whether the expressions are equivalent; see the function `equivalent`."""
        same = notation.compare_words(answer, label)
        if same is None:
            same = notation.compare_numbers(answer, label)
        if same is not None:
            return same and not notation.differ(answer, label)
        with self._slots:
            verdict = self._compare(notation.rewrite(answer), notation.rewrite(label), last=False)
        if verdict == UNREADABLE:
            raise ValueError(f"the label {label!r} is no mathematical expression that can be parsed")
        return verdict == SAME and not notation.differ(answer, label)

    def _compare(self, answer: str, label: str, *, last: bool) -> str | None:
        """Return a worker's verdict. If something ends the worker, another one compares; a pair that ends both is the cause."""
        worker = self._take()
        try:
            verdict = worker.compare(answer, label, self.limit_s)
        except WorkerDied as died:
            worker.kill()
            return died.verdict if last else self._compare(answer, label, last=True)
        except BaseException:
            worker.kill()
            raise
        if worker.alive:
            self._idle.append(worker)
        return verdict

    def _take(self) -> _Worker:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
        return _Worker()

    def close(self) -> None:
        """End all idle workers. The pool can be used again."""
        while self._idle:
            self._idle.pop().kill()


class WorkerDied(Exception):
    """A worker ended by itself, or something killed it."""

    def __init__(self, verdict: str | None) -> None:
        """Record the verdict on a pair that ends every worker."""
        super().__init__(verdict)
        self.verdict = verdict


class _Worker:
    """One process that runs `agentrl.rewards.math_worker`; used by one thread at a time."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "agentrl.rewards.math_worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is for the run, not for its workers
        )
        self._buffer = b""
        try:
            line = self._read(time.monotonic() + START_S)
        except EOFError:
            line = None
        if line != READY:
            self.kill()
            raise RuntimeError(f"the math worker does not start: {line or 'no output'}")

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def compare(self, answer: str, label: str, limit_s: float) -> str | None:
        """Return the worker's verdict. A worker that times out is killed: the verdict is None, or `UNREADABLE` if it had not
        parsed the label yet.

        Raises:
            WorkerDied: with the same verdict.
        """
        deadline = time.monotonic() + limit_s
        request = json.dumps({"answer": answer, "label": label}) + "\n"
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # of a dead worker, whose output has then ended
            self._process.stdin.write(request.encode())
            self._process.stdin.flush()
        label_verdict = None
        try:
            label_verdict = self._read(deadline)
            verdict = self._read(deadline) if label_verdict == READABLE else UNREADABLE
        except EOFError:
            raise WorkerDied(None if label_verdict == READABLE else UNREADABLE) from None
        if verdict is None or label_verdict is None:
            self.kill()
        return verdict

    def _read(self, deadline: float) -> str | None:
        """Return the worker's next line, or None if it printed none before the deadline; `EOFError` if it ended."""
        assert self._process.stdout is not None
        descriptor = self._process.stdout.fileno()
        while b"\n" not in self._buffer:
            seconds_left = deadline - time.monotonic()
            if seconds_left <= 0 or not select.select([descriptor], [], [], seconds_left)[0]:
                return None
            chunk = os.read(descriptor, 4096)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode()

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


_POOL = WorkerPool()
