"""Ray for one run: a running cluster is joined; otherwise a small local one is started, and ended with the run."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private.node import Node

from agentrl.cluster.ray_address import running_address
from agentrl.cluster.ray_watch import ended_servers, kill_raylets, watch_ray
from agentrl.core.child_process import ENDING_SIGNALS
from agentrl.core.errors import LearnerError
from agentrl.core.openmp import limit_spinning

_STORE_BYTES = 256 << 20
"""Minimum size of the object store. Batches and weights pass through it; unwritten pages cost no memory."""

LOOK_S = 0.5
"""Seconds between two looks at Ray's processes while it, or something on it, starts."""
_WITHOUT_GCS_S = 600
"""Seconds that processes of a run continue without Ray's GCS: a training step that is being computed takes less."""

_UNUSED = ("start_api_server", "start_log_monitor", "start_monitor")
"""Processes that a Ray of one machine does without: its dashboard's, the log monitor, and the autoscaler.
Each takes a second of a core to start, and 100 MB."""


class RayRuntime:
    """A connection to Ray, held by a separate thread, as Ray's processes die with the thread that started them.

    Args:
        cpus: CPUs of a Ray that is started here. Ignored if one is joined.
        store_bytes: object store size of a Ray that is started here.
    """

    def __init__(self, *, cpus: int, store_bytes: int = _STORE_BYTES) -> None:
        self.cpus = cpus
        self._options = {} if ray.is_initialized() else _options(cpus, store_bytes)
        self._up = threading.Event()
        self._end = threading.Event()
        self._fault: Exception | None = None
        self._thread = threading.Thread(target=self._hold, name="ray", daemon=True)

    def start(self) -> None:
        """Join or start Ray; returns once it is usable. An existing connection of this process is used unchanged.

        Raises:
            LearnerError: Ray does not start, or the one that ``RAY_ADDRESS`` names does not answer.
        """
        if not self._options:
            return
        self._thread.start()
        while not self._up.wait(LOOK_S):
            if ended := ended_servers(psutil.Process()):  # what `ray.init` waits for will not come
                kill_raylets(psutil.Process())
                raise LearnerError(f"Ray does not start: its process {ended[0]} has ended")
        if self._fault is not None:
            raise LearnerError(f"Ray does not start: {self._fault}") from self._fault

    def stop(self) -> None:
        """Disconnect from Ray; a Ray that was started here ends."""
        self._end.set()
        if self._thread.ident is not None:
            self._thread.join()

    def _hold(self) -> None:
        # Ray's processes inherit this: a signal to all processes of a run must not end the learner before it has saved.
        signal.pthread_sigmask(signal.SIG_BLOCK, ENDING_SIGNALS)
        if self._options["address"] != "local":
            if self._connect():
                self._end.wait()
                ray.shutdown()
            return
        with watch_ray() as report_start:
            with _listen_on_loopback():
                connected = self._connect()
            if connected:
                report_start()
                self._end.wait()
                _kill_without_grace()
                ray.shutdown()

    def _connect(self) -> bool:
        try:
            ray.init(**self._options)
        except Exception as error:  # raised by `start` in the calling thread
            self._fault = error
        finally:
            self._up.set()
        return self._fault is None


def check_ray() -> None:
    """Raise if a process of the Ray that this process has started has ended.

    Raises:
        LearnerError: with the process and the folder of its log.
    """
    if ended := _ended_processes():
        raise LearnerError(f"Ray's process {ended[0]} has ended; its log is in {_node().get_logs_dir_path()}")


def raylet_ended() -> bool:
    """Return whether the raylet that this process has started has ended: Ray ends a process that then uses its objects."""
    return "raylet" in _ended_processes()


def gcs_ended() -> bool:
    """Return whether the GCS that this process has started has ended: calls that change actors would wait for it for minutes."""
    return "gcs_server" in _ended_processes()


def kill_actor(actor: Any) -> None:
    """Kill an actor; without a GCS it ends with Ray."""
    if not gcs_ended():
        ray.kill(actor)


def _ended_processes() -> list[str]:
    return [] if _node() is None else [name for name, _ in _node().dead_processes()]


def _node() -> Any:
    return ray._private.worker._global_node


def store_bytes(model: Path) -> int:
    """Return the object store size for the weights of a model folder."""
    return max(_STORE_BYTES, 4 * sum(file.stat().st_size for file in model.glob("*.safetensors")))


def _kill_without_grace() -> None:
    """Let Ray kill its processes as it shuts down: they block the SIGTERM with which it would end them."""
    node = _node()
    if node is not None:
        kill_all = node.kill_all_processes
        node.kill_all_processes = lambda **options: kill_all(**options | {"allow_graceful": False})


@contextmanager
def _listen_on_loopback() -> Iterator[None]:
    """Let the Ray that is started in this context have the address 127.0.0.1, listen on it alone, and be small.

    Ray replaces this address by that of another interface, and then listens on all, unless it may make no cluster of several
    machines. Clients that reach its ports need its token, too: ``RAY_AUTH_MODE``, by default ``token`` for a Ray of one machine.
    """
    several, started = ray_constants.ENABLE_RAY_CLUSTER, {name: getattr(Node, name) for name in _UNUSED}
    ray_constants.ENABLE_RAY_CLUSTER = False
    for name in _UNUSED:
        setattr(Node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = several
        for name, start in started.items():
            setattr(Node, name, start)


def _options(cpus: int, store_bytes: int) -> dict[str, Any]:
    quiet = {"logging_level": logging.ERROR, "log_to_driver": False, "configure_logging": True}
    # Ray must not hide the GPUs from actors that reserve none, and prints a warning unless this is set.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    # Ray lowers the priority of its workers by 15, and engines are their children.
    os.environ.setdefault("RAY_worker_niceness", "0")
    # With prestarted workers, `ray.init` waits for them, and forever for a worker that is killed before it has registered. A
    # worker that is started for an actor is replaced after a minute (RAY_worker_register_timeout_seconds).
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Without its GCS, Ray ends the processes of a run after a minute by default. The run ends itself, once it has saved.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", str(_WITHOUT_GCS_S))
    limit_spinning()
    address = running_address()
    if address is not None:
        return quiet | {"address": address}
    local = {"address": "local", "num_cpus": cpus, "object_store_memory": max(store_bytes, _STORE_BYTES)}
    return quiet | local | {"include_dashboard": False}
