"""A start of Ray whose GCS is killed ends. Each start is a process: one that hangs lets no thread of it run."""

import subprocess
import sys
from pathlib import Path

import pytest

START = """
import sys
from pathlib import Path
import psutil, ray
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.core.errors import LearnerError

def killing(start):
    def killed(*arguments, **options):
        [gcs] = [child for child in psutil.Process().children() if child.name() == "gcs_server"]
        gcs.kill()
        Path(sys.argv[2]).touch()
        return start(*arguments, **options)
    return killed

owner = {"raylet": ray._private.node.Node, "driver": ray._raylet}[sys.argv[1]]
name = {"raylet": "start_raylet", "driver": "CoreWorker"}[sys.argv[1]]
setattr(owner, name, killing(getattr(owner, name)))
try:
    RayRuntime(cpus=1).start()
except LearnerError as error:
    sys.exit(f"LearnerError: {error}")
"""
LIMIT_S = 90
"""Much less than the ten minutes that Ray waits, and enough for a start on a busy machine."""


@pytest.mark.parametrize("moment", ["raylet", "driver"])
def test_a_start_whose_gcs_is_killed_ends(tmp_path: Path, moment: str) -> None:
    """Before the raylet starts; and before the driver connects, which then waits without letting another thread run."""
    killed = tmp_path / "killed"
    done = subprocess.run(
        [sys.executable, "-c", START, moment, str(killed)],
        stderr=subprocess.PIPE,
        text=True,
        timeout=LIMIT_S,
        check=False,
        start_new_session=True,
    )
    assert killed.exists()
    assert done.returncode == 1, done.stderr
    assert "LearnerError: Ray does not start: its process gcs_server has ended" in done.stderr
