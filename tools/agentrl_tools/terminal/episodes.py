"""Machines of episodes, which a server that was started again knows by its records."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from agentrl import Image, ToolCall, ToolResult, ToolStatus
from agentrl.config.containers import ContainersConfig
from agentrl.containers.grading import Grade, GradingMode, grade
from agentrl.containers.machine import Command, CommandResult, Machine, MachineEndedError
from agentrl.containers.machines import Machines, state_folder
from agentrl.containers.spec import MachineSpec
from agentrl.containers.task_folder import TaskFolder, load_task_folder
from agentrl.containers.task_steps import prepare_step
from agentrl.core.atomic_files import write_atomically
from agentrl.core.errors import SandboxFailure

from .mcp_servers import McpLimits, McpServers

RECORD_S = 604_800.0
"""Age of records that are removed, seconds."""
OpenSpec = Callable[[TaskFolder, int | None], Awaitable[MachineSpec]]
"""Returns what a task's machine is made from; with a step, what the machine of its tests is made from."""


@dataclass(slots=True)
class Record:
    """What is known of an episode's machine on disk."""

    folder: str
    """The task's."""
    machine: str
    """The machine's id."""
    step: int = 0
    """The step that is being played, from 0."""
    calls: list[list[str]] = field(default_factory=list)
    """Id and hash of each command that was begun, in order."""
    results: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Server and result of each call of an MCP server that has ended, by id; images as ``data:`` URLs."""
    grade: dict[str, Any] | None = None
    """What the last step's tests gave, for a run that was killed before it had recorded the end of the episode."""


