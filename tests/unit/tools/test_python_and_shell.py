"""Both tools in one sandbox: what a policy reads. The sandbox is none here; its walls have tests of their own."""

import asyncio
from collections.abc import Sequence

import pytest
from agentrl_tools.python import PythonService, PythonTool
from agentrl_tools.python.tool import without_fence
from agentrl_tools.shell import ShellService, ShellTool

from agentrl.config.sandbox import SandboxConfig, SandboxLimits
from agentrl.core.errors import ConfigError
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.sandbox.unsafe_subprocess import UnsafeBackend
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.sandbox_tool import REPLACED
from tests.unit.toolserver.tool_sessions import LoneSession

ARGUMENT = {"python": "code", "shell": "command"}


class Turn(LoneSession):
    """A session over a backend, asynchronously."""

    def __init__(self, backend: UnsafeBackend) -> None:
        super().__init__(lambda number: self.opened[number])
        self._backend = backend

    async def sandbox(self):
        if not self.opened or not self.opened[-1].alive:
            self.opened.append(await self._backend.open(self.id))
        return self.opened[-1]


def play(tools: Sequence[HostedTool], *calls: tuple[str, str], end_before: int | None = None) -> list[ToolResult]:
    """Run calls ``(tool, text)`` in one session; the sandbox is ended before call number ``end_before``."""
    known_tool_by_name = {tool.spec.name: tool for tool in tools}

    async def run() -> list[ToolResult]:
        results = []
        async with UnsafeBackend(SandboxConfig(limits=SandboxLimits(wall_s=20, output_kb=64))) as backend:
            session = Turn(backend)
            for number, (name, text) in enumerate(calls):
                if number == end_before:
                    await session.opened[-1].close()
                call = ToolCall(f"c{number}", name, {ARGUMENT[name]: text})
                assert not known_tool_by_name[name].spec.schema_fault(call.arguments)
                results.append(await known_tool_by_name[name].call(session, call))
        return results

    return asyncio.run(run())


def test_python_answers_with_what_is_printed() -> None:
    good, quiet, bad, leftovers = play(
        [PythonTool()],
        ("python", "print(6 * 7)"),
        ("python", "6 * 7"),
        ("python", "def f(x):\n    return 1 / x\nprint('before')\nf(0)"),
        ("python", "import sys; sys.exit(3)"),
    )
    assert (good.status, good.content, good.call_id) == (ToolStatus.OK, "42", "c0")
    assert quiet.content == "[no output]"
    assert bad.status is ToolStatus.ERROR
    assert bad.content.startswith("before\nTraceback (most recent call last):\n")
    assert bad.content.endswith("ZeroDivisionError: division by zero\n[exit status 1]")
    assert "return 1 / x" in bad.content
    assert leftovers.content == "[exit status 3]"


def test_files_stay_and_variables_only_where_they_are_wanted() -> None:
    calls = ("python", "x = 5; open('note', 'w').write('kept')"), ("python", "print(open('note').read()); print(x)")
    _, stateless = play([PythonTool()], *calls)
    _, stateful = play([PythonTool(stateful=True)], *calls)
    assert stateless.content.startswith("kept\nTraceback")
    assert "NameError" in stateless.content
    assert stateful.content == "kept\n5"
    assert "do not stay" in PythonTool().spec.description
    assert "stay for later calls too" in PythonTool(stateful=True).spec.description


def test_python_and_shell_see_the_same_files() -> None:
    _, shell, python = play(
        [PythonTool(), ShellTool()],
        ("python", "open('a.txt', 'w').write('from python')"),
        ("shell", "cat a.txt; echo ' and shell' >> a.txt"),
        ("python", "print(open('a.txt').read())"),
    )
    assert shell.content == "from python"
    assert python.content == "from python and shell"


