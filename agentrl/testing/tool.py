"""The contract of tools, for their authors' tests."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import jsonschema

from agentrl.errors import ToolFailure
from agentrl.process import free_port
from agentrl.testing.contract import require
from agentrl.tool import Tool, ToolService
from agentrl.types import ToolCall, ToolResult, ToolStatus

_NO_SUCH_ARGUMENT = {"no_such_argument_": 1}


def check_tool(
    tool: Tool | ToolService,
    arguments: Mapping[str, Any],
    *,
    url: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> None:
    """Check that a tool keeps the contract. Not for use inside an event loop.

    A `Tool` has a name, a description and a valid JSON Schema; it answers ``arguments`` with status ``OK`` and refuses
    others with ``INVALID``. A `ToolService` adds options that leave ``--host`` and ``--port`` alone; its client at
    ``url`` does the same, gives a call that is sent again the same answer, and raises `ToolFailure` where no server is.

    Args:
        tool: what to check.
        arguments: arguments of a call that must succeed.
        url: address of a running server; needed for a `ToolService`.
        options: ``tools.NAME.options`` for the client.

    Raises:
        ContractError: what the tool does, and what it should.
    """
    require(bool(tool.name), f"{type(tool).__name__} must have a name")
    if isinstance(tool, Tool):
        _check_description(tool)
        asyncio.run(_check_answers(tool.name, tool.run, arguments))
        return
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--host")
    parser.add_argument("--port")
    try:
        tool.add_arguments(parser)
    except argparse.ArgumentError as error:
        require(False, f"{tool.name}.add_arguments: {error}; --host and --port are there already", error)
    require(url is not None, f"the tool service {tool.name!r} needs a running server to be checked: pass url=")
    asyncio.run(_check_service(tool, arguments, str(url), options or {}))


def _check_description(tool: Tool) -> None:
    require(bool(tool.description.strip()), f"{tool.name} needs a docstring: the policy reads its first paragraph")
    try:
        jsonschema.Draft202012Validator.check_schema(dict(tool.parameters))
    except jsonschema.SchemaError as error:
        require(False, f"{tool.name}: parameters are no JSON Schema: {error.message}", error)


async def _check_answers(
    name: str, run: Callable[[ToolCall], Awaitable[ToolResult]], arguments: Mapping[str, Any]
) -> None:
    good = await run(ToolCall("good", name, arguments))
    require(good.status is ToolStatus.OK, f"{name} must answer {dict(arguments)!r} with status ok, it gave {good!r}")
    require(good.call_id == "good", f"{name} must answer the call 'good', it answered {good.call_id!r}")
    try:
        json.dumps(good.data)
    except TypeError as error:
        require(False, f"{name}: a result's data must be JSON-able: {error}", error)
    bad = await run(ToolCall("bad", name, {**arguments, **_NO_SUCH_ARGUMENT}))
    require(
        bad.status is ToolStatus.INVALID, f"{name} must refuse an unknown argument with status invalid, it gave {bad!r}"
    )
    require(bool(bad.content), f"{name} must say what is wrong with a call, its content is empty")


async def _check_service(
    service: ToolService, arguments: Mapping[str, Any], url: str, options: Mapping[str, Any]
) -> None:
    client = service.client(url, options)
    try:
        await _check_answers(service.name, lambda call: client.call(call, episode_id="check"), arguments)
        call = ToolCall("again", service.name, arguments)
        first, second = [await client.call(call, episode_id="check") for _ in range(2)]
        require(
            first == second, f"{service.name} must answer a call that is sent again as before: {first!r}, {second!r}"
        )
        await client.close_session("check")
    finally:
        await client.aclose()
    nobody = service.client(f"http://127.0.0.1:{free_port()}", options)
    try:
        answer = await nobody.call(ToolCall("lost", service.name, arguments), episode_id="check")
        require(False, f"{service.name} must raise ToolFailure where no server is, it gave {answer!r}")
    except ToolFailure:
        pass  # as it should
    finally:
        await nobody.aclose()
