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
from agentrl.cluster.placement_layout import Resources
from agentrl.cluster.ray_runtime import LOOK_S, check_ray, kill_actor
from agentrl.config.engine_groups import engine_group
from agentrl.core.child_process import LOOPBACK, reserve_port, started_children
from agentrl.core.errors import AgentrlError, ConfigError, EngineError, LearnerError
from agentrl.inference.launch.launcher import EngineSpec, Launcher
from agentrl.inference.launch.processes import EngineMachine, EngineProcess

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

    def start(
        self, spec: EngineSpec, number: int, address: str, gpus: Sequence[str], machine: EngineMachine | None
    ) -> tuple[str, int, str]:
        """Start the engine, or its part on this ``machine``, in place of the previous one, and block until it is healthy.

        Returns:
            Its URL, process id and ``start_details``.
        """
        self.kill()
        engine = self._engine = spec.start(number, host=address, gpus=gpus, machine=machine)
        return engine.url, engine.child.pid, engine.start_details

    def free_port(self, address: str) -> int:
        """Return a free port of this machine."""
        with reserve_port(address, 0, key="sampler.port") as port:
            return port

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
    """Implements `agentrl.inference.launch.launcher.RunningEngine` for the engine of an `EngineHost`, or of several."""

    def __init__(self, hosts: Sequence[Any], url: str, pids: Sequence[int], log: str, start_details: str = "") -> None:
        """Start to watch the engine.

        Args:
            hosts: one on each of the engine's machines.
            url: of its server, on the first machine.
            pids: process ids on the machines.
            log: of the first machine's process.
            start_details: what its start consisted of.
        """
        self.start_details = start_details
        self.url = url
        self.pids = tuple(pids)
        """Process ids on the engine's machines."""
        self.log = log
        self._hosts = hosts
        self._ended = [host.ended.remote(pid) for host, pid in zip(hosts, pids, strict=True)]

    def check(self) -> None:
        """Raise `EngineError` with the end of the log if the engine has ended on one of its machines."""
        done, _ = ray.wait(self._ended, timeout=0)
        if done:
            try:
                words = ray.get(done[0])
            except RayError as error:
                words = f"the process that held the engine at {self.url} is gone: {first_line(error)}"
            raise EngineError(words)

    def log_tail(self, lines: int = 20) -> str:
        """Return the last lines of the log of the engine's first machine, or why they cannot be read."""
        try:
            return str(ray.get(self._hosts[0].log_tail.remote(lines), timeout=ANSWER_S))
        except RayError as error:
            return f"(it cannot be read: {first_line(error)})"

    def release(self) -> None:
        """Leave the engine to the next run if it is kept."""
        self._end([host.release for host in self._hosts])

    def stop(self) -> None:
        """End the engine."""
        self._end([host.stop for host in self._hosts])

    def kill(self) -> None:
        """End the engine at once."""
        self._end([host.kill for host in self._hosts])

    def _end(self, methods: Sequence[Any]) -> None:
        for host, call in zip(self._hosts, [method.remote() for method in methods], strict=True):
            try:
                ray.get(call, timeout=ANSWER_S)
            except RayActorError:
                pass  # its engine ended with it
            except GetTimeoutError:
                kill_actor(host)


class HostLocations(Protocol):
    """Where the hosts of a launcher's engines are."""

    def place(self, engine: int, machine: int) -> tuple[int, Resources]:
        """Return the bundle of the host of an engine on one of its machines, and what it takes of it."""
        ...

    def gpus(self, engine: int, machine: int) -> Sequence[str]:
        """Return an engine's GPUs of a machine, as in ``CUDA_VISIBLE_DEVICES``; empty: those that Ray assigns to its host."""
        ...


@dataclass(frozen=True, slots=True)
class PolicyLocations:
    """Implements `HostLocations` for the policy's engines, whose bundles are their own or those of ranks of the learner."""

    placement: ReservedPlacement
    rank_locations: Callable[[], Sequence[ActorLocation]]
    """Waits for the locations of the learner's ranks, by rank: until then ranks and colocated engines are not numbered."""

    def place(self, engine: int, machine: int) -> tuple[int, Resources]:
        """Return the bundle of the host of an engine on one of its machines, and what it takes of it."""
        if self.placement.layout.shares_engines:
            self.rank_locations()
        layout = self.placement.layout
        bundle = layout.engines[engine][machine]
        return bundle, {} if layout.shares_engines else layout.bundles[bundle]

    def gpus(self, engine: int, machine: int) -> Sequence[str]:
        """Return the GPUs of the ranks that share a bundle with an engine, by rank."""
        locations, layout = self.rank_locations(), self.placement.layout
        ranks = zip(locations, layout.ranks, strict=True)
        return tuple(gpu for rank, bundle in ranks if bundle == layout.engines[engine][machine] for gpu in rank.gpus)


