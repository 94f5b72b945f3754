"""Starts of Ray for tests, as targets of `preloaded.Forked`: what they are to do, and a file that is made once it is done."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from agentrl.core.errors import LearnerError


def kill_gcs() -> int:
    """Start Ray, whose GCS is killed before its ``raylet`` starts or before the ``driver`` connects: ``MOMENT FILE``."""
    import ray

    from agentrl.cluster.ray_runtime import RayRuntime

    moment, file = sys.argv[1:]

    def killing(start: Callable[..., Any]) -> Callable[..., Any]:
        def killed(*arguments: Any, **options: Any) -> Any:
            [gcs] = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
            gcs.kill()
            Path(file).touch()
            return start(*arguments, **options)

        return killed

    owner: Any = {"raylet": ray._private.node.Node, "driver": ray._raylet}[moment]
    name = {"raylet": "start_raylet", "driver": "CoreWorker"}[moment]
    setattr(owner, name, killing(getattr(owner, name)))
    try:
        RayRuntime(cpus=1).start()
    except LearnerError as error:
        print(f"LearnerError: {error}", file=sys.stderr)
        return 1
    return 0


def wait_with_ray() -> int:
    """Start Ray and wait, while it is ``starting`` or once it has a ``worker``: ``MOMENT FILE``."""
    import ray

    from agentrl.cluster.ray_runtime import RayRuntime

    moment, file = sys.argv[1:]

    def wait(*_: object, **__: object) -> None:
        Path(file).touch()
        threading.Event().wait()

    if moment == "starting":  # its raylet has started its agents, and the driver does not connect
        ray._raylet.CoreWorker = wait
    RayRuntime(cpus=1).start()
    ray.get(ray.remote(lambda: 1).remote())
    wait()
    return 0
