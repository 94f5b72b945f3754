"""Machines without a daemon: files in a dictionary, and commands that a function answers."""

from __future__ import annotations

import io
import posixpath
import tarfile
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from docker.errors import NotFound

from agentrl.config.containers import ContainersConfig
from agentrl.containers.archives import Download, DownloadError, check, pack
from agentrl.containers.grading import FACTS
from agentrl.containers.machine import Command, CommandResult
from agentrl.containers.spec import MachineSpec

Answer = Callable[["FakeMachine", Command], CommandResult | None]


class FakeMachine:
    """Implements what tools and grading use of `agentrl.containers.machine.Machine`."""

    def __init__(self, machine_id: str, spec: MachineSpec, files: Mapping[str, bytes], answer: Answer) -> None:
        self.id, self.spec = machine_id, spec
        self.container, self.client = f"container-{machine_id}", SimpleNamespace(url="unix:///no-daemon")
        self.files = dict(files)
        self.log: list[str] = []
        self.is_closed = self.is_adopted = False
        self.services: dict[str, FakeMachine] = {}
        self._answer = answer
        self._results: dict[str, CommandResult] = {}

    async def run(self, command: Command) -> CommandResult:
        if command.call_id in self._results:
            return self._results[command.call_id]
        text = command.command if isinstance(command.command, str) else " ".join(command.command)
        self.log.append(f"run {text}")
        result = self._answer(self, command) or _answer_tools(self, command)
        if command.call_id is not None:
            self._results[command.call_id] = result
        return result

    async def upload(self, files: Path | Mapping[str, bytes], path: str, **options: Any) -> None:
        self.log.append(f"upload {path}")
        if isinstance(files, Path):
            files = {str(file.relative_to(files)): file.read_bytes() for file in files.rglob("*") if file.is_file()}
        self.files |= {f"{path}/{name}": content for name, content in files.items()}

    async def upload_tar(self, tar: bytes, path: str) -> None:
        self.log.append("upload_tar")
        with tarfile.open(fileobj=io.BytesIO(tar)) as archive:
            for member in archive:
                file = archive.extractfile(member) if member.isreg() else None
                if file is not None:
                    self.files[posixpath.join(path, member.name)] = file.read()

    async def download(self, path: str, max_bytes: int = 2**20) -> Download:
        self.log.append(f"download {path}")
        if path in self.files:
            return check([_archive({posixpath.basename(path): self.files[path]})], max_bytes)
        inner = {
            name.removeprefix(f"{path}/"): content
            for name, content in self.files.items()
            if name.startswith(f"{path}/")
        }
        if not inner:
            raise DownloadError(f"no {path}") from NotFound("no such file")
        return check([pack(inner, posixpath.basename(path), (0, 0), None)], max_bytes)

    async def service(self, name: str) -> FakeMachine:
        return self.services[name]

    async def stop(self) -> None:
        self.log.append("stop")

    async def kill_all(self) -> None:
        self.log.append("kill_all")

    async def close(self) -> None:
        self.is_closed = True


def _archive(files: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in files.items():
            member = tarfile.TarInfo(name)
            member.size, member.mode = len(content), 0o644
            archive.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


def _answer_tools(machine: FakeMachine, command: Command) -> CommandResult:
    words = command.command
    if isinstance(words, tuple) and words[0] == "rm":
        machine.files = {
            path: content
            for path, content in machine.files.items()
            if not any(path == word or path.startswith(f"{word}/") for word in words[3:])
        }
    if words[:3] == ("/bin/sh", "-c", FACTS):
        return CommandResult(0, "/bin:::::\n" + "0\n0\n" * len(words[4:]))
    outputs = {"pwd -P": "/app\n", "pwd": "/app\n", "id -u && id -g": "0\n0\n"}
    return CommandResult(0, outputs.get(words, "") if isinstance(words, str) else "")


class FakeMachines:
    """Implements what tools use of `agentrl.containers.machines.Machines`; another one with ``there`` has the same machines."""

    def __init__(
        self, state: Path, files: Mapping[str, bytes], answer: Answer, there: dict[str, FakeMachine] | None = None
    ) -> None:
        self.config, self.owner = ContainersConfig(state=state), "tests"
        self.there = {} if there is None else there
        self.opened: list[FakeMachine] = []
        self._files, self._answer = files, answer

    async def start(self) -> None:
        pass

    async def open(self, spec: MachineSpec, key: str, *, beside: FakeMachine | None = None) -> FakeMachine:
        machine = self.there.get(key)
        if machine is not None and not machine.is_closed:
            machine.is_adopted = True
        else:
            machine = self.there[key] = FakeMachine(uuid.uuid4().hex, spec, self._files, self._answer)
        self.opened.append(machine)
        return machine

    async def leave(self) -> None:
        pass


def write_task(
    folder: Path,
    image: str,
    script: str,
    *,
    toml: str = "",
    tests: Mapping[str, str] = {},
    skills_dir: str | None = None,
) -> Path:
    """Write a task of one step, whose working folder is ``/app``."""
    (folder / "tests").mkdir(parents=True)
    (folder / "task.toml").write_text(
        f'schema_version = "1.4"\n{toml}\n[environment]\ndocker_image = "{image}"\nworkdir = "/app"\n'
        'network_mode = "no-network"\n' + ("" if skills_dir is None else f'skills_dir = "{skills_dir}"\n')
    )
    (folder / "instruction.md").write_text("Write 42 to answer.txt.\n")
    for name, text in {**tests, "test.sh": script}.items():
        (folder / "tests" / name).write_text(text)
    return folder
