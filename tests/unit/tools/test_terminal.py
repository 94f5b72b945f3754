"""The service ``terminal`` on machines without a daemon: what the policy reads, and what outlives a server."""

import asyncio
import base64
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, cast

import mcp.types as types
import pytest
import yaml
from agentrl_tools.terminal import BashTool, Episodes, TerminalOptions, TerminalService, TerminalTool, episodes
from agentrl_tools.terminal.bash import as_result
from agentrl_tools.terminal.episodes import Episode, Record, record_file
from agentrl_tools.terminal.mcp_servers import McpLimits, McpServers
from PIL import Image as pil

from agentrl.config.containers import ContainersConfig
from agentrl.config.toolserver import ServerConfig
from agentrl.containers.machine import Command, CommandResult
from agentrl.containers.machine_access import MachineAccess
from agentrl.containers.machines import Machines
from agentrl.containers.spec import MachineSpec
from agentrl.containers.task_folder import TaskFolder, load_task_folder
from agentrl.core.errors import ToolFailure
from agentrl.core.images import IMAGE_MARK, load_image
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.server.sessions import Sessions
from tests.fake_daemon import fake_daemon
from tests.fake_machine import FakeMachine, FakeMachines, write_task

KEY = "episode"
LIMITS = McpLimits(timeout_s=9, max_chars=100)
PICTURE = load_image(pil.new("RGB", (2, 3), "red"))


def answer(machine: FakeMachine, command: Command) -> CommandResult | None:
    text = command.command[-1] if isinstance(command.command, tuple) else command.command
    if text == "/tests/test.sh":
        machine.files["/logs/verifier/reward.json"] = b'{"reward": 1}'
    return CommandResult(0, f"did {text}") if text.startswith("do") else None


async def open_spec(folder: TaskFolder, step: int | None) -> MachineSpec:
    return MachineSpec(image=folder.config.environment.docker_image or "")


class Server:
    """A server of the service; another one with the same machines is one that was started again."""

    def __init__(self, state: Path, machines: dict[str, FakeMachine], limits: McpLimits = LIMITS) -> None:
        self.machines = FakeMachines(state, {"/app/a.txt": b"a"}, answer, machines)
        self.episodes = Episodes(cast(Machines, self.machines), open_spec, "task", limits)
        tools = [TerminalTool(self.episodes), BashTool(self.episodes, timeout_s=9, max_chars=100)]
        self.sessions = Sessions(None, tools, ServerConfig())

    async def call(self, tool: str, name: str, arguments: dict[str, Any], key: str = KEY) -> ToolResult:
        session = await self.sessions.open("episode")
        return (await session.call(ToolCall(f"{key}-{name}", tool, arguments))).result

    async def begin(self, task: Path) -> ToolResult:
        return await self.call("terminal", "open", {"action": "open", "folder": str(task)})


def play(tmp_path: Path, episode: Any) -> None:
    task = write_task(tmp_path / "task", "image", "echo")
    machines: dict[str, FakeMachine] = {}
    asyncio.run(episode(task, lambda: Server(tmp_path / "state", machines), machines))


def test_a_machine_is_opened_used_graded_and_closed(tmp_path: Path) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        first = server()
        data = (await first.begin(task)).data
        assert (data["instruction"], data["steps"]) == ("Write 42 to answer.txt.\n", 1)
        access = MachineAccess.model_validate(data["machine"])
        assert (access.machine, access.user, access.timeout_s) == (machines[KEY].id, None, None)
        result = await first.call("bash", "1", {"command": "do it"})
        assert (result.status, result.content) == (ToolStatus.OK, "did do it")
        grade = await first.call("terminal", "grade-0", {"action": "grade", "step": 0, "rewards": [], "calls": 1})
        assert grade.data["reward"] == 1.0
        assert grade.data["instruction"] is None
        session = await first.sessions.open("episode")
        await first.sessions.close(session.id)
        assert all(machine.is_closed for machine in machines.values())
        again = server()
        repeated = await again.call("terminal", "grade-0", {"action": "grade", "step": 0, "rewards": [], "calls": 1})
        assert repeated.data == grade.data, "for a run that was killed before it knew"
        assert not again.machines.opened
        lost = await again.call("terminal", "grade-0b", {"action": "grade", "step": 0, "rewards": [], "calls": 2})
        assert lost.status is ToolStatus.SANDBOX_FAILURE

    play(tmp_path, episode)


