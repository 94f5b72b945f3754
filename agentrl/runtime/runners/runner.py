"""One runner process, as the run's process sees it."""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import os
import secrets
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import RunnerError
from agentrl.inference.client.engine_state import FleetUpdate, RequestsInProgress
from agentrl.obs.remote_waits import RemoteWaits
from agentrl.obs.waiting import WaitRegistry, waiting
from agentrl.runtime.runners.messages import (
    BUFFER_BYTES,
    TOKEN_VARIABLE,
    FleetNumber,
    FleetRequests,
    FromRunner,
    Logged,
    Pulse,
    Ready,
    Setup,
    Stop,
    ToRunner,
    UpdateFleet,
    Waits,
    detect_loss,
    encode_for_runner,
    read_from_runner,
)
from agentrl.toolserver.request_limits import TOKEN_VARIABLE as TOOLS_TOKEN

_log = logging.getLogger(__name__)

_SILENT_S = 10.0
"""Seconds without a message after which a description says so."""
_STOP_S = 5.0
"""Seconds that a runner may take to end its episodes."""


_TOKEN_BYTES = 16
_LOOK_S = 0.5
"""Seconds between two looks at a process that has not connected itself."""

_NO_PULSE = Pulse("", 0.0, (), ())


class RunningProcess(Protocol):
    """A started process."""

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        ...

    def outcome(self) -> str:
        """Return how it ended, such as ``exit status 1``; empty while it runs."""
        ...

    def log_tail(self) -> str:
        """Return the last lines of its log."""
        ...

    def kill(self) -> None:
        """Send SIGKILL. Does not wait."""
        ...

    def stop(self, timeout_s: float) -> None:
        """End it: by SIGTERM, then by SIGKILL after ``timeout_s``."""
        ...


