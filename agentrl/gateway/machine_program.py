"""Agent programs in the machines of container tasks, where they work on the task, and from where they reach the gateway.

This process listens on the loopback of the machine, whose network namespace it enters, so that a machine without a network
reaches the gateway and nothing else, and nothing inside can be changed to reach more. The tool server that has opened the machine
keeps it alive, grades what was done in it, and removes it.
"""

from __future__ import annotations

import asyncio
import json
import posixpath
import shutil
import tempfile
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from typing_extensions import override

from agentrl.config.agent import CONTAINER, FILE, ProgramConfig, command_words
from agentrl.containers.allowlist import listen_inside
from agentrl.containers.machine import Command, CommandResult, Machine, MachineEndedError
from agentrl.containers.machine_access import MachineAccess, inspect_machine
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import EnvironmentFailure, MissingError, SandboxFailure
from agentrl.gateway.harnesses.base import Harness
from agentrl.gateway.harnesses.recipes import HARNESSES
from agentrl.gateway.program_process import (
    ANSWER_BYTES,
    OUTPUT_LINES,
    ProgramInput,
    RunningProgram,
    describe_exit,
    program_variables,
)
from agentrl.gateway.server import Gateway

if TYPE_CHECKING:
    from agentrl.gateway.harnesses.installed import Program

_PROGRAM_S = 86_400.0
"""Wall time of a program, seconds: the episode has its own limit."""
_LOOK_S = 60.0
"""Wall time of commands that prepare a program or read its files."""
_NO_PROXY = dict.fromkeys(("NO_PROXY", "no_proxy"), "127.0.0.1,localhost,::1")
_IDENTITY = "id -u && id -g && pwd -P"
_START = 'exec "$@" < "$0/prompt.txt" > "$0/output.txt"'
"""Shell text that starts a program; its first argument is the program's folder."""
_QUIET = 'exec "$@" 2>/dev/null'