def test_a_server_that_is_started_again_goes_on_with_the_machine_and_runs_no_command_twice(tmp_path: Path) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        first = server()
        await first.begin(task)
        await first.call("bash", "1", {"command": "do it"})
        second = server()
        assert (await second.call("bash", "1", {"command": "do it"})).content == "did do it"
        assert (await second.call("bash", "2", {"command": "do more"})).content == "did do more"
        assert [line.rpartition(" do ")[2] for line in machines[KEY].log if " do " in line] == ["it", "more"]
        third = server()
        graded = await third.call("terminal", "grade-0", {"action": "grade", "step": 0, "rewards": [], "calls": 2})
        assert graded.status is ToolStatus.OK

    play(tmp_path, episode)


def test_a_grade_that_was_cut_off_leaves_no_machine_that_the_next_one_uses(tmp_path: Path) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        first = server()
        await first.begin(task)
        spec = MachineSpec(image="image")
        half_used = await first.machines.open(spec, f"{machines[KEY].id}-tests-0")
        graded = await server().call("terminal", "grade-0", {"action": "grade", "step": 0, "rewards": [], "calls": 0})
        assert graded.status is ToolStatus.OK
        assert half_used.is_closed
        assert not half_used.log, "nothing is graded in it"

    play(tmp_path, episode)


def test_a_conversation_that_has_lost_a_command_does_not_go_on(tmp_path: Path) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        await server().begin(task)
        await server().call("bash", "1", {"command": "do it"})
        await server().call("bash", "2", {"command": "do more"})
        result = await server().call("bash", "2", {"command": "do other"})
        assert result.status is ToolStatus.SANDBOX_FAILURE
        assert "has run another command" in result.content
        again = await server().call("bash", "1", {"command": "do it"})
        assert again.content == "did do it", "an earlier turn that is sampled again has its recorded result"
        assert [line.rpartition(" do ")[2] for line in machines[KEY].log if " do " in line] == ["it", "more"]
        graded = await server().call("terminal", "grade-0", {"action": "grade", "step": 0, "rewards": [], "calls": 1})
        assert graded.status is ToolStatus.SANDBOX_FAILURE
        assert "has run 2 commands, and the conversation has 1" in graded.content

    play(tmp_path, episode)


MCP_TASK = """[[environment.mcp_servers]]
name = "notes"
transport = "stdio"
command = "notes"
"""


class Notes(McpServers):
    """The servers of an episode: one that notes what it is told."""

    notes: ClassVar[list[str]] = []

    async def call(self, call: ToolCall, user: str | None) -> ToolResult:
        if "notes" in self._lost:
            return await super().call(call, user)
        self.notes.append(call.arguments["arguments"]["text"])
        if self.notes[-1] == "stop":
            raise ToolFailure("the server of tools ends in the call")
        return ToolResult(call.id, ToolStatus.OK, f"{len(self.notes)} notes", {"count": len(self.notes)})


def test_a_call_of_an_mcp_server_is_made_once_and_its_loss_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(episodes, "McpServers", Notes)
    monkeypatch.setattr(Notes, "notes", [])
    task = write_task(tmp_path / "task", "image", "echo", toml=MCP_TASK)
    machines: dict[str, FakeMachine] = {}

    async def note(server: Server, number: int, text: str) -> ToolResult:
        arguments = {"action": "call", "server": "notes", "tool": "add", "arguments": {"text": text}}
        return await server.call("terminal", str(number), arguments)

    async def episode() -> None:
        first = Server(tmp_path / "state", machines)
        await first.episodes.begin(KEY, task)
        assert (await note(first, 1, "a")).data == {"count": 1}
        assert (await first.call("bash", "2", {"command": "do it"})).content == "did do it"
        again = Server(tmp_path / "state", machines)
        assert (await note(again, 1, "a")).content == "1 notes", "of the record"
        other = await note(Server(tmp_path / "state", machines), 1, "b")
        assert "has run another command" in other.content
        lost = await note(again, 3, "b")
        assert lost.status is ToolStatus.SANDBOX_FAILURE
        assert "has lost what it had in memory" in lost.content
        assert Notes.notes == ["a"]
        assert (await note(first, 4, "stop")).status is ToolStatus.UNAVAILABLE
        left = await note(Server(tmp_path / "state", machines), 4, "stop")
        assert "was left in call" in left.content

    asyncio.run(episode())


