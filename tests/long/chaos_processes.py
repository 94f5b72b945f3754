"""The processes of a training run, by kind, and what of them is left after its end."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable

import psutil

VARIABLE = "AGENTRL_CHAOS_RUN"
"""Environment variable that all processes of a run inherit, those in a sandbox excepted."""

KINDS = (
    "main",
    "engine",
    "runner",
    "learner rank",
    "tool server",
    "sandbox",
    "agent program",
    "agent supervisor",
    "engine host",
    "ray worker",
    "ray agent",
    "raylet",
    "gcs",
)
"""What is killed."""

_BY_WORDS = (
    ("09_agent_program/agent.py", "agent program"),
    ("gateway/supervisor.py", "agent supervisor"),
    ("raylet/raylet ", "raylet"),
    ("gcs/gcs_server ", "gcs"),
    ("agentrl.inference.embedded", "engine"),
    ("sglang.launch_server", "engine"),
    ("sglang::", "engine"),
    ("agentrl.runtime.runners.process", "runner"),
    ("tools serve", "tool server"),
    ("ray::LearnerActor", "learner rank"),
    ("ray::EngineHost", "engine host"),
    ("ray::DashboardAgent", "ray agent"),
    ("ray::RuntimeEnvAgent", "ray agent"),
    # Until they have named themselves.
    ("dashboard/agent.py", "ray agent"),
    ("runtime_env/agent/main.py", "ray agent"),
    ("ray::", "ray worker"),
    ("default_worker.py", "ray worker"),
    ("bwrap", "sandbox"),
)  # fmt: skip
"""Words of a command line, and the kind of its process; the first that match count."""


def kind_of(process: psutil.Process, parents: dict[int, str]) -> str:
    """Return the kind of a descendant; that of its parent if its command line does not tell."""
    words = " ".join(process.cmdline())
    for text, kind in _BY_WORDS:
        if text in words:
            return kind
    parent = parents.get(process.ppid(), "")
    return "sandbox" if parent in ("sandbox", "tool server") else parent


class RunProcesses:
    """The processes of one training run, of all its resumptions."""

    def __init__(self, name: str) -> None:
        self.environment = {VARIABLE: name}
        self._name = name
        self._seen: dict[psutil.Process, str] = {}

    def living(self, main: int) -> dict[str, list[psutil.Process]]:
        """Return the living processes below the process ``main`` and itself, by kind."""
        living_by_kind: dict[str, list[psutil.Process]] = {}
        kinds = {main: "main"}
        try:
            root = psutil.Process(main)
            processes = [root, *root.children(recursive=True)]
        except psutil.Error:
            return living_by_kind
        for process in processes:
            try:
                kind = kinds.get(process.pid) or kind_of(process, kinds)
                if process.status() == psutil.STATUS_ZOMBIE:
                    continue
            except psutil.Error:
                continue
            kinds[process.pid] = kind
            if kind in KINDS:
                self._seen[process] = kind
                living_by_kind.setdefault(kind, []).append(process)
        return living_by_kind

    @property
    def servers(self) -> list[int]:
        """Process ids of the run's tool servers."""
        return [process.pid for process, kind in self._seen.items() if kind == "tool server"]

    def left(self, timeout_s: float) -> list[str]:
        """Wait until all processes have ended, and return those that have not."""
        begun = time.monotonic()
        while leftovers := self._living():
            if time.monotonic() > begun + timeout_s:
                return [_describe(process) for process in leftovers]
            time.sleep(0.2)
        return []

    def end(self) -> None:
        """Kill what is left."""
        for process in self._living():
            with contextlib.suppress(psutil.Error):
                process.kill()

    def _living(self) -> set[psutil.Process]:
        """Return the living processes that were seen; if there are none, those with the run's variable."""
        if running := {process for process in self._seen if _runs(process)}:
            return running
        for process in self._marked():
            if process not in self._seen:
                with contextlib.suppress(psutil.Error):
                    self._seen[process] = kind_of(process, {})
                    running.add(process)
        return running

    def _marked(self) -> Iterable[psutil.Process]:
        """Yield processes with the run's environment variable."""
        for process in psutil.process_iter():
            try:
                if process.environ().get(VARIABLE) == self._name and _runs(process):
                    yield process
            except psutil.Error:
                continue


def _runs(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def _describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {' '.join(process.cmdline())[:160]}"
    except psutil.Error:
        return f"{process.pid}"


def left_in_cgroups(pids: Iterable[int]) -> list[str]:
    """Return the control groups of sandboxes whose tool server, one of ``pids``, has ended."""
    prefixes = tuple(f"{pid}-" for pid in pids)
    leftovers = []
    for folder, names, _ in os.walk("/sys/fs/cgroup"):
        if os.path.basename(folder) == "agentrl":
            leftovers += [os.path.join(folder, name) for name in names if prefixes and name.startswith(prefixes)]
            names.clear()
    return leftovers