class RemoteRunners(Protocol):
    """Starts runner processes on the machines of a cluster."""

    @property
    def address(self) -> str:
        """Address of this machine, for the others."""
        ...

    def start(self, number: int, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> RunningProcess:
        """Start a process, and block until it runs.

        Args:
            number: of the runner, which chooses its machine.
            command: program and arguments.
            log: file for its output on its machine.
            env: variables added to those of its machine's Ray.

        Raises:
            RunnerError: it does not start.
        """
        ...


class RunnerProcess:
    """Starts a runner process, sends it messages, and passes on those that it sends.

    Args:
        number: of the runner, from 0.
        logs: folder of its log.
        fleet_number: see `FleetNumber`.
        receive: called with each message of the runner, in their order.
        outer_wait: returns the wait in which a group with a number was given to a runner.
        remote: starts the process; None: on this machine.
    """

    def __init__(
        self,
        number: int,
        logs: Path,
        fleet_number: FleetNumber,
        receive: Callable[[RunnerProcess, FromRunner], Awaitable[None]],
        outer_wait: Callable[[int], waiting | WaitRegistry | None],
        remote: RemoteRunners | None = None,
    ) -> None:
        self.number = number
        self.running = 0
        """Episodes that it has and that have not ended."""
        self.has_last_try = False
        """Whether it has one group, and gets no other: it may be what has ended earlier processes."""
        self.last_pulse = _NO_PULSE
        self.heard_at = time.monotonic()
        """When it sent its last message."""
        self.log = logs / f"runner-{number}.log"
        self.ready = False
        """Whether it takes groups."""
        self._fleet_number = fleet_number
        self._receive = receive
        self._remote = remote
        self._numbers = itertools.count()
        """Numbers of updates."""
        self._replies: dict[int, asyncio.Future[Mapping[str, RequestsInProgress]]] = {}
        self._waits = RemoteWaits(number, outer_wait)
        self._child: RunningProcess | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reader: asyncio.StreamReader

    @property
    def pid(self) -> int:
        """Process id of the process."""
        assert self._child is not None, "spawn comes first"
        return self._child.pid

    async def spawn(self) -> None:
        """Start the process, which loads its modules and then waits for `begin`.

        Raises:
            RunnerError: it does not start.
        """
        command = [sys.executable, "-m", "agentrl.runtime.runners.process"]
        env = {"PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))}
        if self._remote is not None:
            await self._spawn_remote(self._remote, command, env)
            return
        parent, child = socket.socketpair()
        with child:
            self._child = await asyncio.to_thread(
                ChildProcess.start,
                [*command, str(child.fileno())],
                log=self.log,
                name=self._name,
                env=env,
                error=RunnerError,
                pass_fds=[child.fileno()],
            )
        self._reader, self._writer = await asyncio.open_connection(sock=parent, limit=BUFFER_BYTES)

    async def _spawn_remote(self, remote: RemoteRunners, command: Sequence[str], env: Mapping[str, str]) -> None:
        """Start the process on another machine, and wait until it has connected itself to this one."""
        connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]] = (
            asyncio.get_running_loop().create_future()
        )
        token = secrets.token_hex(_TOKEN_BYTES).encode()

        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with suppress(asyncio.IncompleteReadError, OSError):
                if hmac.compare_digest(await reader.readexactly(len(token)), token) and not connected.done():
                    connected.set_result((reader, writer))
                    return
            writer.close()

        variables = {name: os.environ[name] for name in (TOOLS_TOKEN,) if name in os.environ}
        server = await asyncio.start_server(accept, remote.address, 0, limit=BUFFER_BYTES)
        try:
            command = [*command, f"{remote.address}:{server.sockets[0].getsockname()[1]}"]
            env = {**env, **variables, TOKEN_VARIABLE: token.decode()}
            self._child = await asyncio.to_thread(remote.start, self.number, command, log=self.log, env=env)
            while not connected.done():
                if await asyncio.to_thread(self._child.outcome):
                    raise await asyncio.to_thread(self._start_error, self._child)
                await asyncio.wait([connected], timeout=_LOOK_S)
        finally:
            server.close()
        self._reader, self._writer = connected.result()
        detect_loss(self._writer)

    async def begin(self, setup: Setup, fleets: Callable[[], Sequence[FleetUpdate]]) -> None:
        """Set the runner up, and return when it takes groups.

        Args:
            setup: its first message.
            fleets: returns the engines of all fleets.

        Raises:
            RunnerError: it does not start; the message has its last log lines.
        """
        assert self._child is not None, "spawn comes first"
        self.send(setup)
        with waiting("start", f"of runner {self.number}"):
            while isinstance(message := await read_from_runner(self._reader), Logged):
                _log.log(message.level, "runner %d: %s", self.number, message.text)
        if not isinstance(message, Ready):
            self._close()
            raise await asyncio.to_thread(self._start_error, self._child)
        self.heard_at, self.ready = time.monotonic(), True
        for number, update in enumerate(fleets()):
            self.send(UpdateFleet(number, -1, update))

    async def serve(self) -> str:
        """Pass on messages until the process ends, and return how it ended."""
        assert self._child is not None, "spawn comes first"
        while (message := await read_from_runner(self._reader)) is not None:
            self.heard_at = time.monotonic()
            match message:
                case Logged(level, text):
                    _log.log(level, "runner %d: %s", self.number, text)
                case FleetRequests(number, requests):
                    if (reply := self._replies.pop(number, None)) is not None and not reply.done():
                        reply.set_result(requests)
                case Waits(sent_at, progress, events):
                    self._waits.receive(sent_at, events, progress=progress)
                case Pulse():
                    await self._receive(self, message)
                    self.last_pulse = message
                case _:
                    await self._receive(self, message)
        self._close()
        return await asyncio.to_thread(self._wait_end, self._child)

    def describe(self) -> str:
        """Return its number and what it waits for, in words."""
        silent_s = time.monotonic() - self.heard_at
        if silent_s > _SILENT_S:
            return f"{self.number}, silent for {silent_s:.0f} s"
        return f"{self.number}, whose longest wait is {self.last_pulse.longest_wait or 'none'}"

    def send(self, message: ToRunner) -> None:
        """Send a message, if the process is there."""
        if self._writer is not None:
            self._writer.write(encode_for_runner(message, self._fleet_number))

    async def update_fleet(self, fleet: int, update: FleetUpdate) -> Mapping[str, RequestsInProgress]:
        """Send the engines of a fleet; return the runner's requests by engine once it has them, none if it is gone."""
        if not self.ready:
            return {}
        reply: asyncio.Future[Mapping[str, RequestsInProgress]] = asyncio.get_running_loop().create_future()
        number = next(self._numbers)
        self._replies[number] = reply
        self.send(UpdateFleet(fleet, number, update))
        return await reply

    def kill(self) -> None:
        """Send SIGKILL; `serve` then returns."""
        assert self._child is not None, "spawn comes first"
        self._child.kill()
        if self._writer is not None:  # its machine may be lost
            self._writer.transport.abort()

    async def aclose(self) -> None:
        """Let the runner end its episodes, then end it."""
        self.send(Stop())
        self._close()
        if self._child is not None:
            await asyncio.to_thread(self._child.stop, _STOP_S)

    def _close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._waits.end_all(RunnerError.__name__)
        self._writer, self.ready, self.last_pulse = None, False, _NO_PULSE
        for reply in self._replies.values():
            if not reply.done():
                reply.set_result({})
        self._replies.clear()

    @property
    def _name(self) -> str:
        return f"runner {self.number}"

    def _wait_end(self, child: RunningProcess) -> str:
        """Return how a process ended whose connection is closed."""
        child.stop(_STOP_S)
        return f"{self._name} ended ({child.outcome()})"

    def _start_error(self, child: RunningProcess) -> RunnerError:
        return RunnerError(f"{self._wait_end(child)}. The end of its log {self.log}:\n{child.log_tail()}")
