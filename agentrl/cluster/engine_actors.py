"""Engines on the machines of a Ray cluster: an actor beside each starts it, watches it, and ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError

from agentrl.cluster.placement_group import Room, Seat, own_seat
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import AgentrlError, EngineError
from agentrl.inference.launch.launcher import EngineSpec
from agentrl.inference.launch.processes import EngineProcess

_LOOK_S = 0.2
"""Seconds between two looks at whether a process lives."""
_ANSWER_S = 30.0
"""Seconds that a host may take for what needs no time."""
_HOST_S = 120.0
"""Seconds that a host may take to start itself."""


class EngineHost:
    """Holds one engine as a child of its own process, in an actor. When the actor ends, however that may be, so does the
    engine: see `agentrl.inference.launch.guard`. Its methods run in threads.
    """

    def __init__(self) -> None:
        self._engine: EngineProcess | None = None

    def start(self, spec: EngineSpec, number: int, address: str, gpus: Sequence[str]) -> tuple[str, int]:
        """Start the engine, in place of one that it held, and block until it is healthy; return its URL and process id."""
        self.kill()
        self._engine = spec.start(number, host=address, gpus=gpus)
        return self._engine.url, self._engine.child.pid

    def ended(self, pid: int) -> str:
        """Block until the engine with this process id has ended, and return the end of its log."""
        engine = self._engine
        while engine is not None and engine.child.pid == pid:
            try:
                engine.check()
            except EngineError as error:
                return str(error)
            time.sleep(_LOOK_S)
            engine = self._engine
        return "it was ended"

    def log_tail(self, lines: int) -> str:
        """Return the last lines of the engine's log."""
        return self._engine.log_tail(lines) if self._engine is not None else ""

    def stop(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.stop()

    def kill(self) -> None:
        """End the engine at once."""
        if self._engine is not None:
            self._engine.kill()


class RayEngine:
    """Implements `agentrl.inference.launch.launcher.RunningEngine` for the engine of an `EngineHost`."""

    def __init__(self, host: Any, url: str, pid: int, log: str) -> None:
        """Begin to watch it."""
        self.url = url
        self.pid = pid
        """On its machine."""
        self.log = log
        self._host = host
        self._ended = host.ended.remote(pid)

    def check(self) -> None:
        """Raise where it has ended; see `RunningEngine.check`."""
        done, _ = ray.wait([self._ended], timeout=0)
        if done:
            try:
                words = ray.get(self._ended)
            except RayError as error:
                words = f"the process that held the engine at {self.url} is gone: {_first_line(error)}"
            raise EngineError(words)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of its log, or why they cannot be had."""
        try:
            return str(ray.get(self._host.log_tail.remote(lines), timeout=_ANSWER_S))
        except RayError as error:
            return f"(it cannot be read: {_first_line(error)})"

    def stop(self) -> None:
        """End it."""
        self._end(self._host.stop)

    def kill(self) -> None:
        """End it at once."""
        self._end(self._host.kill)

    def _end(self, method: Any) -> None:
        try:
            ray.get(method.remote(), timeout=_ANSWER_S)
        except RayActorError:
            pass  # its engine ended with it
        except GetTimeoutError:
            ray.kill(self._host)


class RayLauncher:
    """Starts the engines of a run in its `Room`. Implements `agentrl.inference.launch.launcher.Launcher`."""

    def __init__(self, spec: EngineSpec, room: Room, ranks: Sequence[Seat]) -> None:
        """Start nothing yet.

        Args:
            spec: what the engines are.
            room: where they belong.
            ranks: where the learner's ranks are, by rank.

        """
        self._spec = _carried(spec, in_turns=not room.layout.engine_needs)
        self._room = room
        self._ranks = ranks
        self._hosts: dict[int, Any] = {}
        self._lock = threading.Lock()

    def launch(self, number: int) -> RayEngine:
        """Start an engine; see `Launcher.launch`. Where its host has died meanwhile, it gets a new one."""
        try:
            try:
                return self._launch(number)
            except RayActorError:
                with self._lock:
                    del self._hosts[number]
                return self._launch(number)
        except RayTaskError as error:
            if isinstance(error.cause, AgentrlError):
                raise error.cause from None
            raise EngineError(f"engine-{number}: {error}") from None
        except GetTimeoutError as error:
            ray.kill(self._host(number))
            raise EngineError(
                f"engine-{number}: Ray has not started it in time; `ray status` shows what is free"
            ) from error
        except RayError as error:
            raise EngineError(f"engine-{number}: {_first_line(error)}") from error

    def _launch(self, number: int) -> RayEngine:
        spec, room = self._spec, self._room
        host = self._host(number)
        seat: Seat = ray.get(host.__ray_call__.remote(own_seat), timeout=_HOST_S)
        address = room.address(seat)
        start = host.start.remote(spec, number, address, self._shared_gpus(number) or seat.gpus)
        url, pid = ray.get(start, timeout=spec.config.start_timeout_s + _ANSWER_S)
        log = str(spec.logs / f"engine-{number}.log") + ("" if address in (LOOPBACK, room.here) else f" on {address}")
        return RayEngine(host, url, pid, log)

    def _host(self, number: int) -> Any:
        with self._lock:
            if number not in self._hosts:
                actor: Any = ray.remote(EngineHost)
                options = {"max_restarts": 0, "max_concurrency": 8} | self._room.engine_options(number)
                self._hosts[number] = actor.options(**options).remote()
            return self._hosts[number]

    def _shared_gpus(self, number: int) -> tuple[str, ...]:
        """Return the GPUs of the ranks that share a bundle with an engine, in their order."""
        layout = self._room.layout
        seats = zip(self._ranks, layout.ranks, strict=True)
        return tuple(gpu for seat, bundle in seats if bundle == layout.engines[number] for gpu in seat.gpus)


def _carried(spec: EngineSpec, *, in_turns: bool) -> EngineSpec:
    """Return the engines as other processes start them, which may be in other folders."""
    config = spec.config
    options = dict(config.sglang)
    if config.python is not None:
        options["python"] = str(config.python.absolute())
    if in_turns and config.device == "cuda":
        options["enable_memory_saver"] = True  # without it SGLang gives no memory back
    config = config.model_copy(update={"sglang": options})
    return replace(spec, config=config, model=spec.model.absolute(), logs=spec.logs.absolute())


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
