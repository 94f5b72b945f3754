"""Services of hosted tools: options, server files, what a run is told, and the tools in this process."""

import argparse
import asyncio
import socket
from typing import ClassVar

import pytest
import yaml

import agentrl
from agentrl import Tool, ToolCall, ToolStatus
from agentrl.config.base import Section
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.schema import Config
from agentrl.config.toolserver import ToolServerConfig
from agentrl.core.child_process import reserve_port
from agentrl.core.errors import ConfigError, MissingError, UnknownNameError
from agentrl.core.registry import lookup_tool, register_tool, served_tools, tool_service
from agentrl.core.task import TaskSet
from agentrl.core.tool import ToolService, tool
from agentrl.core.types import ToolResult
from agentrl.runtime.run_tools import check_tools, service_options
from agentrl.runtime.run_tools import served_tools as served_in_run
from agentrl.sandbox.base import Job
from agentrl.sandbox.registry import backend_class
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.options import make_server_config
from agentrl.toolserver.service import HostedService, find_service, make_tools, needs_sandbox

FILE = '''
from agentrl import tool

@tool(timeout_s=1)
async def double(number: int) -> str:
    """Double it."""
    return str(2 * number)

nothing = 1
'''


class CellOptions(Section):
    shout: bool = False


class Cell(HostedTool):
    """Runs code, and says how often the session has asked."""

    async def call(self, session, call):
        number = session.state["cell"] = session.state.get("cell", 0) + 1
        outcome = await (await session.sandbox()).run(Job(call.id, code=call.arguments["code"]))
        return ToolResult(call.id, outcome.status, f"{number}: {outcome.stdout}")


class CellService(HostedService):
    name: ClassVar[str] = "test_cell"
    Options: ClassVar[type[Section]] = CellOptions
    needs_sandbox: ClassVar[bool] = True

    def create_tools(self, options):
        schema = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
        return [Cell(Tool("run_cell", "RUN IT!" if options.shout else "Run it.", schema))]


register_tool("test_cell")(CellService)


@register_tool("test_alone")
class AloneService(ToolService):
    name: ClassVar[str] = "test_alone"

    def add_arguments(self, parser):
        pass

    def serve(self, arguments):
        pass

    def launch_arguments(self, options, tasks, folder):
        return ()

    def client(self, url, options):
        raise NotImplementedError


@register_tool("test_triple")
@tool(timeout_s=1)
async def treble(number: int) -> str:
    """Treble it."""
    return str(3 * number)


@agentrl.register_env("test_cell_env")
class CellEnv(agentrl.Env):
    tool_names = ("test_cell", "test_triple")


class NoTasks(TaskSet):
    def split(self, name):
        return []


@pytest.fixture
def reference(tmp_path) -> str:
    (tmp_path / "doubling.py").write_text(FILE)
    return f"{tmp_path / 'doubling.py'}:double"


UNSAFE = {"sandbox": {"backend": "unsafe_subprocess"}}


def test_faults_of_options_are_told_by_key():
    service = CellService()
    for options, words in (
        (
            {"shuot": True},
            r"unknown key 'tools\.test_cell\.options\.shuot'\. Did you mean 'tools\.test_cell\.options\.shout'",
        ),
        ({"shout": "loud"}, r"tools\.test_cell\.options\.shout='loud'"),
        ({"client": {"retries": -1}}, r"tools\.test_cell\.options\.client\.retries=-1"),
        ({"server": {"max_session": 3}}, r"unknown key 'tools\.test_cell\.options\.server\.max_session'.*max_sessions"),
        ({"server": 3}, r"tools\.test_cell\.options\.server=3: this is a section"),
        ({"sandbox": {"limits": {"wall_s": 0}}}, r"sandbox\.limits\.wall_s=0"),
    ):
        for ask in (service.tools, service.check, lambda options: service.client("http://127.0.0.1:1", options)):
            with pytest.raises(ConfigError, match=words):
                ask(options)


def test_what_the_policy_may_call_follows_the_options():
    (plain,), (loud,) = CellService().tools({}), CellService().tools({"shout": True, **UNSAFE})
    assert (plain.name, plain.server, plain.description) == ("run_cell", "test_cell", "Run it.")
    assert loud.description == "RUN IT!"
    assert served_tools("test_cell") == (plain,)
    (trebling,) = served_tools("test_triple")
    assert (trebling.name, trebling.server) == ("treble", "test_triple")