class MachinePrograms:
    """Starts an agent program in the machines of its tasks.

    Args:
        config: of the program; its sandbox is ``container``.
        gateway: where it requests its turns.
    """

    def __init__(self, config: ProgramConfig, gateway: Gateway) -> None:
        self._config, self._gateway = config, gateway
        self._setting = f"{config.key}.sandbox={CONTAINER}"
        self._programs: dict[str, Program] = {}
        """Where the harness is installed, by image."""

    @asynccontextmanager
    async def running(
        self, access: Mapping[str, object] | None, program_input: ProgramInput, key: str
    ) -> AsyncIterator[MachineProgram]:
        """Start the program in a machine, and yield it; at the end of the context it does not run any more.

        Args:
            access: to the machine, from the environment.
            program_input: what the program reads.
            key: of the session.

        Raises:
            MissingError: the machine has no such program, or this process cannot listen in it.
            SandboxFailure: the machine or its daemon is lost.
            EnvironmentFailure: the environment has opened no machine.
        """
        if access is None:
            raise EnvironmentFailure(f"{self._setting}: the environment has opened no machine (info['machine'])")
        machine_access = MachineAccess.model_validate(access)
        state = Path(tempfile.mkdtemp(prefix="agentrl-agent-"))
        try:
            async with machine_access.connect(state) as machine:
                process, image = await inspect_machine(machine)
                listener = await asyncio.to_thread(
                    listen_inside, process, machine.container, (LOOPBACK, 0), self._setting
                )
                url = f"http://{LOOPBACK}:{listener.getsockname()[1]}"
                async with self._gateway.serving_on(listener):
                    program = MachineProgram(machine, machine_access, self._config)
                    await program.start(*await self._prepare(program, image, program_input, url, key))
                    try:
                        yield program
                    finally:
                        await program.kill()
        finally:
            await asyncio.to_thread(shutil.rmtree, state, ignore_errors=True)

    async def _prepare(
        self, program: MachineProgram, image: str, program_input: ProgramInput, url: str, key: str
    ) -> tuple[list[str], dict[str, str]]:
        """Write what the program reads to the machine, and return its words and variables."""
        config = self._config
        home = await program.make_home(f"/tmp/agentrl-{key[-8:]}")
        variables = program_variables(config, program_input, url, key, f"{home}/task.json") | _NO_PROXY
        files = {"task.json": program_input.task_json, "prompt.txt": program_input.prompt}
        if program.mcp_servers:
            self._check_mcp(program.mcp_servers)
            files["mcp.json"] = json.dumps({"mcpServers": program.mcp_servers})
            variables["AGENTRL_MCP_CONFIG"] = f"{home}/mcp.json"
        if config.harness is None:
            words = [
                f"{home}/files/{word}" if config.files is not None and Path(config.files, word).is_file() else word
                for word in command_words(config.command or "", config.key, resolve=False)
            ]
            await self._check_command(program, words[0], image)
        else:
            harness = HARNESSES[config.harness]
            values = {**variables, "HOME": home, "AGENTRL_PROMPT": program_input.prompt}
            if image not in self._programs:
                self._programs[image] = await self._find_harness(program, harness, image)
            words, harness_files = harness.place(self._programs[image], values)
            files |= harness_files
            variables = {"HOME": home, **harness.env, **variables}
        await program.write_home(files, config.files)
        return words, variables

    def _check_mcp(self, servers: Collection[str]) -> None:
        """Check that the program can be given MCP servers.

        Raises:
            MissingError: it is a harness, none of which gets any.
        """
        if self._config.harness is not None:
            key = self._config.key
            raise MissingError(
                f"{key}.harness={self._config.harness}: the task has MCP servers ({', '.join(servers)}), and programs that "
                f"{key}.harness names get none. Set {key}.command to a program that reads the file $AGENTRL_MCP_CONFIG, such "
                'as sh -c \'exec claude --print --mcp-config "$AGENTRL_MCP_CONFIG" "$AGENTRL_PROMPT"\''
            )

    def _where(self, program: MachineProgram, image: str) -> str:
        name = program.machine.spec.image or image
        return f"in the machine of the task, which is made from the image {name}"

    async def _check_command(self, program: MachineProgram, word: str, image: str) -> None:
        found = await program.look(("/bin/sh", "-c", 'command -v "$0"', word), self._path())
        if found.exit_code != 0:
            raise MissingError(
                f"{self._config.key}.command={self._config.command}: there is no program {word} {self._where(program, image)}. "
                f"Install it in the image, or name a folder that has it with {self._config.key}.files"
            )

    def _path(self) -> dict[str, str]:
        """Return the folders of programs, as variables; none: those of the image."""
        path = self._config.env.get("PATH")
        return {} if path is None else {"PATH": path}

    async def _find_harness(self, program: MachineProgram, harness: Harness, image: str) -> Program:
        """Return where the harness is installed in a machine.

        Raises:
            MissingError: it is not installed there, or does not start.
        """
        setting, where = f"{self._config.key}.harness={self._config.harness}", self._where(program, image)
        argv = ("/bin/sh", "-c", _QUIET, "sh", "python3", *harness.query())
        outcome = await program.look(argv, {**self._path(), **harness.env})
        if outcome.exit_code != 0:
            raise MissingError(
                f"{setting} cannot be looked for {where}, which needs Python 3.9 or newer as python3: status {outcome.exit_code}"
            )
        install_hint = f". If it is elsewhere in it, set {self._config.key}.env.PATH"
        return harness.read_answer(outcome.output, setting, where, install_hint=install_hint)


