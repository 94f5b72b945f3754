"""The address of a running Ray cluster to join, and the learner's device there. Imports no Ray."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from agentrl.config.learner import LearnerConfig
from agentrl.learner.device import resolve_device

JOIN_TIMEOUT_S = 1.0


def running_address() -> str | None:
    """Return the address of a Ray cluster to join: ``RAY_ADDRESS``, or that of ``ray start`` on this machine if it answers.

    A Ray that another run started is never joined, as it ends with that run.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    if not note.is_file():
        return None
    address = note.read_text(encoding="utf-8").strip()
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), JOIN_TIMEOUT_S).close()
    except (OSError, ValueError):
        return None
    return address


def learner_device(config: LearnerConfig) -> str:
    """Return ``cpu`` or ``cuda`` for ``learner.device``. If a Ray cluster is joined, ``cuda`` is not checked here, as its
    machines may have GPUs that this machine lacks.

    Raises:
        ConfigError: ``learner.device=cuda``, no Ray is joined, and there is no GPU here.

    """
    if config.device == "cuda" and running_address() is not None:
        return "cuda"
    return resolve_device(config)
