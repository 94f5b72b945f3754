"""What would outlive a process that has started Ray. It and the raylet are shells, and its agent a sleep."""

from __future__ import annotations

import subprocess
from pathlib import Path

import psutil
from deadlines import wait_for_exit, wait_until

from agentrl.cluster.ray_watch import kill_raylets

MAIN = './raylet -c "$0" & wait'
RAYLET = "(RAY_RAYLET_PID=$$ sleep 1000 & echo $! > pid; mv pid agent); kill -STOP $$"


def test_an_agent_ends_whose_raylet_is_not_its_parent_any_more(tmp_path: Path) -> None:
    (tmp_path / "raylet").symlink_to("/bin/sh")
    agent = tmp_path / "agent"
    with subprocess.Popen(["/bin/sh", "-c", MAIN, RAYLET], cwd=tmp_path) as process:
        wait_until(agent.exists)
        kill_raylets(psutil.Process(process.pid))
    wait_for_exit(int(agent.read_text()))