def test_shell_tells_its_exit_status_and_has_bash() -> None:
    many, bad, missing_program = play(
        [ShellTool()],
        ("shell", "for i in 1 2; do echo $i; done\nx=(a b); echo ${#x[@]} $0"),
        ("shell", "echo out; echo err >&2; exit 7"),
        ("shell", "no-such-program 'quoted \"twice\"'"),
    )
    assert (many.status, many.content) == (ToolStatus.OK, "1\n2\n2 bash")
    assert (bad.status, bad.content) == (ToolStatus.ERROR, "out\nerr\n[exit status 7]")
    assert bad.data["exit_code"] == 7
    assert missing_program.content.endswith("no-such-program: command not found\n[exit status 127]")


def test_time_and_length_are_bounded_by_options() -> None:
    tools = [PythonTool(timeout_s=0.3, max_chars=100), ShellTool(timeout_s=0.3, max_chars=100)]
    slow, long, sleepy = play(
        tools,
        ("python", "print('a', flush=True)\nwhile True: pass"),
        ("python", "print('x' * 500)"),
        ("shell", "sleep 60"),
    )
    assert (slow.status, slow.content) == (ToolStatus.TIMEOUT, "a\n[timed out after 0.3 s]")
    assert long.content == f"{'x' * 50}\n[… 400 characters left out …]\n{'x' * 50}"
    assert (sleepy.status, sleepy.content) == (ToolStatus.TIMEOUT, "[timed out after 0.3 s]")


def test_the_policy_is_told_when_its_files_are_gone() -> None:
    calls = [("shell", "echo kept > note; echo done"), ("python", "import os; print(os.listdir())"), ("shell", "ls")]
    _, rollout, rollout_after = play([PythonTool(), ShellTool()], *calls, end_before=1)
    assert rollout.content == f"{REPLACED}\n[]"
    assert rollout_after.content == "[no output]"


def test_text_that_is_no_text_is_the_calls_fault() -> None:
    results = play(
        [PythonTool(), ShellTool()], ("python", "print('\ud800')"), ("shell", "echo \udfff"), ("python", "print(1)")
    )
    assert [result.status for result in results] == [ToolStatus.INVALID, ToolStatus.INVALID, ToolStatus.OK]


def test_a_null_character_ends_the_call_alone() -> None:
    python, shell, rollout_after = play(
        [PythonTool(), ShellTool()], ("python", "a\0b"), ("shell", "a\0b"), ("python", "print(1)")
    )
    assert "null bytes" in python.content
    assert "null byte" in shell.content
    assert rollout_after.content == "1"


@pytest.mark.parametrize(
    ("written", "code"),
    [
        ("```python\nprint(1)\n```", "print(1)"),
        ("```\nprint(1)\nprint(2)\n```\n", "print(1)\nprint(2)"),
        ("\n  ```py\r\nprint(1)\r\n```", "print(1)"),
        ("~~~ python\nprint(1)\n~~~", "print(1)"),
        ("```python\nif 1:\n    print(1)\n```", "if 1:\n    print(1)"),
        ("````\nx = '''```'''\n````", "x = '''```'''"),
        ("print(1)", "print(1)"),
        ("x = '''\n```\na\n```\n'''", "x = '''\n```\na\n```\n'''"),
        ("```python\nprint(1)", "```python\nprint(1)"),
        ("```python\n```", ""),
    ],
)
def test_a_fence_around_the_code_is_no_code(written: str, code: str) -> None:
    assert without_fence(written) == code


def test_services_say_what_they_offer_and_refuse_unknown_options() -> None:
    (python,) = PythonService().tools({"stateful": True})
    (shell,) = ShellService().tools({})
    assert (python.server, shell.server) == ("python", "shell")
    assert PythonService.sandboxed
    assert ShellService.sandboxed
    with pytest.raises(ConfigError, match="max_chars"):
        PythonService().tools({"max_chars": 3})
    with pytest.raises(ConfigError, match="statefull"):
        PythonService().tools({"statefull": True})