class Episode:
    """An episode's machine and task. Its calls run one after the other.

    Args:
        machine: open.
        folder: of the task.
        record: of the episode.
        file: where the record is.
        limits: of calls of MCP servers.
    """

    def __init__(self, machine: Machine, folder: TaskFolder, record: Record, file: Path, limits: McpLimits) -> None:
        called = frozenset(result["server"] for result in record.results.values())
        self.mcp_servers = McpServers(folder, machine, limits, lost=called)
        self.machine = machine
        self.folder = folder
        self.record = record
        self.program_connects = False
        """Whether an agent program connects to the task's MCP servers, in place of this process."""
        self.lock = asyncio.Lock()
        self._file = file

    @property
    def user(self) -> str | None:
        """The agent's user in this step; None: the machine's."""
        return self.folder.steps[self.record.step].user

    async def run(self, command: Command) -> CommandResult:
        """Run a command that has a ``call_id``; the same one again gives its result, also if others followed it.

        Raises:
            SandboxFailure: the machine has run another command with this id, which the conversation has lost.
        """
        assert command.call_id is not None, "calls have ids"
        words = command.command if isinstance(command.command, tuple) else (command.command,)
        self._register(command.call_id, words)
        return await self.machine.run(command)

    async def call_tool(self, call: ToolCall) -> ToolResult:
        """Call a tool of an MCP server; the same call again gives its result.

        Raises:
            SandboxFailure: see `run`; also if an earlier server was killed in the call, whose effect is not known.
        """
        words = [json.dumps(dict(call.arguments), sort_keys=True)]
        if not self._register(call.id, words):
            recorded = self.record.results.get(call.id)
            if recorded is None:
                raise SandboxFailure(f"machine {self.machine.id} was left in call {call.id}, whose effect is not known")
            images = tuple(map(Image.from_data_url, recorded["images"]))
            return ToolResult(call.id, ToolStatus(recorded["status"]), recorded["content"], recorded["data"], images)
        result = await self.mcp_servers.call(call, self.user)
        self.record.results[call.id] = {
            "server": call.arguments["server"],
            "status": result.status.value,
            "content": result.content,
            "data": result.data,
            "images": [image.data_url for image in result.images],
        }
        self.save()
        return result

    def _register(self, call_id: str, words: Sequence[str]) -> bool:
        """Record a call before it is made; return whether it is a new one."""
        entry = [call_id, hashlib.sha256("\0".join(words).encode()).hexdigest()[:16]]
        calls = self.record.calls
        if entry in calls:
            return False
        if any(call_id == other_id for other_id, _ in calls):
            raise SandboxFailure(f"machine {self.machine.id} has run another command as call {call_id}")
        calls.append(entry)
        self.save()
        return True

    def check_calls(self, count: int) -> None:
        """Check that the machine has run as many commands as the conversation has.

        Raises:
            SandboxFailure: it has not.
        """
        if count != len(self.record.calls):
            raise SandboxFailure(
                f"machine {self.machine.id} has run {len(self.record.calls)} commands, and the conversation has {count}"
            )

    def save(self) -> None:
        """Write the record."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(self._file) as partial:
            partial.write_text(json.dumps(asdict(self.record)))

    async def close(self) -> None:
        """Remove the machine; of the record the grade is kept."""
        await self.mcp_servers.close()
        await self.machine.close()
        if self.record.grade is None:
            self._file.unlink(missing_ok=True)


class Episodes:
    """The episodes of a server.

    Args:
        machines: opens machines; connected by `start`.
        open_spec: see `OpenSpec`.
        mode: where tests run.
        limits: of calls of MCP servers.
    """

    def __init__(self, machines: Machines, open_spec: OpenSpec, mode: GradingMode, limits: McpLimits) -> None:
        self._machines = machines
        self._open_spec = open_spec
        self._mode = mode
        self._limits = limits
        self._open: dict[str, asyncio.Task[Episode]] = {}

    async def start(self) -> None:
        """Connect to the daemons, and remove old records.

        Raises:
            MissingError: none answers.
        """
        await self._machines.start()
        oldest = time.time() - RECORD_S
        for file in records_folder(self._machines.config, self._machines.owner).glob("*.json"):
            if file.stat().st_mtime < oldest:
                file.unlink(missing_ok=True)

    def recorded_grade(self, key: str) -> dict[str, Any] | None:
        """Return the grade of an episode whose last step was graded, whether or not its machine is there; None: it was not."""
        file = self._file(key)
        return Record(**json.loads(file.read_text())).grade if file.exists() else None

    async def begin(self, key: str, folder: Path) -> Episode:
        """Open the machine of a new episode, and prepare its first step.

        Raises:
            ConfigError: the folder is no valid task.
            MissingError, SandboxFailure: there is no machine.
        """
        return await self._opened(key, lambda: self._make(key, folder))

    async def find(self, key: str) -> Episode:
        """Return an episode that has begun, at this server or at one before it.

        Raises:
            SandboxFailure: its machine is gone.
        """
        return await self._opened(key, lambda: self._adopt(key))

    async def _opened(self, key: str, make: Callable[[], Awaitable[Episode]]) -> Episode:
        if key not in self._open:
            self._open[key] = asyncio.ensure_future(make())
        try:
            return await asyncio.shield(self._open[key])
        except BaseException:
            task = self._open.get(key)
            if task is not None and task.done() and (task.cancelled() or task.exception() is not None):
                self._open.pop(key, None)
            raise

    async def _make(self, key: str, path: Path) -> Episode:
        folder = await asyncio.to_thread(load_task_folder, path)
        machine = await self._machines.open(await self._open_spec(folder, None), key)
        episode = Episode(machine, folder, Record(str(path), machine.id), self._file(key), self._limits)
        try:
            await prepare_step(folder, 0, machine)
            episode.save()
        except BaseException:
            await asyncio.shield(episode.close())
            raise
        return episode

    async def _adopt(self, key: str) -> Episode:
        file = self._file(key)
        try:
            record = Record(**json.loads(file.read_text()))
        except FileNotFoundError:
            raise SandboxFailure(f"there is no machine {key}: its lease has ended, or another server has it") from None
        folder = await asyncio.to_thread(load_task_folder, Path(record.folder))
        machine = await self._machines.open(await self._open_spec(folder, None), key)
        if machine.id != record.machine:
            await machine.close()
            file.unlink(missing_ok=True)
            raise SandboxFailure(f"machine {record.machine} is gone: its lease has ended, or its daemon has lost it")
        return Episode(machine, folder, record, file, self._limits)

    async def grade(self, episode: Episode, step: int) -> Grade:
        """Run the tests of a step.

        Raises:
            GradingFailure, SandboxFailure, TaskError: see `agentrl.containers.grading.grade`.
        """

        async def open_clean() -> Machine:
            spec, key = await self._open_spec(episode.folder, step), f"{episode.machine.id}-tests-{step}"
            machine = await self._machines.open(spec, key, beside=episode.machine)
            if machine.is_adopted:  # of a server that was killed while it graded
                await machine.close()
                machine = await self._machines.open(spec, key, beside=episode.machine)
            return machine

        is_last = step == len(episode.folder.steps) - 1
        if is_last:
            await episode.mcp_servers.close()
        try:
            return await grade(episode.folder, step, episode.machine, open_clean, mode=self._mode, is_last=is_last)
        except MachineEndedError as error:
            if not error.is_by_policy:
                raise
            return Grade({}, forgeable=False, output=str(error), at_limit=True)

    async def next_step(self, episode: Episode, step: int) -> None:
        """Begin another step.

        Raises:
            TaskError: it cannot be prepared.
        """
        if episode.record.step < step:
            await prepare_step(episode.folder, step, episode.machine)
            episode.record.step = step
            episode.save()

    async def end(self, key: str) -> None:
        """Remove an episode's machine, if it has one."""
        task = self._open.pop(key, None)
        if task is not None:
            task.cancel()
            results = await asyncio.gather(task, return_exceptions=True)
            if isinstance(results[0], Episode):
                await results[0].close()

    async def close(self) -> None:
        """Leave the machines that are open to the next server, or to the end of their leases."""
        for task in self._open.values():
            if task.done() and not task.cancelled() and task.exception() is None:
                await task.result().mcp_servers.close()
        await self._machines.leave()

    def _file(self, key: str) -> Path:
        return record_file(self._machines.config, self._machines.owner, key)


def records_folder(config: ContainersConfig, owner: str) -> Path:
    """Return the folder of the records of an owner's episodes."""
    return state_folder(config) / "terminal" / owner


def record_file(config: ContainersConfig, owner: str, key: str) -> Path:
    """Return the file of the record of an episode."""
    return records_folder(config, owner) / f"{hashlib.sha256(key.encode()).hexdigest()[:32]}.json"
