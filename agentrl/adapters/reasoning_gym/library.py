"""reasoning-gym in worker processes: its scorers may take unlimited time for an answer, and its datasets global random states."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Mapping
from functools import cache
from typing import TypeVar

import msgspec

from agentrl.adapters.reasoning_gym.worker import READY
from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.core.worker_process import ProcessPool, WorkerProcess

SCORERS = max(2, min(8, os.cpu_count() or 1))
"""Maximal number of processes that score answers."""
CPU_S = 20.0
"""CPU seconds that the score of an answer may take."""
_WAIT_S = 600.0
"""Seconds for one call."""
_VARIABLES = ("PATH", "PYTHONPATH", "LANG", "LC_ALL", "TMPDIR", "VIRTUAL_ENV", "HOME")
_ANSWERS_END_WORKERS_BY = (signal.SIGPROF, signal.SIGSEGV)
"""Signals of a limit of CPU time, and of a stack that is too deep."""


T = TypeVar("T")


class _Reply(msgspec.Struct):
    """See `agentrl.adapters.reasoning_gym.worker`."""

    value: object = None
    error: str = ""
    usage: bool = False


class Entry(msgspec.Struct, frozen=True):
    """What ``make_entry`` returns."""

    question: str
    answer: str | None
    dataset: str
    entry: str
    """The entry as a literal of Python."""


class AnswerLimitError(Exception):
    """An answer took more time or stack than a score may take."""


class LibraryError(Exception):
    """reasoning-gym raised, or its worker process ended or did not answer."""


class _Worker(WorkerProcess):
    def __init__(self) -> None:
        variables = {name: os.environ[name] for name in _VARIABLES if name in os.environ}
        super().__init__(
            "agentrl.adapters.reasoning_gym.worker",
            READY,
            "worker of reasoning-gym",
            {**variables, "PYTHONHASHSEED": "0", "OMP_NUM_THREADS": "1"},
        )

    def call(self, name: str, arguments: Mapping[str, object]) -> str:
        """Return the reply to a call.

        Raises:
            EOFError: the process ended.
            LibraryError: it did not reply.
        """
        self.send_line(json.dumps({"call": name, **arguments}))
        line = self.read_line(time.monotonic() + _WAIT_S)
        if line is None:
            raise LibraryError(f"reasoning-gym: {name} took longer than {_WAIT_S:g} s")
        return line


class Library:
    """Calls of reasoning-gym in worker processes; may be used by several threads.

    Args:
        processes: maximal number of workers.
    """

    def __init__(self, processes: int) -> None:
        require("reasoning_gym", "env.name=reasoning_gym")
        self._pool = ProcessPool(_Worker, processes)

    def call(self, kind: type[T], name: str, **arguments: object) -> T:
        """Return what a function of `agentrl.adapters.reasoning_gym.worker` returns.

        Args:
            kind: the type that it returns.
            name: of the function.
            arguments: of the function.

        Raises:
            AnswerLimitError: the call went beyond a limit.
            ConfigError: reasoning-gym refuses the arguments.
            LibraryError: it raised, or something ended two workers.
        """
        reply = msgspec.json.decode(self._reply(name, arguments), type=_Reply)
        if not reply.error:
            return msgspec.convert(reply.value, kind)
        if reply.usage:
            raise ConfigError(f"reasoning-gym: {reply.error.partition(': ')[2]}")
        raise LibraryError(f"reasoning-gym: {name} raised {reply.error}")

    def _reply(self, name: str, arguments: Mapping[str, object]) -> str:
        for _ in range(2):
            with self._pool.worker() as worker:
                try:
                    return worker.call(name, arguments)
                except EOFError:
                    if (ending := worker.ending_signal()) in _ANSWERS_END_WORKERS_BY:
                        raise AnswerLimitError(f"it ended the worker by {signal.Signals(ending).name}") from None
        raise LibraryError(f"reasoning-gym: two workers ended in {name}")

    def close(self) -> None:
        """End the idle workers."""
        self._pool.close()


@cache
def makers() -> Library:
    """Return the process's library for entries: one worker, which keeps the datasets."""
    return Library(1)


@cache
def scorers() -> Library:
    """Return the process's library for scores."""
    return Library(SCORERS)