class PictureServer:
    """A connection to an MCP server whose tool answers with a picture between two lines."""

    def __init__(self) -> None:
        self.calls = 0

    async def call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        self.calls += 1
        data = base64.b64encode(PICTURE.data).decode()
        picture = types.ImageContent(data=data, mime_type="image/png")
        return types.CallToolResult(content=[types.TextContent(text="a"), picture, types.TextContent(text="b")])


@pytest.mark.parametrize("mcp_images", [True, False])
def test_pictures_of_an_mcp_server_are_results_and_in_the_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mcp_images: bool
) -> None:
    """They reach the policy if the option says so, also from the record of a call that was made."""
    connection = PictureServer()

    async def connect(*_: object) -> PictureServer:
        return connection

    monkeypatch.setattr(McpServers, "_connect", connect)
    limits = McpLimits(timeout_s=9, max_chars=100, reads_images=mcp_images)
    task = write_task(tmp_path / "task", "image", "echo", toml=MCP_TASK)
    machines: dict[str, FakeMachine] = {}
    arguments = {"action": "call", "server": "notes", "tool": "look", "arguments": {}}

    async def look() -> ToolResult:
        server = Server(tmp_path / "state", machines, limits)
        return await server.call("terminal", "1", arguments)

    async def episode() -> None:
        await Server(tmp_path / "state", machines, limits).episodes.begin(KEY, task)
        results = [await look(), await look()]
        assert connection.calls == 1
        for result in results:
            assert result.images == ((PICTURE,) if mcp_images else ())
            text = IMAGE_MARK if mcp_images else "[image of type image/png left out: only text can be read]"
            assert result.content == f"a\n{text}\nb"

    asyncio.run(episode())


def test_pictures_of_mcp_servers_are_an_option_of_the_service() -> None:
    for options, reads_images in (({}, False), ({"mcp_images": True}, True)):
        terminal, _ = TerminalService().create_tools(TerminalOptions(**options))
        assert isinstance(terminal, TerminalTool)
        assert terminal._episodes._limits.reads_images is reads_images


def test_an_agent_program_is_told_the_tasks_mcp_servers_and_connects_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DOCS_TOKEN", "abc")
    docs = """[[environment.mcp_servers]]
name = "docs"
transport = "streamable-http"
url = "http://127.0.0.1:8000/mcp"
headers = { Authorization = "Bearer ${DOCS_TOKEN}" }
"""
    task = write_task(tmp_path / "task", "image", "echo", toml=MCP_TASK + docs)

    async def episode() -> None:
        server = Server(tmp_path / "state", {})
        opened = await server.call("terminal", "open", {"action": "open", "folder": str(task), "connect": False})
        assert opened.data["tools"] == [], "nothing was connected to"
        assert MachineAccess.model_validate(opened.data["machine"]).mcp_servers == {
            "notes": {"type": "stdio", "command": "notes", "args": []},
            "docs": {
                "type": "http",
                "url": "http://127.0.0.1:8000/mcp",
                "headers": {"Authorization": "Bearer abc"},
            },
        }
        grade = await server.call("terminal", "grade-0", {"action": "grade", "step": 0, "rewards": []})
        assert grade.data["machine"] is None

    asyncio.run(episode())


def test_a_machine_that_is_gone_is_a_failure_and_no_new_machine(tmp_path: Path) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        assert "there is no machine" in (await server().call("bash", "1", {"command": "do it"})).content
        await server().begin(task)
        machines.clear()
        result = await server().call("bash", "1", {"command": "do it"})
        assert result.status is ToolStatus.SANDBOX_FAILURE
        assert "is gone" in result.content
        assert all(machine.is_closed for machine in machines.values())

    play(tmp_path, episode)


def test_a_server_that_stops_leaves_the_machines_of_its_episodes(tmp_path: Path) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        first = server()
        await first.begin(task)
        await first.sessions.stop()
        assert not machines[KEY].is_closed
        assert (await server().call("bash", "1", {"command": "do it"})).content == "did do it"

    play(tmp_path, episode)


