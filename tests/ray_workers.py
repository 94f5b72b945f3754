"""Ray's workers that start in a second: forks of a preloaded process that has imported all but Ray.

Ray reads some of its environment as it is imported, so that a fork of a process that has imported it could be no worker.

``python tests/ray_workers.py WORKER ARGUMENT...`` takes the place of Ray's ``setup_worker.py``: it requests the fork, and
waits for its end. The worker is no descendant of the Ray that it works for.
"""

from __future__ import annotations

import importlib
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import preloaded

MODULES = (
    *preloaded.MODEL_MODULES,
    "agentrl.learner.fsdp.rank",
    "agentrl.learner.export",
    "agentrl.inference.launch.launcher",
)
"""What actors import."""
_NOT_FOR_WORKERS = ("--serialized-runtime-env-context=", "--language=")
"""Arguments of ``setup_worker.py``; no test has a runtime environment."""


@contextmanager
def forked_workers() -> Iterator[None]:
    """Let the workers of every Ray that this process starts be forks of the process at ``preloaded.WORKERS``."""
    parameters = importlib.import_module("ray._private.parameter").RayParams
    initialize = parameters.__init__

    def initialized(self: Any, *arguments: Any, **options: Any) -> None:
        initialize(self, *arguments, **{"setup_worker_path": __file__} | options)

    parameters.__init__ = initialized
    try:
        yield
    finally:
        parameters.__init__ = initialize


def work() -> None:
    """Be a worker."""
    assert "ray" not in sys.modules
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name="__main__")


def main() -> int:
    """Have a worker forked, and wait for its end."""
    words = [word for word in sys.argv[1:] if not word.startswith(_NOT_FOR_WORKERS)]
    request = preloaded.Request("ray_workers:work", words, os.getcwd(), dict(os.environ), {1: 1, 2: 2}, forks=True)
    return preloaded.Forked(request, os.environ[preloaded.WORKERS]).wait()


if __name__ == "__main__":
    sys.exit(main())
