"""Runner processes on the machines of a Ray cluster. An actor on the same machine starts and ends each of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from agentrl.cluster.engine_actors import ANSWER_S, HOST_S, first_line, wait_result
from agentrl.cluster.placement_group import ReservedPlacement
from agentrl.cluster.ray_runtime import check_ray, kill_actor
from agentrl.core.child_process import ChildProcess
from agentrl.core.errors import LearnerError, RunnerError


class RunnerHost:
    """An actor with a runner as a child process, which ends with the actor, however that ends. Its methods run in threads."""

    def __init__(self) -> None:
        self._child: ChildProcess | None = None

    @property
    def child(self) -> ChildProcess:
        """The process."""
        assert self._child is not None, "start comes first"
        return self._child

    def start(self, command: Sequence[str], log: Path, name: str, env: Mapping[str, str]) -> int:
        """Start the process, and return its id."""
        self._child = ChildProcess.start(command, log=log, name=name, env=env, error=RunnerError)
        return self._child.pid


class RemoteRunner:
    """Implements `agentrl.runtime.runners.runner.RunningProcess` for the process of a `RunnerHost`."""

    def __init__(self, host: Any, pid: int) -> None:
        self.pid = pid
        """Process id on its machine."""
        self._host = host
        self._end = ("", "")
        """How it ended and the last lines of its log, once it is stopped."""

    def outcome(self) -> str:
        """Return how the process ended; empty while it runs."""
        return self._end[0] or self._report(lambda host: (host.child.outcome(), ""), ANSWER_S)[0]

    def log_tail(self) -> str:
        """Return the last lines of the log of a stopped process, or why they cannot be read."""
        return self._end[1]

    def kill(self) -> None:
        """Send SIGKILL. Does not wait."""
        self._host.__ray_call__.remote(lambda host: host.child.kill())

    def stop(self, timeout_s: float) -> None:
        """End the process, by SIGTERM, then by SIGKILL after ``timeout_s``, and its actor."""

        def stop(host: RunnerHost) -> tuple[str, str]:
            host.child.stop(timeout_s)
            return host.child.outcome(), host.child.log_tail()

        if not self._end[0]:
            self._end = self._report(stop, timeout_s + ANSWER_S)
            kill_actor(self._host)

    def _report(self, function: Callable[[RunnerHost], tuple[str, str]], timeout_s: float) -> tuple[str, str]:
        """Return the outcome and the log that a function of the host does, or that the host is lost."""
        try:
            outcome, log = ray.get(self._host.__ray_call__.remote(function), timeout=timeout_s)
        except RayError as error:
            outcome, log = f"its actor is gone: {first_line(error)}", "(it cannot be read)"
        return outcome, log


class RayRunners:
    """Starts the runners of a run, round robin on the machines of a placement."""

    def __init__(self, placement: ReservedPlacement) -> None:
        self.address = placement.here
        """At which they reach this process."""
        self._placement = placement

    def start(self, number: int, command: Sequence[str], *, log: Path, env: Mapping[str, str]) -> RemoteRunner:
        """Start a process, and block until it runs.

        Raises:
            RunnerError: Ray does not start it.
        """
        name = f"runner {number}"
        try:
            check_ray()  # without its GCS, Ray might take the call and not return
            nodes = self._placement.runner_nodes()
            affinity = NodeAffinitySchedulingStrategy(nodes[number % len(nodes)], soft=False)
            actor: Any = ray.remote(RunnerHost)
            host = actor.options(num_cpus=0, max_restarts=0, max_concurrency=4, scheduling_strategy=affinity).remote()
            return RemoteRunner(host, wait_result(host.start.remote(command, log, name, env), HOST_S))
        except (RayError, LearnerError) as error:
            raise RunnerError(f"{name} does not start: {first_line(error)}") from error
