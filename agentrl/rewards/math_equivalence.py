r"""Equivalence of two mathematical expressions, by math-verify in worker processes.

Parsing and simplifying an expression of a policy may take unlimited time or memory (``9^{9^{9}}``), in calls that neither
a signal nor a thread can interrupt. So it runs in worker processes that can be killed: a small pool for the whole
program, each process started when first needed. A worker ends with the process that started it.
"""

from __future__ import annotations

import json
import os
import time

from agentrl.core.worker_process import ProcessPool, WorkerProcess
from agentrl.rewards import notation
from agentrl.rewards.math_worker import READABLE, READY, SAME, UNREADABLE

LIMIT_S = 6.0
"""Seconds for one pair of expressions; math-verify's own limits, of 2 s each, mostly apply first."""
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


class WorkerPool(ProcessPool["_Worker"]):
    """A pool of worker processes.

    Args:
        size: maximal number of processes; further callers wait.
        limit_s: seconds for one pair of expressions.
    """

    def __init__(self, size: int = WORKERS, limit_s: float = LIMIT_S) -> None:
        super().__init__(lambda: _Worker(), size)
        self.limit_s = limit_s
        """Seconds for one pair of expressions."""

    def equivalent(self, answer: str, label: str) -> bool:
        """Return whether the expressions are equivalent; see the function `equivalent`."""
        same = notation.compare_words(answer, label)
        if same is None:
            same = notation.compare_numbers(answer, label)
        if same is not None:
            return same and not notation.differ(answer, label)
        verdict = self._compare(notation.rewrite(answer), notation.rewrite(label))
        if verdict == UNREADABLE:
            raise ValueError(f"the label {label!r} is no mathematical expression that can be parsed")
        return verdict == SAME and not notation.differ(answer, label)

    def _compare(self, answer: str, label: str) -> str | None:
        """Return a worker's verdict. If something ends the worker, another one compares; a pair that ends both is the cause."""
        try:
            with self.worker() as worker:
                return worker.compare(answer, label, self.limit_s)
        except WorkerDied:
            pass
        try:
            with self.worker() as worker:
                return worker.compare(answer, label, self.limit_s)
        except WorkerDied as died:
            return died.verdict


class WorkerDied(Exception):
    """A worker ended by itself, or something killed it."""

    def __init__(self, verdict: str | None) -> None:
        """Record the verdict on a pair that ends every worker."""
        super().__init__(verdict)
        self.verdict = verdict


class _Worker(WorkerProcess):
    """One process that runs `agentrl.rewards.math_worker`; used by one thread at a time."""

    def __init__(self) -> None:
        super().__init__("agentrl.rewards.math_worker", READY, "math worker")

    def compare(self, answer: str, label: str, limit_s: float) -> str | None:
        """Return the worker's verdict. A worker that times out is killed: the verdict is None, or `UNREADABLE` if it had not
        parsed the label yet.

        Raises:
            WorkerDied: with the same verdict.
        """
        deadline = time.monotonic() + limit_s
        self.send_line(json.dumps({"answer": answer, "label": label}))
        label_verdict = None
        try:
            label_verdict = self.read_line(deadline)
            verdict = self.read_line(deadline) if label_verdict == READABLE else UNREADABLE
        except EOFError:
            raise WorkerDied(None if label_verdict == READABLE else UNREADABLE) from None
        if verdict is None or label_verdict is None:
            self.kill()
        return verdict


_POOL = WorkerPool()
