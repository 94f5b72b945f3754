"""Engines on the machines of a Ray cluster. An actor on the same machine starts, watches and ends each engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError, RayTaskError
from typing_extensions import override

from agentrl.cluster.placement_group import ActorLocation, ReservedPlacement, actor_location
from agentrl.cluster.placement_layout import Layout, Resources
from agentrl.cluster.ray_runtime import LOOK_S, check_ray, kill_actor
from agentrl.core.child_process import LOOPBACK, started_children
from agentrl.core.errors import AgentrlError, ConfigError, EngineError, LearnerError
from agentrl.inference.launch.launcher import EngineSpec, Launcher
from agentrl.inference.launch.processes import EngineProcess

_POLL_S = 0.2
"""Seconds between two checks whether a process is alive."""
ANSWER_S = 30.0
"""Time limit of calls that a host answers at once."""
HOST_S = 120.0
"""Time limit of a host's start."""


class EngineHost:
    """An actor with one engine as a child process. The engine ends with the actor, however that ends: see
    `agentrl.inference.launch.guard`. Its methods run in threads.
    """

    def __init__(self) -> None:
        self._engine: EngineProcess | None = None

    def start(self, spec: EngineSpec, number: int, address: str, gpus: Sequence[str]) -> tuple[str, int, str]:
        """Start the engine in place of the previous one, and block until it is healthy; return its URL, process id
        and ``start_details``.
        """
        self.kill()
        engine = self._engine = spec.start(number, host=address, gpus=gpus)
        return engine.url, engine.child.pid, engine.start_details

    def ended(self, pid: int) -> str:
        """Block until the engine with this process id has ended, and return the end of its log."""
        engine = self._engine
        while engine is not None and engine.child.pid == pid:
            try:
                engine.check()
            except EngineError as error:
                return str(error)
            time.sleep(_POLL_S)
            engine = self._engine
        return "it was ended"

    def log_tail(self, lines: int) -> str:
        """Return the last lines of the engine's log."""
        return self._engine.log_tail(lines) if self._engine is not None else ""

    def release(self) -> None:
        """Leave the engine to the next run if it is kept."""
        if self._engine is not None:
            self._engine.release()

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

    def __init__(self, host: Any, url: str, pid: int, log: str, start_details: str = "") -> None:
        """Start to watch the engine."""
        self.start_details = start_details
        self.url = url
        self.pid = pid
        """Process id on the engine's machine."""
        self.log = log
        self._host = host
        self._ended = host.ended.remote(pid)

    def check(self) -> None:
        """Raise `EngineError` with the end of the log if the engine has ended."""
        done, _ = ray.wait([self._ended], timeout=0)
        if done:
            try:
                words = ray.get(self._ended)
            except RayError as error:
                words = f"the process that held the engine at {self.url} is gone: {first_line(error)}"
            raise EngineError(words)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the engine's log, or why they cannot be read."""
        try:
            return str(ray.get(self._host.log_tail.remote(lines), timeout=ANSWER_S))
        except RayError as error:
            return f"(it cannot be read: {first_line(error)})"

    def release(self) -> None:
        """Leave the engine to the next run if it is kept."""
        self._end(self._host.release)

    def stop(self) -> None:
        """End the engine."""
        self._end(self._host.stop)

    def kill(self) -> None:
        """End the engine at once."""
        self._end(self._host.kill)

    def _end(self, method: Any) -> None:
        try:
            ray.get(method.remote(), timeout=ANSWER_S)
        except RayActorError:
            pass  # its engine ended with it
        except GetTimeoutError:
            kill_actor(self._host)


class HostLocations(Protocol):
    """Where the hosts of a launcher's engines are."""

    def place(self, engine: int) -> tuple[int, Resources]:
        """Return the bundle of the host of an engine, and what it takes of it."""
        ...

    def gpus(self, engine: int) -> Sequence[str]:
        """Return the GPUs of an engine, as in ``CUDA_VISIBLE_DEVICES``; empty: those that Ray assigns to its host."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyLocations:
    """Implements `HostLocations` for the policy's engines, which have a bundle each, or share one with ranks of the learner."""

    layout: Layout
    rank_locations: Callable[[], Sequence[ActorLocation]]
    """Waits for the locations of the learner's ranks, by rank."""

    def place(self, engine: int) -> tuple[int, Resources]:
        """Return the bundle of the host of an engine, and what it takes of it."""
        layout = self.layout
        return layout.engines[engine], layout.engine_needs

    def gpus(self, engine: int) -> Sequence[str]:
        """Return the GPUs of the ranks that share a bundle with an engine, by rank."""
        layout = self.layout
        ranks = zip(self.rank_locations(), layout.ranks, strict=True)
        return tuple(gpu for rank, bundle in ranks if bundle == layout.engines[engine] for gpu in rank.gpus)


@dataclass(frozen=True, slots=True)
class OwnLocations:
    """Implements `HostLocations` for the engines of a judge that have their own bundles."""

    layout: Layout
    model: str
    """``judge.model``."""

    def place(self, engine: int) -> tuple[int, Resources]:
        """Return the bundle of the host of an engine, and what it takes of it."""
        layout = self.layout
        return layout.judges[self.model][engine], layout.judge_needs[self.model]

    def gpus(self, engine: int) -> Sequence[str]:
        """Return none: Ray assigns them."""
        return ()


