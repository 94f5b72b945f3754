"""Tests in several processes, forks of the one that has imported and collected them: ``pytest --forks N``.

A fork receives a file of tests, sends its reports, and then receives the next file. If it ends during a test, that test has
failed, and another fork runs the tests after it.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import multiprocessing
import os
import random
import select
import selectors
import signal
import sys
import traceback
import types
import warnings
from collections import deque
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import pytest
from preloaded import CHILDREN, fork_server

_OVER_CORES = 4
"""Forks more than cores, since many tests wait for other processes."""
_AGAIN_S = 2.0
"""Seconds after which a fork that has not ended is interrupted again."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add ``--forks``."""
    text = "processes that run the tests; auto: four more than cores; 0, the default: this one"
    parser.addoption("--forks", metavar="N", default="0", help=text)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Have forks run the tests."""
    value = session.config.getoption("forks")
    count = len(os.sched_getaffinity(0)) + _OVER_CORES if value == "auto" else int(value)
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    Forks(session).run(count)
    return True


# ---- the process that has collected the tests ----------------------------------------------------------------------


class Fork:
    """A process that runs files of tests."""

    def __init__(self, pid: int, connection: Connection) -> None:
        self.pid, self.connection = pid, connection
        self.end = os.pidfd_open(pid)
        """Ready once the process has ended; a process that it has started may have its pipe open for longer."""
        self.tests: deque[int] = deque()
        """Indices of those of its file that have not ended."""

    def close(self) -> None:
        """Close what this process has of it."""
        os.close(self.end)
        self.connection.close()

    def wait(self) -> int:
        """Wait for its end, and return its exit status (negative: the signal that ended it)."""
        code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        self.close()
        return code


class Forks:
    """Has forks run all tests of a session, and reports what they report."""

    def __init__(self, session: pytest.Session) -> None:
        self._session = session
        self._hook = session.config.hook
        paths = itertools.groupby(range(len(session.items)), key=lambda index: session.items[index].path)
        self._files = deque(deque(indices) for _, indices in paths)
        self._numbers = itertools.count()
        self._forks: list[Fork] = []
        self._selector = selectors.DefaultSelector()

    def run(self, count: int) -> None:
        """Run all tests in ``count`` forks at a time."""
        threads = [file.read_text().strip() for file in Path("/proc/self/task").glob("*/comm")]
        assert len(threads) == 1, f"a process with threads cannot be forked safely; modules of tests started {threads}"
        self._session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  # forks have folders in it
        try:
            for _ in range(min(count, len(self._files))):
                self._start()
            while self._forks:
                for fork in {key.data for key, _ in self._selector.select()}:
                    self._receive(fork)
        finally:
            for fork in self._forks:
                os.kill(fork.pid, signal.SIGINT)
            for fork in self._forks:
                while not select.select([fork.end], [], [], _AGAIN_S)[0]:
                    os.kill(fork.pid, signal.SIGINT)  # the one before may have come just before a call that waits
                fork.wait()

    def _start(self) -> None:
        connection, far_end = multiprocessing.Pipe()
        number = next(self._numbers)
        sys.stdout.flush()
        if (pid := os.fork()) == 0:
            connection.close()
            for fork in self._forks:
                fork.close()
            _run(self._session, far_end, number)
        far_end.close()
        fork = Fork(pid, connection)
        self._forks.append(fork)
        for file in (fork.connection, fork.end):
            self._selector.register(file, selectors.EVENT_READ, fork)

    def _receive(self, fork: Fork) -> None:
        """Handle a message of a fork, or its end, once it has no more messages."""
        with contextlib.suppress(EOFError, ConnectionResetError):
            if fork.connection.poll():
                for kind, content in fork.connection.recv():
                    getattr(self, f"_on_{kind}")(fork, **content)
                return
        self._forks.remove(fork)
        for file in (fork.connection, fork.end):
            self._selector.unregister(file)
        code = fork.wait()
        if fork.tests:
            self._report_end_during(fork.tests.popleft(), code)
            if fork.tests:
                self._files.appendleft(fork.tests)
            self._start()
        elif code:
            raise RuntimeError(f"a process that runs tests ended with status {code}")

    def _on_ready(self, fork: Fork) -> None:
        fork.tests = self._files.popleft() if self._files else deque()
        fork.connection.send(tuple(fork.tests))

    def _on_logstart(self, fork: Fork, nodeid: str, location: Any) -> None:
        self._hook.pytest_runtest_logstart(nodeid=nodeid, location=location)

    def _on_logreport(self, fork: Fork, data: dict[str, Any]) -> None:
        report = self._hook.pytest_report_from_serializable(config=self._session.config, data=data)
        self._hook.pytest_runtest_logreport(report=report)
        if self._session.shouldfail:
            raise self._session.Failed(self._session.shouldfail)

    def _on_logfinish(self, fork: Fork, nodeid: str, location: Any) -> None:
        fork.tests.popleft()
        self._hook.pytest_runtest_logfinish(nodeid=nodeid, location=location)

    def _on_warning(self, fork: Fork, category: str, message: dict[str, Any], **content: Any) -> None:
        recorded = warnings.WarningMessage(category=type(category, (Warning,), {}), **message)
        self._hook.pytest_warning_recorded.call_historic(kwargs={"warning_message": recorded, **content})

    def _report_end_during(self, index: int, code: int) -> None:
        item = self._session.items[index]
        text = f"the process of this test ended with status {code}"
        report = pytest.TestReport(item.nodeid, item.location, {}, "failed", text, "call")
        self._hook.pytest_runtest_logreport(report=report)
        self._hook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)


# ---- a fork --------------------------------------------------------------------------------------------------------


class Reports:
    """A plugin that sends what happens to the process that reports it, after each test."""

    def __init__(self, config: pytest.Config, connection: Connection) -> None:
        self._config, self._connection = config, connection
        self._events: list[tuple[str, dict[str, Any]]] = []

    def send(self) -> None:
        """Send what has happened."""
        self._connection.send(self._events)
        self._events = []

    def ready(self) -> None:
        """Send that this process can run another file."""
        self._add("ready")
        self.send()

    def _add(self, kind: str, **content: Any) -> None:
        self._events.append((kind, content))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        """See `pytest`."""
        self._add("logstart", nodeid=nodeid, location=location)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """See `pytest`."""
        data = self._config.hook.pytest_report_to_serializable(config=self._config, report=report)
        self._add("logreport", data=data)

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        """See `pytest`."""
        self._add("logfinish", nodeid=nodeid, location=location)
        self.send()

    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        """See `pytest`."""
        # The category may be a class that only the fork has imported.
        message = {name: getattr(warning_message, name) for name in ("filename", "lineno", "line")}
        message["message"] = str(warning_message.message)
        category = warning_message.category.__name__
        self._add("warning", category=category, message=message, when=when, nodeid=nodeid, location=location)


def _run(session: pytest.Session, connection: Connection, number: int) -> NoReturn:
    """Run files of tests until there are no more, and end this process."""
    status = 1
    try:
        _separate(session, number)
        try:
            _run_files(session, connection)
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            session._setupstate.teardown_exact(None)
        status = 0
    except KeyboardInterrupt:
        pass
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        os._exit(status)


def _separate(session: pytest.Session, number: int) -> None:
    """Give a fork its own output, temporary folder, random numbers and functions to call at its end."""
    atexit._clear()
    random.seed()
    warning_hook: Any = session.config.hook.pytest_warning_recorded
    warning_hook._call_history.clear()  # not to be reported again
    plugins = session.config.pluginmanager
    capture: Any = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    os.environ[CHILDREN], _ = fork_server()
    capture.start_global_capturing()
    capture.suspend_global_capture()
    terminal: Any = plugins.unregister(name="terminalreporter")
    plugins.register(types.SimpleNamespace(_tw=terminal._tw), "terminalreporter")  # where pytest-timeout prints stacks
    folders: Any = session.config._tmp_path_factory  # type: ignore[attr-defined]
    folders._basetemp = folders.getbasetemp() / f"fork{number}"
    folders._basetemp.mkdir()


def _run_files(session: pytest.Session, connection: Connection) -> None:
    reports = Reports(session.config, connection)
    session.config.pluginmanager.register(reports)
    item = None
    reports.ready()
    while indices := connection.recv():
        for index, following in itertools.zip_longest(indices, indices[1:]):
            item = session.items[index]
            # After the last test of a file only the session's fixtures are left.
            next_item = session if following is None else session.items[following]
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=next_item)
        reports.ready()
    end = pytest.CallInfo.from_call(lambda: session._setupstate.teardown_exact(None), "teardown")
    if item and end.excinfo:
        reports.pytest_runtest_logreport(pytest.TestReport.from_item_and_call(item, end))
    reports.send()
