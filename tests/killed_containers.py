"""SIGKILL of a run with many machines: what its leases leave at the daemon."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import docker
from deadlines import wait_until

from agentrl.containers.leases import OWNER_LABEL

OWNER = "killed-run"
SCRIPT = Path(__file__).parent / "container_run.py"


@dataclass(frozen=True)
class Killed:
    """What was seen of a run that was killed."""

    played: int
    """Machines in which a command had run."""
    most_machines: int
    """Machines at the daemon at a time."""
    at_the_kill: int
    """Containers that the run left at first."""
    remains: list[str]
    """What the reaper has left of it."""
    seconds: float
    """From the kill until nothing was left."""


def kill_run(url: str, image: str, state: Path, *, machines: int, bound: int, played: int, lease_s: float) -> Killed:
    """Start a run, kill it when it has played so many machines, and wait until the reaper has removed what it left."""
    words = [sys.executable, str(SCRIPT), url, image, str(state), str(machines), str(bound), str(lease_s)]
    variables = {**os.environ, "PYTHONPATH": str(SCRIPT.parents[1])}
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True, env=variables) as run:
        assert run.stdout is not None
        counts = []
        for line in run.stdout:
            answer, count = line.split()
            assert answer == "2"
            counts.append(int(count))
            if len(counts) == played:
                break
        run.send_signal(signal.SIGKILL)
        killed_at = time.monotonic()
    api = docker.APIClient(base_url=url, version="auto")
    try:
        left = _remains(api)
        with suppress(AssertionError):
            wait_until(lambda: not _remains(api))
        return Killed(len(counts), max(counts), len(left), _remains(api), time.monotonic() - killed_at)
    finally:
        api.close()


def _remains(api: docker.APIClient) -> list[str]:
    filters = {"label": f"{OWNER_LABEL}={OWNER}"}
    return [
        *(container["Names"][0] for container in api.containers(all=True, filters=filters)),
        *(network["Name"] for network in api.networks(filters=filters)),
        *(image["Id"] for image in api.images(filters=filters)),
        *(volume["Name"] for volume in api.volumes(filters=filters)["Volumes"] or ()),
    ]
