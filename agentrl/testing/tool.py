"""Contract check of tools, for their authors' tests."""

from __future__ import annotations

import argparse
import asyncio
import json
import uuid
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from agentrl.core.child_process import reserve_port
from agentrl.core.errors import ToolFailure
from agentrl.core.tool import Tool, ToolClient, ToolService
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.testing.contract import check_schemas, require
from agentrl.toolserver.service import HostedService

_NO_SUCH_ARGUMENT = {"no_such_argument_": 1}


def check_tool(
    tool: Tool | ToolService,
    arguments: Mapping[str, Any],
    *,
    url: str | None = None,
    options: Mapping[str, Any] | None = None,
    name: str | None = None,
) -> None:
    """Check a tool against the contract. Not for use inside an event loop.

    A `Tool` has a name, a description and a valid JSON Schema; it answers ``arguments`` with status ``OK`` and refuses
    others with ``INVALID``. A `ToolService` does not redefine ``--host`` and ``--port``, and sets ``server`` of
    the tools that it offers to policies; its client at ``url`` does as a `Tool` does, gives a call that is sent again the same
    answer, and raises `ToolFailure` where no server is. A `HostedService` can do without ``url``: it is run in this
    process, each episode in a separate session and sandbox.

    Example::

        check_tool(DiceService(), {"sides": 6}, options={"sandbox": {"backend": "bubblewrap"}})

    Args:
        tool: what to check.
        arguments: arguments of a call that must succeed.
        url: address of a running server; needed for a `ToolService` that is no `HostedService`.
        options: ``tools.NAME.options``, for a sandboxed tool with the section ``sandbox``.
        name: which tool of the service to call; by default the one named as the service is, else its first.

    Raises:
        ContractError: a rule is violated; the message has what the tool does and what it should.
    """
    require(bool(tool.name), f"{type(tool).__name__} must have a name")
    if isinstance(tool, Tool):
        _check_description(tool)
        asyncio.run(_check_answers(tool.name, partial(_run_checked, tool), arguments))
        return
    options = dict(options or {})
    _check_options(tool)
    tools_by_name = {offered_tool.name: offered_tool for offered_tool in tool.tools(options)}
    for offered_tool in tools_by_name.values():
        _check_description(offered_tool)
        require(
            offered_tool.server == tool.name,
            f"{tool.name} must say server={tool.name!r} of {offered_tool.name!r}, not {offered_tool.server!r}",
        )
    tool_name = name or (tool.name if tool.name in tools_by_name or not tools_by_name else next(iter(tools_by_name)))
    require(
        tool_name in {*tools_by_name, tool.name},
        f"{tool.name} has no tool {tool_name!r}; it has: {', '.join(tools_by_name)}",
    )
    if url is None and isinstance(tool, HostedService):
        asyncio.run(_check_client(tool.local_client({}, options), tool_name, arguments))
        return
    require(url is not None, f"the tool service {tool.name!r} needs a running server to be checked: pass url=")
    asyncio.run(_check_service(tool, tool_name, arguments, str(url), options))


async def _run_checked(tool: Tool, call: ToolCall) -> ToolResult:
    fault = tool.schema_fault(call.arguments)
    return ToolResult(call.id, ToolStatus.INVALID, fault) if fault else await tool.run(call)


def _check_options(service: ToolService) -> None:
    parser = argparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--host")
    parser.add_argument("--port")
    try:
        service.add_arguments(parser)
    except argparse.ArgumentError as error:
        require(False, f"{service.name}.add_arguments: {error}; --host and --port are there already", error)


def _check_description(tool: Tool) -> None:
    require(bool(tool.description.strip()), f"{tool.name} needs a docstring: the policy reads its first paragraph")
    check_schemas(tool.name, [tool])


async def _check_answers(
    name: str, run: Callable[[ToolCall], Awaitable[ToolResult]], arguments: Mapping[str, Any]
) -> None:
    answer = await run(ToolCall("good", name, arguments))
    require(
        answer.status is ToolStatus.OK, f"{name} must answer {dict(arguments)!r} with status ok, it gave {answer!r}"
    )
    require(answer.call_id == "good", f"{name} must answer the call 'good', it answered {answer.call_id!r}")
    try:
        json.dumps(answer.data)
    except TypeError as error:
        require(False, f"{name}: a result's data must be JSON-able: {error}", error)
    refusal = await run(ToolCall("bad", name, {**arguments, **_NO_SUCH_ARGUMENT}))
    require(
        refusal.status is ToolStatus.INVALID,
        f"{name} must refuse an unknown argument with status invalid, it gave {refusal!r}",
    )
    require(bool(refusal.content), f"{name} must say what is wrong with a call, its content is empty")


async def _check_client(client: ToolClient, name: str, arguments: Mapping[str, Any]) -> None:
    episode_id = f"check-{uuid.uuid4().hex[:8]}"  # a server remembers the calls of an earlier check

    async def run(call: ToolCall) -> ToolResult:
        return await client.call(call, episode_id=episode_id)

    try:
        await _check_answers(name, run, arguments)
        call = ToolCall("again", name, arguments)
        first, second = [await run(call) for _ in range(2)]
        require(first == second, f"{name} must answer a call that is sent again as before: {first!r}, {second!r}")
        await client.close_session(episode_id)
        await client.close_session(episode_id)
        episode_id += "-2"
        await _check_answers(name, run, arguments)
        await client.close_session(episode_id)
    finally:
        await client.aclose()


async def _check_service(
    service: ToolService, name: str, arguments: Mapping[str, Any], url: str, options: dict[str, Any]
) -> None:
    await _check_client(service.client(url, options), name, arguments)
    if isinstance(service, HostedService):
        options = {**options, "client": {**options.get("client", {}), "retries": 0}}
    with reserve_port() as port:
        unreachable = service.client(f"http://127.0.0.1:{port}", options)
        try:
            answer = await unreachable.call(ToolCall("lost", name, arguments), episode_id="lost")
            require(False, f"{service.name} must raise ToolFailure where no server is, it gave {answer!r}")
        except ToolFailure:
            pass  # as it should
        finally:
            await unreachable.aclose()