def test_only_sandboxed_services_get_the_section(reference):
    assert CellService.sandboxed
    assert not find_service("test_triple").sandboxed
    config = Config.model_validate(
        {"env": {"name": "x"}, "tools": {"test_cell": {"options": {"shout": True}}}, **UNSAFE}
    )
    assert service_options(config, "test_triple", find_service("test_triple")) == {}
    assert service_options(config, "test_cell", find_service("test_cell"))["sandbox"]["backend"] == "unsafe_subprocess"
    config.tools["test_cell"].options["sandbox"] = {"backend": "docker"}
    with pytest.raises(ConfigError, match=r"tools\.test_cell\.options\.sandbox: all tools share"):
        service_options(config, "test_cell", find_service("test_cell"))


def test_a_server_file_and_settings(tmp_path, reference):
    file = tmp_path / "tools.yaml"
    file.write_text("server: {max_sessions: 3}\ntools:\n  test_cell: {shout: true}\n  test_triple:\n")
    config = make_server_config(
        file, ["test_cell.shout=false", "sandbox.limits.wall_s=2", "server.idle_timeout_s=5"], [reference]
    )
    assert (config.server.max_sessions, config.server.idle_timeout_s, config.sandbox.limits.wall_s) == (3, 5, 2)
    assert config.tools == {"test_cell": {"shout": False}, "test_triple": {}, reference: {}}
    assert [tool.spec.name for tool in make_tools(config)] == ["run_cell", "treble", "double"]
    assert needs_sandbox(config)
    assert not needs_sandbox(make_server_config(None, [], ["test_triple"]))


def test_faults_of_a_server_file(tmp_path):
    for overrides, tools, words in (
        (["pyhton.stateful=true"], ["test_cell"], r"unknown key 'pyhton'\..*Known: server, sandbox, tools"),
        (["sandbox.bakend=docker"], ["test_cell"], r"unknown key 'sandbox\.bakend'"),
        (["server.max_sessions=0"], ["test_cell"], r"server\.max_sessions=0"),
        ([], [], "there is no tool to serve"),
        (["test_triple"], ["test_cell"], "test_triple: name one tool; several are served by --config"),
    ):
        with pytest.raises(ConfigError, match=words):
            make_server_config(None, overrides, tools)
    with pytest.raises(ConfigError, match=r"unknown key 'tools\.test_cell\.loud'"):
        make_tools(make_server_config(None, ["test_cell.loud=1"], ["test_cell"]))
    with pytest.raises(ConfigError, match=r"tools\.test_alone: test_alone is not a hosted tool; start its server with"):
        make_tools(ToolServerConfig(tools={"test_alone": {}}))
    with pytest.raises(
        UnknownNameError, match=r"unknown tool 'test_cel' \(tools\.test_cel\)\. Did you mean 'test_cell'"
    ):
        make_tools(ToolServerConfig(tools={"test_cel": {}}))


def test_two_tools_of_one_name(reference):
    register_tool("test_double")(tool(name="double")(treble.function))
    with pytest.raises(ConfigError, match="there is a tool 'double' at this server already"):
        make_tools(ToolServerConfig(tools={"test_double": {}, reference: {}}))
    services = {"test_double": find_service("test_double"), reference: find_service(reference)}
    with pytest.raises(ConfigError, match=r"both have a tool 'double'"):
        served_in_run(Config(), services)


def test_what_is_no_tool(reference):
    with pytest.raises(ConfigError, match=r"and neither an agentrl\.Tool nor an agentrl\.ToolService"):
        find_service(reference.replace(":double", ":nothing"))
    with pytest.raises(ConfigError, match="has no 'trouble'"):
        find_service(reference.replace(":double", ":trouble"))
    with pytest.raises(ConfigError, match=r"plain agentrl\.Tool"):
        tool_service("test_triple")
    with pytest.raises(ConfigError, match="tool name 'test_cell' is taken"):
        register_tool("test_cell")(treble)
    assert isinstance(lookup_tool("test_cell"), CellService)


