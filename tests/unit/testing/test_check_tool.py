"""The contract check of tools that run in the process, hosted ones among them."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from agentrl import ToolCall, ToolResult, ToolStatus, tool
from agentrl.core.tool import Tool
from agentrl.testing import ContractError, check_tool
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.service import HostedService, find_service


@tool(timeout_s=5)
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@tool(timeout_s=5)
async def undocumented(a: int) -> str:
    return str(a)


@tool(timeout_s=5, parameters={"type": "object"})
async def lax(**arguments: Any) -> str:
    """Take anything."""
    return str(arguments)


@tool(timeout_s=5)
async def forgetful(a: int) -> ToolResult:
    """Answer another call."""
    return ToolResult("other", ToolStatus.OK, str(a))


@tool(timeout_s=5)
async def binary(a: int) -> ToolResult:
    """Answer with bytes."""
    return ToolResult("good", ToolStatus.OK, "", data=bytes(a))


schemaless = replace(add, name="schemaless", parameters={"type": "nothing"})


def test_a_good_tool_passes() -> None:
    check_tool(add, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (undocumented, "undocumented needs a docstring"),
        (lax, "lax must refuse an unknown argument"),
        (forgetful, "forgetful must answer the call 'good', it answered 'other'"),
        (binary, "data must be JSON-able"),
        (schemaless, "no call of the tool 'schemaless' could fit: its JSON Schema is invalid"),
    ],
)
def test_a_fault_is_named(broken: Tool, fault: str) -> None:
    with pytest.raises(ContractError, match=fault):
        check_tool(broken, {"a": 1})


def test_arguments_that_fail_are_told() -> None:
    with pytest.raises(ContractError, match=r"must answer \{'a': 1\} with status ok"):
        check_tool(add, {"a": 1})


IN_TEN_LINES = """
from agentrl import tool

@tool(timeout_s=5)
async def add(a: int, b: int) -> str:
    "Add two numbers."
    return str(a + b)
"""


def test_a_tool_in_ten_lines_is_served_and_keeps_the_contract(tmp_path: Path) -> None:
    (tmp_path / "adding.py").write_text(IN_TEN_LINES)
    service = find_service(f"{tmp_path}/adding.py:add")
    check_tool(service, {"a": 1, "b": 2})
    with pytest.raises(ContractError, match=r"must answer \{'a': 1\} with status ok"):
        check_tool(service, {"a": 1})


class Note(HostedTool):
    """Counts its calls: one that is sent again must not count."""

    count = 0

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        self.count += 1
        return ToolResult(call.id, ToolStatus.OK, str(self.count))


STRICT = {"type": "object", "properties": {"text": {"type": "string"}}, "additionalProperties": False}


class NoteService(HostedService):
    name: ClassVar[str] = "test_note"
    spec = Tool("note", "Note it.", STRICT)

    def create_tools(self, options: object) -> Sequence[HostedTool]:
        return [Note(self.spec)]


def test_a_hosted_tool_needs_no_server_to_be_checked() -> None:
    check_tool(NoteService(), {"text": "x"})
    check_tool(NoteService(), {"text": "x"}, name="note")


def test_faults_of_a_hosted_tool_are_named() -> None:
    class Undescribed(NoteService):
        spec = Tool("note", "", STRICT)

    class Lax(NoteService):
        spec = Tool("note", "Note it.", {"type": "object"})

    class Elsewhere(NoteService):
        def tools(self, options: object) -> tuple[Tool, ...]:
            return (self.spec,)

    class Greedy(NoteService):
        def add_arguments(self, parser: argparse.ArgumentParser) -> None:
            parser.add_argument("--port")

    for service, words in (
        (Undescribed(), "note needs a docstring"),
        (Lax(), "note must refuse an unknown argument"),
        (Elsewhere(), "test_note must say server='test_note' of 'note', not ''"),
        (Greedy(), "--host and --port are there already"),
    ):
        with pytest.raises(ContractError, match=words):
            check_tool(service, {"text": "x"})
    with pytest.raises(ContractError, match="test_note has no tool 'nota'; it has: note"):
        check_tool(NoteService(), {}, name="nota")