def test_machines_of_a_killed_run_that_no_episode_takes_up_are_removed(tmp_path: Path) -> None:
    service, folder = TerminalService(), tmp_path / "tools"
    with TemporaryDirectory(prefix="agentrl-fake-") as sockets, fake_daemon(Path(sockets) / "docker.sock") as daemon:
        hosts = [daemon.url, f"unix://{sockets}/nobody.sock"]
        options = {"containers": {"hosts": hosts, "state": str(tmp_path / "state")}}
        service.launch_arguments(options, cast(Any, None), folder)
        config = ContainersConfig(hosts=(daemon.url,), state=tmp_path / "state")
        owner = (folder / "owner").read_text()
        spec = MachineSpec(image="image", network="no-network")
        task = write_task(tmp_path / "task", "image", "echo")

        async def play_and_die() -> None:
            for name, keys in {owner: ("a1", "b2"), "another-run": ("a1",)}.items():
                machines = Machines(config, name)
                await machines.start()
                for key in keys:
                    machine = await machines.open(spec, key)
                    Episode(
                        machine,
                        load_task_folder(task),
                        Record(str(task), machine.id),
                        record_file(config, name, key),
                        LIMITS,
                    ).save()
                await machines.open(spec, f"{machine.id}-tests-0", beside=machine)
                await machines.leave()

        asyncio.run(play_and_die())
        assert len(daemon.containers) == 5
        count = service.remove_left(options, folder, lambda keys: {key for key in keys if key == "b2"})
        assert count == 2, "of a1, and of the tests of b2"
        labels = [container["Labels"] for container in daemon.containers.values()]
        held = [(entry["agentrl.owner"], entry["agentrl.key"]) for entry in labels]
        assert held[0] == (owner, "b2")
        assert [name for name, _ in held] == [owner, "another-run", "another-run"]
        assert not record_file(config, owner, "a1").exists()
        assert record_file(config, owner, "b2").exists()
        daemon.containers.clear()


@pytest.mark.parametrize(
    ("result", "status", "content"),
    [
        (CommandResult(0, "a\n"), ToolStatus.OK, "a"),
        (CommandResult(0, ""), ToolStatus.OK, "[no output]"),
        (CommandResult(2, "a\n"), ToolStatus.ERROR, "a\n[exit status 2]"),
        (
            CommandResult(None, "a", timed_out=True),
            ToolStatus.TIMEOUT,
            "a\n[stopped after 9 s, with all that it has started]",
        ),
        (CommandResult(None, "a", flooded=True), ToolStatus.OUTPUT_CUT, "a\n[stopped, since it printed without end]"),
        (
            CommandResult(None, "", timed_out=True, restarted=True),
            ToolStatus.TIMEOUT,
            "[stopped after 9 s, with all that it has started]\n[all processes of the machine were stopped]",
        ),
    ],
)
def test_what_the_policy_reads(result: CommandResult, status: ToolStatus, content: str) -> None:
    read = as_result(ToolCall("1", "bash", {}), result, 9, 100)
    assert (read.status, read.content) == (status, content)


def test_the_middle_of_long_output_is_left_out() -> None:
    read = as_result(ToolCall("1", "bash", {}), CommandResult(0, "a" * 500 + "z" * 500), 9, 100)
    assert read.content.startswith("a" * 50)
    assert read.content.endswith("z" * 50)
    assert "900 characters left out" in read.content
    assert read.data["is_cut"]


@pytest.mark.parametrize("command", ["a\0b", "\ud800"])
def test_commands_that_no_program_takes_are_invalid(tmp_path: Path, command: str) -> None:
    async def episode(task: Path, server: Any, machines: dict[str, FakeMachine]) -> None:
        first = server()
        await first.begin(task)
        tool = BashTool(first.episodes, timeout_s=9, max_chars=100)
        session = await first.sessions.open("episode")
        assert (
            await tool.call(session, ToolCall(f"{KEY}-1", "bash", {"command": command}))
        ).status is ToolStatus.INVALID

    play(tmp_path, episode)


def test_the_policy_gets_bash_alone_and_a_run_names_the_owner(tmp_path: Path) -> None:
    service = TerminalService()
    assert [(tool.name, tool.server) for tool in service.tools({})] == [("bash", "terminal")]
    for _ in range(2):
        service.launch_arguments({"grading": "shared"}, cast(Any, None), tmp_path)

    options = yaml.safe_load((tmp_path / "server.yaml").read_text())["tools"]["terminal"]
    assert options["owner"] == (tmp_path / "owner").read_text()
    assert options["grading"] == "shared"
    assert TerminalOptions(owner=options["owner"]).owner != TerminalOptions().owner