def test_a_run_starts_its_server_with_what_it_was_given(tmp_path):
    options = {"shout": True, "server": {"max_sessions": 9, "token": "secret"}, **UNSAFE}
    (argument,) = CellService().launch_arguments(options, NoTasks(), tmp_path / "new" / "test_cell")
    parser = argparse.ArgumentParser()
    CellService().add_arguments(parser)
    parsed = parser.parse_args([argument])
    assert parsed.config.stat().st_mode & 0o77 == 0
    config = make_server_config(parsed.config, parsed.overrides, ["test_cell"])
    assert config.tools == {"test_cell": {"shout": True}}
    assert (config.server.max_sessions, config.server.token) == (9, "secret")
    assert config.sandbox == SandboxConfig(backend="unsafe_subprocess")
    assert yaml.safe_load(parsed.config.read_text()).keys() == {"server", "sandbox", "tools"}


def check_sandbox(config: SandboxConfig) -> None:
    backend_class(config.backend).check(config)


def test_what_this_machine_lacks(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match=r"no bwrap here: install.*'bubblewrap'"):
        check_sandbox(SandboxConfig())
    (tmp_path / "bwrap").write_text("")
    (tmp_path / "bwrap").chmod(0o755)
    with pytest.raises(MissingError, match=r"sandbox\.python=python3"):
        check_sandbox(SandboxConfig())
    check_sandbox(SandboxConfig(python="/bin/sh"))
    path = tmp_path / "docker.sock"
    for address, env in ((f"unix://{path}", ""), (None, f"unix://{path}")):
        monkeypatch.setenv("DOCKER_HOST", env)
        with pytest.raises(MissingError, match=rf"no daemon listens at {path}.*sandbox\.docker_url"):
            check_sandbox(SandboxConfig(backend="docker", docker_url=address))
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        check_sandbox(SandboxConfig(backend="docker"))
    check_sandbox(SandboxConfig(backend="unsafe_subprocess"))


def test_a_run_is_checked_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    env = {"name": "test_cell_env"}
    with pytest.raises(MissingError, match="bwrap"):
        check_tools(Config.model_validate({"env": env}))
    check_tools(Config.model_validate({"env": env, **UNSAFE}))
    with reserve_port() as port:
        elsewhere = {"test_cell": {"url": f"http://127.0.0.1:{port}", "options": {}}}
        with pytest.raises(
            MissingError, match=r"^tools\.test_cell\.url=\S+ the tool server does not"
        ):  # but bwrap is not missed
            check_tools(Config.model_validate({"env": env, "tools": elsewhere}))
        elsewhere["test_cell"]["options"] = {"shut": True}
        with pytest.raises(ConfigError, match=r"tools\.test_cell\.options\.shut"):
            check_tools(Config.model_validate({"env": env, "tools": elsewhere}))


def test_tools_in_this_process_have_a_session_an_episode():
    client = CellService().local_client({}, UNSAFE)
    assert CellService().local_client({}, {**UNSAFE, "shout": False}) is client

    def run(number, episode_id="e", **arguments):
        return client.call(ToolCall(str(number), "run_cell", arguments), episode_id=episode_id)

    async def first_loop():
        other_call = run(1, "other", code="import os; print(os.path.exists('note'))")
        first, other_call = await asyncio.gather(run(1, code="open('note', 'w').write('kept')"), other_call)
        assert (first.content, other_call.content) == ("1: ", "1: False\n")

    async def second_loop():
        try:
            assert (await run(2, code="print(open('note').read())")).content == "2: kept\n"
            assert (await run(3, code="1 / 0")).status is ToolStatus.ERROR
            assert (await run(4, cod="")).status is ToolStatus.INVALID
            await client.close_session("e")
            await client.close_session("e")
            fresh = await run(1, code="print(open('note').read())")
            assert fresh.status is ToolStatus.ERROR
            assert fresh.content.startswith("1: ")
        finally:
            await client.aclose()
            await client.aclose()

    asyncio.run(first_loop())
    asyncio.run(second_loop())


def test_tools_in_this_process_need_what_their_server_would(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(MissingError, match="bwrap"):
        CellService().local_client({}, {})
