"""The contract check of tools that run in the process."""

from typing import Any

import pytest

from agentrl import ToolResult, ToolStatus, tool
from agentrl.testing import ContractError, check_tool
from agentrl.tool import Tool


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


@tool(timeout_s=5, parameters={"type": "nothing"})
async def schemaless(a: int) -> str:
    """Have no schema."""
    return str(a)


def test_a_good_tool_passes() -> None:
    check_tool(add, {"a": 1, "b": 2})


@pytest.mark.parametrize(
    ("broken", "fault"),
    [
        (undocumented, "undocumented needs a docstring"),
        (lax, "lax must refuse an unknown argument"),
        (forgetful, "forgetful must answer the call 'good', it answered 'other'"),
        (binary, "data must be JSON-able"),
        (schemaless, "parameters are no JSON Schema"),
    ],
)
def test_a_fault_is_named(broken: Tool, fault: str) -> None:
    with pytest.raises(ContractError, match=fault):
        check_tool(broken, {"a": 1})


def test_arguments_that_fail_are_told() -> None:
    with pytest.raises(ContractError, match=r"must answer \{'a': 1\} with status ok"):
        check_tool(add, {"a": 1})
