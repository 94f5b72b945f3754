"""A server's tools over the Model Context Protocol (streamable HTTP), at ``/mcp``.

An MCP session is a session of the server, with its sandbox: opened by the first call, closed by the
protocol's DELETE, or after ``server.idle_timeout_s``. A result's status is in its ``_meta``.
"""

from __future__ import annotations

import base64
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from importlib.metadata import version
from itertools import zip_longest
from typing import Any

import mcp.types as types
import orjson
from mcp.server.context import ServerRequestContext
from mcp.server.lowlevel import Server
from mcp.server.streamable_http_manager import StreamableHTTPSessionManager
from mcp.types.version import HANDSHAKE_PROTOCOL_VERSIONS
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route
from starlette.types import Message, Receive, Scope, Send

from agentrl.core.extras import DISTRIBUTION
from agentrl.core.images import IMAGE_MARK
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver import request_limits
from agentrl.toolserver.server.app import MCP_PATH
from agentrl.toolserver.server.errors import Refusal
from agentrl.toolserver.server.sessions import Sessions

STATUS = "agentrl/status"
"""Key in a result's ``_meta``: the `ToolStatus`."""
DATA = "agentrl/data"
"""Key in a result's ``_meta``: the result's data. Not ``structuredContent``, which clients show to their model."""
_SESSION = "mcp-session-id"
_VERSION = "mcp-protocol-version"


@asynccontextmanager
async def mcp_routes(sessions: Sessions) -> AsyncIterator[list[BaseRoute]]:
    """Yield the routes that serve the tools of ``sessions``; at the end all MCP connections are closed."""
    bridge = _Bridge(sessions)
    server: Server[Any] = Server(
        "agentrl", version=version(DISTRIBUTION), on_list_tools=bridge.list_tools, on_call_tool=bridge.call_tool
    )
    manager = StreamableHTTPSessionManager(
        server,
        json_response=True,
        session_idle_timeout=sessions.config.idle_timeout_s,
        max_request_body_size=request_limits.BODY_BYTES,
        max_sessions=request_limits.MCP_SESSIONS,
    )
    async with manager.run():
        yield [Route(MCP_PATH, _Endpoint(manager, bridge))]


class _Bridge:
    """Maps MCP requests to tool calls, and MCP sessions to sessions of the server."""

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._session_ids: OrderedDict[str, str] = OrderedDict()
        """The id of the server's session, by that of the MCP session."""
        self._numbers = itertools.count(1)

    async def list_tools(
        self, context: ServerRequestContext[Any], params: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        specs = [tool.spec for tool in self._sessions.tools.values()]
        tools = [
            types.Tool(name=spec.name, description=spec.description, input_schema=dict(spec.parameters))
            for spec in specs
        ]
        return types.ListToolsResult(tools=tools)

    async def call_tool(
        self, context: ServerRequestContext[Any], params: types.CallToolRequestParams
    ) -> types.CallToolResult:
        """Call a tool; failures are results too, so that a model can read them."""
        assert isinstance(context.request, Request)
        call = ToolCall(f"mcp-{next(self._numbers)}", params.name, params.arguments or {})
        try:
            session_id = await self._session(context.request.headers[_SESSION])
            answer = await self._sessions.find(session_id).call(call)
        except Refusal as refusal:
            return _as_mcp(ToolResult(call.id, ToolStatus.UNAVAILABLE, str(refusal)))
        return _as_mcp(answer.result)

    async def _session(self, mcp_session_id: str) -> str:
        """Return the server's session; a closed one is not replaced, because its files are lost."""
        if mcp_session_id not in self._session_ids:
            session = await self._sessions.open(f"mcp/{mcp_session_id}")
            self._session_ids[mcp_session_id] = session.id
            while len(self._session_ids) > request_limits.CLOSED_SESSIONS:
                self._session_ids.popitem(last=False)
        return self._session_ids[mcp_session_id]

    async def end(self, mcp_session_id: str) -> None:
        """Close the server's session of an MCP session that has ended."""
        session_id = self._session_ids.pop(mcp_session_id, None)
        if session_id is not None:
            with suppress(Refusal):  # closed for idleness already
                await self._sessions.close(session_id)


def _as_mcp(result: ToolResult) -> types.CallToolResult:
    meta: dict[str, Any] = {STATUS: result.status.value}
    if result.data is not None:
        meta[DATA] = result.data
    return types.CallToolResult(content=_blocks(result), is_error=result.status is not ToolStatus.OK, _meta=meta)


def _blocks(result: ToolResult) -> list[types.ContentBlock]:
    """Return the content of a result: its texts and images, in their order."""
    if not result.images:
        return [types.TextContent(text=result.content)]
    blocks: list[types.ContentBlock] = []
    for text, image in zip_longest(result.content.split(IMAGE_MARK), result.images):
        if text:
            blocks.append(types.TextContent(text=text))
        if image is not None:
            data = base64.b64encode(image.data).decode("ascii")
            blocks.append(types.ImageContent(data=data, mime_type=image.media_type))
    return blocks


class _Endpoint:
    """The SDK's ASGI application, which also closes sessions and refuses protocol versions without sessions."""

    def __init__(self, manager: StreamableHTTPSessionManager, bridge: _Bridge) -> None:
        self._manager = manager
        self._bridge = bridge

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        requested_version = request.headers.get(_VERSION)
        if requested_version is not None and requested_version not in HANDSHAKE_PROTOCOL_VERSIONS:
            await (await _refuse_version(request, requested_version))(scope, receive, send)
            return
        succeeded = await self._handle(scope, receive, send)
        if succeeded and request.method == "DELETE":
            await self._bridge.end(request.headers[_SESSION])

    async def _handle(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Serve a request and return whether it succeeded."""
        status = 500

        async def watch(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        await self._manager.handle_request(scope, receive, watch)
        return status < 400


async def _refuse_version(request: Request, requested_version: str) -> Response:
    """Return the error that makes a client choose a protocol version with sessions, without which files could not stay."""
    try:
        body = orjson.loads(await request.body())
    except ValueError:
        body = None
    supported = types.UnsupportedProtocolVersionErrorData(
        supported=list(HANDSHAKE_PROTOCOL_VERSIONS), requested=requested_version
    )
    error = {
        "jsonrpc": "2.0",
        "id": body.get("id") if isinstance(body, dict) else None,
        "error": {
            "code": types.UNSUPPORTED_PROTOCOL_VERSION,
            "message": f"protocol version {requested_version} is not supported: it has no sessions",
            "data": supported.model_dump(mode="json"),
        },
    }
    return Response(orjson.dumps(error), 400, media_type="application/json")