@dataclass(frozen=True, slots=True)
class SharedLocations:
    """Implements `HostLocations` for engines of a judge on the GPUs of other actors, from the first on; they reserve nothing.

    Args:
        key: of the judge, for messages.
        size: GPUs of an engine.
        actors: waits for the bundles and locations of the other actors: the learner's ranks, or the policy's engines.
    """

    key: str
    size: int
    actors: Callable[[], Sequence[tuple[int, ActorLocation]]]

    def place(self, engine: int) -> tuple[int, Resources]:
        """Return the bundle of the actor with the first GPU of an engine, of which its host takes nothing."""
        actors = self.actors()
        bundles = [bundle for bundle, location in actors for _ in location.gpus]
        return (bundles[engine * self.size] if bundles else actors[engine % len(actors)][0]), {}

    def gpus(self, engine: int) -> Sequence[str]:
        """Return the GPUs of an engine.

        Raises:
            ConfigError: they are on several machines.
        """
        gpus = [(location.node, gpu) for _, location in self.actors() for gpu in location.gpus]
        engine_gpus = gpus[engine * self.size : (engine + 1) * self.size]
        if len({node for node, _ in engine_gpus}) > 1:
            raise ConfigError(
                f"engine {engine} of {self.key} would have GPUs of several machines; set {self.key}.sglang.tp_size to a divisor "
                f"of a machine's GPUs, or {self.key}.gpus=own"
            )
        return tuple(gpu for _, gpu in engine_gpus)


class RayLauncher(Launcher):
    """Starts engines in a run's `ReservedPlacement`."""

    def __init__(self, spec: EngineSpec, placement: ReservedPlacement, locations: HostLocations) -> None:
        """Prepare to start engines."""
        self._spec = _portable(spec, colocated=not placement.layout.engine_needs)
        self._placement = placement
        self._locations = locations
        self._hosts: dict[int, Any] = {}
        self._lock = threading.Lock()

    def location(self, number: int) -> ActorLocation:
        """Return the machine and the GPUs that Ray has assigned to the host of an engine.

        Raises:
            EngineError: the host does not start.
        """
        try:
            location: ActorLocation = wait_result(self._host(number).__ray_call__.remote(actor_location), HOST_S)
        except (RayError, LearnerError) as error:
            raise EngineError(f"engine-{number}: {first_line(error)}") from error
        return location

    @override
    def launch(self, number: int) -> RayEngine:
        """If the engine's host has died, a new one is started."""
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
        except LearnerError as error:  # Ray has ended
            raise EngineError(f"engine-{number}: {error}") from error
        except GetTimeoutError as error:
            kill_actor(self._host(number))
            raise EngineError(
                f"engine-{number}: Ray has not started it in time; `ray status` shows what is free"
            ) from error
        except RayError as error:
            raise EngineError(f"engine-{number}: {first_line(error)}") from error

    def _launch(self, number: int) -> RayEngine:
        spec, placement = self._spec, self._placement
        host = self._host(number)
        location: ActorLocation = wait_result(host.__ray_call__.remote(actor_location), HOST_S)
        address = placement.address(location)
        start = host.start.remote(spec, number, address, self._locations.gpus(number) or location.gpus)
        url, pid, details = wait_result(start, spec.config.start_timeout_s + ANSWER_S)
        log = str(spec.logs / f"engine-{number}.log") + (
            "" if address in (LOOPBACK, placement.here) else f" on {address}"
        )
        return RayEngine(host, url, pid, log, details)

    def _host(self, number: int) -> Any:
        with self._lock:
            if number not in self._hosts:
                check_ray()  # without its GCS, Ray might take the call and not return
                actor: Any = ray.remote(EngineHost)
                placed = self._placement.host_options(*self._locations.place(number))
                options = {"max_restarts": 0, "max_concurrency": 8} | placed
                self._hosts[number] = actor.options(**options).remote()
            return self._hosts[number]


def wait_result(reference: Any, timeout_s: float) -> Any:
    """Return the result of an actor's call. An actor that waits for a dead Ray neither starts nor fails.

    Raises:
        LearnerError: a process of Ray has ended.
        GetTimeoutError: after ``timeout_s``, or when the start is cancelled.
        RayError: the call has failed.
    """
    end, children = time.monotonic() + timeout_s, started_children.get()
    while not ray.wait([reference], timeout=min(LOOK_S, max(0.0, end - time.monotonic())))[0]:
        check_ray()
        if children is not None and children.ended:
            raise GetTimeoutError("the start was cancelled")
        if time.monotonic() >= end:
            raise GetTimeoutError(f"no result after {timeout_s:g} s")
    return ray.get(reference)


def _portable(spec: EngineSpec, *, colocated: bool) -> EngineSpec:
    """Return the specification for processes with other working directories: with absolute paths."""
    config = spec.config
    options = dict(config.sglang)
    if config.python is not None:
        options["python"] = str(config.python.absolute())
    if colocated and config.device == "cuda":
        options["enable_memory_saver"] = True  # without it SGLang cannot release memory
    config = config.model_copy(update={"sglang": options})
    return replace(spec, config=config, model=spec.model.absolute(), logs=spec.logs.absolute())


def first_line(error: BaseException) -> str:
    """Return the first line of an error's message, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