@dataclass(frozen=True, slots=True)
class OwnLocations:
    """Implements `HostLocations` for engines that have their own bundles: those of a judge, or those that only evaluate."""

    bundles: Sequence[Sequence[int]]
    """Bundle indices of each engine, one for each of its machines."""
    needs: Resources
    """The resources that an engine takes from each."""

    def place(self, engine: int, machine: int) -> tuple[int, Resources]:
        """Return the bundle of the host of an engine on one of its machines, and what it takes of it."""
        return self.bundles[engine][machine], self.needs

    def gpus(self, engine: int, machine: int) -> Sequence[str]:
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

    def place(self, engine: int, machine: int) -> tuple[int, Resources]:
        """Return the bundle of the actor with the first GPU of an engine, of which its host takes nothing."""
        actors = self.actors()
        bundles = [bundle for bundle, location in actors for _ in location.gpus]
        return (bundles[engine * self.size] if bundles else actors[engine % len(actors)][0]), {}

    def gpus(self, engine: int, machine: int) -> Sequence[str]:
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
        self._spec = _portable(spec, colocated=placement.layout.shares_engines)
        self._placement = placement
        self._locations = locations
        self._hosts: dict[tuple[int, int], Any] = {}
        """By engine and machine."""
        self._lock = threading.Lock()

    def locations(self, number: int) -> list[ActorLocation]:
        """Return the machines of an engine, and the GPUs that Ray has assigned to its host on each.

        Raises:
            EngineError: a host does not start.
        """
        try:
            return self._locate(self._find_hosts(number))
        except (RayError, LearnerError) as error:
            raise EngineError(f"engine-{number}: {first_line(error)}") from error

    @override
    def launch(self, number: int) -> RayEngine:
        """If the engine's host has died, a new one is started."""
        try:
            try:
                return self._launch(number)
            except RayActorError:
                self._drop_hosts(number)
                return self._launch(number)
        except RayTaskError as error:
            if isinstance(error.cause, AgentrlError):
                raise error.cause from None
            raise EngineError(f"engine-{number}: {error}") from None
        except LearnerError as error:  # Ray has ended
            raise EngineError(f"engine-{number}: {error}") from error
        except GetTimeoutError as error:
            self._drop_hosts(number)
            raise EngineError(
                f"engine-{number}: Ray has not started it in time; `ray status` shows what is free"
            ) from error
        except RayError as error:
            raise EngineError(f"engine-{number}: {first_line(error)}") from error

    def _launch(self, number: int) -> RayEngine:
        spec, placement = self._spec, self._placement
        hosts = self._find_hosts(number)
        locations = self._locate(hosts)
        addresses = [placement.address(location) for location in locations]
        machines: list[EngineMachine | None] = [None]
        if len(hosts) > 1:
            port = wait_result(hosts[0].free_port.remote(addresses[0]), ANSWER_S)
            machines = [EngineMachine(rank, f"{addresses[0]}:{port}") for rank in range(len(hosts))]
        starts = [
            host.start.remote(spec, number, address, self._locations.gpus(number, rank) or location.gpus, machine)
            for rank, (host, location, address, machine) in enumerate(
                zip(hosts, locations, addresses, machines, strict=True)
            )
        ]
        try:
            started = wait_results(starts, spec.config.start_timeout_s + ANSWER_S)
        except RayTaskError:
            if len(hosts) > 1:  # the others wait for the machine that has failed
                self._drop_hosts(number)
            raise
        url, _, details = started[0]
        log = str(spec.logs / f"engine-{number}{'.machine-0' if len(hosts) > 1 else ''}.log")
        log += "" if addresses[0] in (LOOPBACK, placement.here) else f" on {addresses[0]}"
        return RayEngine(hosts, url, [pid for _, pid, _ in started], log, details)

    def _locate(self, hosts: Sequence[Any]) -> list[ActorLocation]:
        return wait_results([host.__ray_call__.remote(actor_location) for host in hosts], HOST_S)

    def _find_hosts(self, number: int) -> list[Any]:
        """Return the host of an engine on each of its machines; those that do not exist are started."""
        with self._lock:
            machines = range(engine_group(self._spec.config, number)[1].engine_machines)
            for machine in machines:
                if (number, machine) not in self._hosts:
                    check_ray()  # without its GCS, Ray might take the call and not return
                    actor: Any = ray.remote(EngineHost)
                    placed = self._placement.host_options(*self._locations.place(number, machine))
                    options = {"max_restarts": 0, "max_concurrency": 8} | placed
                    self._hosts[number, machine] = actor.options(**options).remote()
            return [self._hosts[number, machine] for machine in machines]

    def _drop_hosts(self, number: int) -> None:
        """End the hosts of an engine: the next start begins with new ones."""
        with self._lock:
            keys = [key for key in self._hosts if key[0] == number]
            for host in [self._hosts.pop(key) for key in keys]:
                kill_actor(host)


def wait_result(reference: Any, timeout_s: float) -> Any:
    """Return the result of an actor's call; see `wait_results`."""
    return wait_results([reference], timeout_s)[0]


def wait_results(references: Sequence[Any], timeout_s: float) -> list[Any]:
    """Return the results of actors' calls. An actor that waits for a dead Ray neither starts nor fails.

    Raises:
        LearnerError: a process of Ray has ended.
        GetTimeoutError: after ``timeout_s``, or when the start is cancelled.
        RayError: a call has failed; the others may still run.
    """
    end, children, pending = time.monotonic() + timeout_s, started_children.get(), list(references)
    while True:
        done, pending = ray.wait(pending, timeout=min(LOOK_S, max(0.0, end - time.monotonic())))
        if not pending:
            return list(ray.get(list(references)))
        if done:
            ray.get(done)  # raises if one has failed
            continue
        check_ray()
        if children is not None and children.ended:
            raise GetTimeoutError("the start was cancelled")
        if time.monotonic() >= end:
            raise GetTimeoutError(f"no result after {timeout_s:g} s")


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
