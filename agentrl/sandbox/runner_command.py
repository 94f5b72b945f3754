"""The command that starts the runner: its program as one text, and its settings."""

from __future__ import annotations

import importlib.resources
import re
from functools import cache

import orjson

from agentrl.config.sandbox import SandboxLimits
from agentrl.sandbox.base import WORK, Defence

RUNNER_MODULES = ("snippet", "children", "runner")


@cache
def runner_source() -> str:
    """Return the runner's modules as one text: inside there is no agentrl to import."""
    folder = importlib.resources.files("agentrl.sandbox.runner")
    first_source, *sources = (folder.joinpath(f"{name}.py").read_text(encoding="utf-8") for name in RUNNER_MODULES)
    imports = r"(?m)^ *from (agentrl|__future__)[^(\n]* import (\([^)]*\)|.*)$"
    return "".join([first_source, *(re.sub(imports, "", source) for source in sources)])


def python_command(
    python: str,
    limits: SandboxLimits,
    defences: frozenset[Defence],
    work: str = WORK,
    *,
    no_cgroup: bool = False,
    egress: int | str | None = None,
) -> list[str]:
    """Return the command that starts the runner, without environment and user site, in UTF-8; its settings are one argument.

    Args:
        python: the interpreter inside.
        limits: of the sandbox.
        defences: those that are on.
        work: working directory of code.
        no_cgroup: whether no cgroup limits the sandbox, so that limits per process have to do.
        egress: the Unix socket to hand the proxy's listener over, as descriptor or path; see `agentrl.sandbox.egress`.
    """
    settings = {
        "work": work,
        "egress": egress if Defence.NETWORK in defences else None,
        "hidden": Defence.RUNNER in defences,
        "sweep": Defence.SWEEP in defences,
        "cpu": Defence.CPU in defences,
        "file_bytes": limits.file_mb * 2**20 if Defence.FILE_SIZE in defences else None,
        "open_files": limits.open_files if Defence.OPEN_FILES in defences else None,
        "address_space": limits.memory_mb * 2**20 if no_cgroup and Defence.MEMORY in defences else None,
        "processes": limits.processes if no_cgroup and Defence.PROCESSES in defences else None,
    }
    return [python, "-I", "-X", "utf8", "-c", runner_source(), orjson.dumps(settings).decode()]
