"""One exercise for a shell, and the folder that holds it in Harbor's format."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from string import Template

IMAGE = "agentrl-terminal:1"
"""The image that all exercises begin from; ``python -m agentrl_tasks.terminal base`` makes it."""
WORK = "/work"
"""The working folder in the container."""
FORMAT = 1
"""Number of the layout of folders; another one makes other folders."""

_TASK = Template(
    """\
schema_version = "1.4"
artifacts = ["$work"]

[metadata]
kind = "$kind"
level = $level

[agent]
timeout_sec = 300

[verifier]
timeout_sec = 60
user = "root"
environment_mode = "separate"

[environment]
cpus = 1
memory_mb = 256
storage_mb = 512
workdir = "$work"
network_mode = "no-network"
"""
)
_TEST = """\
#!/bin/sh
# The working folder has come from the agent's container; its programs run as nobody, and only root writes the reward.
if python3 -I -S /tests/check.py; then reward=1; else reward=0; fi
mkdir -p /logs/verifier
echo "$reward" > /logs/verifier/reward.txt
"""
_CHECK = '''\
"""Exits with 0 if the exercise is solved."""

import os
import signal
import stat
import subprocess
import sys

WORK = "{work}"
LONGEST = 1 << 20


def text(name):
    """Return the text of a file in the working folder; None if there is none, or no ordinary one."""
    try:
        file = os.open(os.path.join(WORK, name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    with os.fdopen(file, "rb") as opened:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            return None
        return opened.read(LONGEST).decode("utf-8", "replace")


def start(*words):
    """Start a program of the working folder as nobody."""
    return subprocess.Popen(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", *words],
        cwd=WORK, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, start_new_session=True,
        env={{"PATH": "/usr/local/bin:/usr/bin:/bin", "PYTHONDONTWRITEBYTECODE": "1"}},
    )


def stop(process):
    """Kill a program with all that it has started in its session."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.stdout.close()
    process.wait()


def output(*words):
    """Return what a program prints within ten seconds; None if it fails."""
    process = start(*words)
    try:
        printed, _ = process.communicate(timeout=10)
        return printed[:LONGEST].decode("utf-8", "replace") if process.returncode == 0 else None
    except subprocess.TimeoutExpired:
        return None
    finally:
        stop(process)


{check}

sys.exit(0 if solved() else 1)
'''


@dataclass(frozen=True, slots=True)
class Exercise:
    """What the agent is told, finds and must do."""

    kind: str
    """One of `agentrl_tasks.terminal.kinds.KINDS`."""
    level: int
    """1 is easy, 4 hard."""
    instruction: str
    """The instruction of the agent."""
    commands: tuple[str, ...]
    """The reference solution, a shell command a turn."""
    check: str
    """Python source of ``solved()``, which may call ``text``, ``output``, ``start`` and ``stop``."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Text of the files in the working folder at the start, by path."""
    looks: tuple[str, ...] = ()
    """Commands that show what the solution needs and the instruction does not say; no part of the task's folder."""

    def contents(self) -> dict[str, str]:
        """Return the text of every file of the task's folder, by path."""
        values = {"work": WORK, "kind": self.kind, "level": str(self.level)}
        copied = f"COPY files/ {WORK}/\n" if self.files else ""
        return {
            "task.toml": _TASK.substitute(values),
            "instruction.md": f"{self.instruction}\n",
            "environment/Dockerfile": f"FROM {IMAGE}\n{copied}WORKDIR {WORK}\n",
            **{f"environment/files/{name}": text for name, text in self.files.items()},
            "tests/test.sh": _TEST,
            "tests/check.py": _CHECK.format(work=WORK, check=self.check.strip()),
            "solution/solve.sh": "\n".join(["#!/bin/sh", "set -e", f"cd {WORK}", *self.commands, ""]),
        }

    def digest(self) -> str:
        """Return a hash of the folder's files: 16 hexadecimal digits."""
        return hashlib.sha256(json.dumps([FORMAT, self.contents()], sort_keys=True).encode()).hexdigest()[:16]

    def write(self, folder: Path) -> None:
        """Write the task's folder, which must not be there; other processes see all of it or nothing."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=folder.parent))
        try:
            for name, text in self.contents().items():
                path = partial / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text)
                path.chmod(0o755 if path.suffix == ".sh" and not name.startswith("environment/") else 0o644)
            partial.chmod(0o755)
            try:
                partial.rename(folder)
            except OSError:
                if not folder.is_dir():  # another process was first
                    raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)
