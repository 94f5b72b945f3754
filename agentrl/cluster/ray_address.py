"""The address of a running Ray cluster to join, and the learner's device there. Imports no Ray."""

from __future__ import annotations

import logging
import os
import socket
import stat
from pathlib import Path

from agentrl.config.learner import LearnerConfig
from agentrl.learner.device import resolve_device

_log = logging.getLogger(__name__)
JOIN_TIMEOUT_S = 1.0
_NOTE_BYTES = 1024
"""More than any address has."""


def running_address() -> str | None:
    """Return the address of a Ray cluster to join: ``RAY_ADDRESS``, or that of ``ray start`` on this machine if it answers.

    A Ray that another run started is never joined, as it ends with that run. Nor is one that another user started, who could
    run code in this process: its note is in a folder that everyone may write.
    """
    named = os.environ.get("RAY_ADDRESS")
    if named:
        return named
    note = Path(os.environ.get("RAY_TMPDIR", "/tmp")) / "ray" / "ray_current_cluster"
    address = _read_note(note)
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), JOIN_TIMEOUT_S).close()
    except (OSError, ValueError):
        return None
    return address


def _read_note(file: Path) -> str:
    """Return the content of a file of the current user; empty if there is none."""
    try:
        descriptor = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            return ""
        if status.st_uid != os.getuid():
            _log.warning("%s is not of this user: its Ray is not joined; RAY_ADDRESS names one", file)
            return ""
        return os.read(descriptor, _NOTE_BYTES).decode(errors="replace").strip()
    finally:
        os.close(descriptor)


def learner_device(config: LearnerConfig) -> str:
    """Return ``cpu`` or ``cuda`` for ``learner.device``. If a Ray cluster is joined, ``cuda`` is not checked here, as its
    machines may have GPUs that this machine lacks.

    Raises:
        ConfigError: ``learner.device=cuda``, no Ray is joined, and there is no GPU here.
    """
    if config.device == "cuda" and running_address() is not None:
        return "cuda"
    return resolve_device(config)