class MachineProgram(RunningProgram):
    """A program in the machine of its task. Its files stay there, for the tests.

    Args:
        machine: of the task.
        access: to it.
        config: of the program.
    """

    def __init__(self, machine: Machine, access: MachineAccess, config: ProgramConfig) -> None:
        self.machine = machine
        """Machine of the task."""
        self.cwd = None
        self.ended = asyncio.get_running_loop().create_future()
        self.limit_s = access.timeout_s
        self.mcp_servers = access.mcp_servers
        """MCP servers of the task; see `MachineAccess.mcp_servers`."""
        self._user, self._config = access.user, config
        self._home = self._owner = self._workdir = ""
        self._running: asyncio.Task[None] | None = None
        self._answer = self._output_end = ""

    async def look(self, argv: tuple[str, ...], env: Mapping[str, str] | None = None) -> CommandResult:
        """Run a short command as the agent's user."""
        command = Command(argv, user=self._user, env=env or {}, wall_s=_LOOK_S, output_bytes=2 * ANSWER_BYTES)
        return await self.machine.run(command)

    async def make_home(self, path: str) -> str:
        """Set the folder for what the program reads and writes outside of the task's folder, and return it.

        Raises:
            SandboxFailure: the machine has no such user or working folder.
        """
        result = await self.look(("/bin/sh", "-c", _IDENTITY))
        lines = result.output.splitlines()
        if result.exit_code != 0 or len(lines) != 3:
            raise SandboxFailure(
                f"user {self._user or 'of the image'} cannot run commands in machine {self.machine.id}: {result.output[-500:]}"
            )
        self._home, self._owner, self._workdir = path, f"{lines[0]}:{lines[1]}", lines[2]
        return path

    async def write_home(self, files: Mapping[str, str], folder: Path | None) -> None:
        """Write what the program reads.

        Args:
            files: texts by their path in the folder of the program.
            folder: of this machine, written to ``files`` in it; None: none.
        """
        contents = {name: text.encode() for name, text in files.items()}
        await self.machine.upload(contents, self._home, owner=self._owner)
        if folder is not None:
            await self.machine.upload(folder, f"{self._home}/files", owner=self._owner)

    async def start(self, words: list[str], variables: Mapping[str, str]) -> None:
        """Start the program; it ends with this process, by whatever cause.

        Args:
            words: that start it.
            variables: in addition to those of the machine.
        """
        argv = ("/bin/sh", "-c", _START, self._home, *words)
        command = Command(
            argv, user=self._user, env=variables, wall_s=_PROGRAM_S, output_bytes=2**16, ends_with_caller=True
        )
        self._running = asyncio.create_task(self._run(command), name="program-in-machine")

    async def _run(self, command: Command) -> None:
        try:
            result = await self.machine.run(command)
            fault = await self._read_end(result)
        except asyncio.CancelledError:
            self.ended.set_result("was ended")
        except MachineEndedError:
            self.ended.set_result("")  # the grading decides whose fault it is
        except SandboxFailure as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(fault)

    async def _read_end(self, result: CommandResult) -> str:
        """Read the answer, and return what is wrong with how the program ended, in words; empty if nothing is."""
        kind = self._config.answer
        if kind != "message":
            name = (
                f"{self._home}/output.txt"
                if kind == "output"
                else posixpath.join(self._workdir, kind.removeprefix(FILE))
            )
            answer = await self.look(("head", "-c", str(ANSWER_BYTES), "--", name))
            self._answer = answer.output if answer.exit_code == 0 else ""
        if result.exit_code == 0:
            return ""
        end = await self.look(("tail", "-n", str(OUTPUT_LINES), "--", f"{self._home}/output.txt"))
        self._output_end = f"{end.output if end.exit_code == 0 else ''}\n{result.output}"
        if result.flooded:
            return "was ended, since it printed without end"
        return "was ended by a limit of its machine" if result.exit_code is None else describe_exit(result.exit_code)

    @override
    async def kill(self) -> None:
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)
        if not self.ended.done():
            self.ended.set_result("was ended")

    @override
    async def close(self) -> None:
        await self.kill()

    @override
    def output(self) -> str:
        return self._answer

    @override
    def read_file(self, name: str) -> str:
        return self._answer

    @override
    def output_end(self) -> str:
        text = "\n".join(self._output_end.splitlines()[-OUTPUT_LINES:]).strip()
        return f" The end of its output:\n{text}" if text else ""
