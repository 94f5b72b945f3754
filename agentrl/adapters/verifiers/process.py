"""The process that has verifiers: it is started when first needed, plays many episodes at once, and is replaced if it ends."""

from __future__ import annotations

import atexit
import contextlib
import itertools
import json
import signal
import subprocess
import threading
from concurrent.futures import Future
from functools import cache, partial
from pathlib import Path

import msgspec

from agentrl.core.errors import ConfigError

READY = "ready"
_WORKER = Path(__file__).with_name("worker.py")
_END_S = 20.0
"""Seconds in which it ends the agents of its episodes, before it is killed."""
_LAST_LINES = 8


class VerifiersError(Exception):
    """verifiers raised, or its process ended."""


class _Line(msgspec.Struct):
    """A line that the process prints."""

    number: int
    value: object = None
    error: str = ""


class VerifiersProcess:
    """Calls of ``worker.py`` in a process of another interpreter; may be used by several threads.

    Args:
        python: the interpreter, in whose environment verifiers is installed.
    """

    def __init__(self, python: str) -> None:
        self.python = python
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._process: subprocess.Popen[str] | None = None
        self._open: dict[int, Future[object]] = {}
        """The calls of this process without a reply; each process has its own mapping, which its reader empties."""
        self._errors: list[str] = []
        """The last lines of its standard error."""
        atexit.register(self.close)

    @property
    def pid(self) -> int:
        """Id of the process, once there was a call."""
        assert self._process is not None, "a call has started it"
        return self._process.pid

    def call(self, name: str, **arguments: object) -> tuple[int, Future[object]]:
        """Begin a call; return its number, for `cancel`, and what becomes its value.

        The future raises VerifiersError if verifiers raises or the process ends.

        Raises:
            ConfigError: the interpreter does not exist.
        """
        number, value = next(self._numbers), Future[object]()
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            self._open[number] = value
            self._send({"number": number, "call": name, **arguments})
        return number, value

    def cancel(self, number: int) -> None:
        """End a call; its agents are ended."""
        with self._lock:
            if self._open.pop(number, None) is not None:
                self._send({"number": number, "call": "cancel"})

    def _send(self, request: dict[str, object]) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # of a process that ended: its reader fails the calls
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _start(self) -> None:
        self._errors, self._open = [], {}
        try:
            self._process = subprocess.Popen(
                [self.python, str(_WORKER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,  # Ctrl-C is for the run
            )
        except OSError as error:
            raise ConfigError(f"env.options.python={self.python}: {error}") from error
        process, calls = self._process, self._open
        for read in (partial(self._read_replies, process, calls), partial(self._read_errors, process)):
            threading.Thread(target=read, name="verifiers", daemon=True).start()

    def _read_errors(self, process: subprocess.Popen[str]) -> None:
        assert process.stderr is not None
        with contextlib.suppress(ValueError):  # closed
            for line in process.stderr:
                self._errors = [*self._errors, line.rstrip()][-_LAST_LINES:]

    def _read_replies(self, process: subprocess.Popen[str], calls: dict[int, Future[object]]) -> None:
        assert process.stdout is not None
        refusal = ""
        for text in process.stdout:
            if not text.startswith("{"):
                refusal = "" if text.strip() == READY else text.strip()
                continue
            try:
                line = msgspec.json.decode(text, type=_Line)
            except msgspec.DecodeError:
                refusal = f"it printed a line that is no reply: {text.strip()!r:.100}"
                process.kill()
                break
            with self._lock:
                value = calls.pop(line.number, None)
            if value is not None and line.error:
                value.set_exception(VerifiersError(line.error))
            elif value is not None:
                value.set_result(line.value)
        code = process.wait()
        ending = f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
        output = " ".join(self._errors[-2:])
        message = refusal or f"the process of verifiers ended ({ending}){': ' if output else ''}{output}"
        with self._lock:
            values = [*calls.values()]
            calls.clear()
        for value in values:
            value.set_exception(VerifiersError(f"env.options.python={self.python}: {message}"))

    def close(self) -> None:
        """End the process and the agents of its episodes."""
        with self._lock:
            process, self._process = self._process, None
        if process is None:
            return
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()
        try:
            process.wait(_END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@cache
def verifiers_process(python: str) -> VerifiersProcess:
    """Return this process's one for an interpreter."""
    return VerifiersProcess(python)
