"""Tools of an external MCP server as hosted tools."""

from __future__ import annotations

import asyncio
import base64
import json
import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from typing import Any, ClassVar

import mcp.types as types

from agentrl.config.base import Section
from agentrl.core.errors import ConfigError, MissingError, ToolFailure
from agentrl.core.extras import require
from agentrl.core.images import IMAGE_MARK, Image, without_marks
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import schema_problem
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.core.user_code import TimeLimitExceeded
from agentrl.toolserver.hosted_tool import HostedTool, ToolSession
from agentrl.toolserver.mcp.connection import McpConnection, McpOptions
from agentrl.toolserver.sandbox_tool import cut_middle
from agentrl.toolserver.service import HostedService

_log = logging.getLogger(__name__)


class McpService(HostedService):
    """All tools of an external MCP server, under their own names; each episode has an MCP session.

    For a run, an environment registers one, and offers its tools with ``served_tools("files")``::

        @register_tool("files")
        class FilesService(McpService):
            name = "files"
            command = "npx -y @modelcontextprotocol/server-filesystem /data"

    The file of a tool server names one without code: ``tools: {files: {mcp: {url: "http://…/mcp"}}}``.

    The command runs with the rights of the tool server and in no sandbox: the policy can do to this machine whatever its
    tools allow.
    """

    name: ClassVar[str] = "mcp"
    Options: ClassVar[type[Section]] = McpOptions
    command: ClassVar[str | tuple[str, ...]] = ()
    """The server's command, if the options name none."""
    url: ClassVar[str] = ""
    """The server's address, if the options name none."""

    def create_tools(self, options: McpOptions) -> Sequence[HostedTool]:
        """Return the server's tools; it is started briefly to list them.

        Raises:
            ConfigError: no server or two are configured, or a tool of the server has an invalid schema.
            MissingError: the program does not exist, the server does not answer, or with images Pillow is not installed.
        """
        if not options.command and not options.url:
            options = options.model_copy(update={"command": self.command, "url": self.url})
        key = f"tools.{self.name}"
        options.check(key)
        if options.images:
            require("PIL", f"{key}.images=true")
        source = McpSource(options, key)
        return [McpTool(source, tool) for tool in _cached_tools(options.model_dump_json(), key)]


@lru_cache(maxsize=64)
def _cached_tools(options: str, key: str) -> tuple[types.Tool, ...]:
    """List a server's tools, once in this process. In a thread, because this one may run an event loop."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(lambda: asyncio.run(_list_tools(McpOptions.model_validate_json(options), key))).result()


async def _list_tools(options: McpOptions, key: str) -> tuple[types.Tool, ...]:
    connection = McpConnection(options, key)
    try:
        return await connection.tools()
    except ToolFailure as error:
        raise MissingError(str(error)) from error
    finally:
        await connection.close()


class McpSource:
    """The MCP sessions with one server: one for each episode that calls, or one for all.

    Args:
        options: of the server.
        key: their configuration key, for messages.
    """

    def __init__(self, options: McpOptions, key: str) -> None:
        self.options = options
        self.key = key
        self._shared: McpConnection | None = None
        self._open: set[McpConnection] = set()
        self._warned = False

    def warn(self) -> None:
        """Log once that the command runs unsandboxed."""
        if self.options.command and not self._warned:
            self._warned = True
            _log.warning(
                "%s: the MCP server %s runs UNSANDBOXED, as this user: its tools act on this machine",
                self.key,
                self.options.display_name(),
            )

    def connection(self, session: ToolSession) -> McpConnection:
        """Return the session's connection, which may still be opening. One that died is not replaced before the session's
        end, except the one that all sessions share.
        """
        if self.options.shared:
            if self._shared is None or not self._shared.alive:
                self._shared = self._new()
            return self._shared
        connection = session.state.get(self._name)
        if connection is None:
            connection = session.state[self._name] = self._new()
        assert isinstance(connection, McpConnection)
        return connection

    def _new(self) -> McpConnection:
        connection = McpConnection(self.options, self.key)
        self._open.add(connection)
        connection.when_ended(lambda: self._open.discard(connection))
        return connection

    async def end(self, session: ToolSession) -> None:
        """Close the session's connection."""
        connection = session.state.pop(self._name, None)
        if connection is not None:
            await connection.close()

    async def close(self) -> None:
        """Close all connections."""
        await asyncio.gather(*(connection.close() for connection in self._open))
        self._shared = None

    @property
    def _name(self) -> str:
        return f"connection of {self.key}"


class McpTool(HostedTool):
    """One tool of an MCP server.

    Args:
        source: the server.
        tool: as the server describes it.

    Raises:
        ConfigError: its schema is invalid.
    """

    def __init__(self, source: McpSource, tool: types.Tool) -> None:
        self._source = source
        self._remote_name = tool.name
        name = source.options.prefix + tool.name
        if problem := schema_problem(tool.input_schema):
            raise ConfigError(f"{source.key}: no call of the tool {tool.name!r} could fit: {problem}")
        description = tool.description or tool.title or f"{tool.name} of {source.key}"
        super().__init__(Tool(name, description, tool.input_schema, timeout_s=source.options.timeout_s))

    async def start(self) -> None:
        """Log that the command is not sandboxed."""
        self._source.warn()

    async def call(self, session: ToolSession, call: ToolCall) -> ToolResult:
        """Forward the call. An error of the tool and a timeout are results.

        Raises:
            ToolFailure: the server does not start, died, or reported an error of the server.
        """
        limit = self._source.options.timeout_s
        try:
            result = await self._source.connection(session).call(self._remote_name, call.arguments)
        except TimeLimitExceeded:
            return ToolResult(call.id, ToolStatus.TIMEOUT, f"{call.name} did not answer in {limit:g} s")
        except ValueError as error:
            return ToolResult(call.id, ToolStatus.INVALID, f"{call.name}: {error}")
        options = self._source.options
        return from_mcp(call, result, options.max_chars, reads_images=options.images)

    async def end(self, session: ToolSession) -> None:
        """Close the session's connection."""
        await self._source.end(session)

    async def close(self) -> None:
        """Close all connections."""
        await self._source.close()


def from_mcp(call: ToolCall, result: types.CallToolResult, max_chars: int, *, reads_images: bool = False) -> ToolResult:
    """Return an MCP result as a `ToolResult`: texts joined, images in their places, the structured content as data.

    Content that is not carried is named in the text.

    Args:
        call: which it answers.
        result: of the server.
        max_chars: of the text. The middle of a longer one is left out, and the images follow it.
        reads_images: carry images.
    """
    blocks = [_read_block(block, images=reads_images) for block in result.content]
    data: Any = result.structured_content
    if not blocks and data is not None:
        blocks = [json.dumps(data, ensure_ascii=False)]
    images = tuple(block for block in blocks if isinstance(block, Image))
    texts = [block for block in blocks if isinstance(block, str) and block]
    if images:
        texts = [without_marks(text) for text in texts]
    if images and sum(map(len, texts)) <= max_chars:
        escaped = iter(texts)
        content = "\n".join(IMAGE_MARK if isinstance(block, Image) else next(escaped) for block in blocks if block)
    else:
        text = cut_middle("\n".join(texts), max_chars)
        content = "\n".join(filter(None, (text, IMAGE_MARK * len(images)))) or "[no output]"
    return ToolResult(call.id, ToolStatus.ERROR if result.is_error else ToolStatus.OK, content, data, images)


def _read_block(block: types.ContentBlock, *, images: bool) -> str | Image:
    """Return the text or image of a block of content; a text that names it if it is neither.

    Args:
        block: of the result.
        images: whether images are carried.
    """
    match block:
        case types.TextContent():
            return block.text
        case types.EmbeddedResource(resource=types.TextResourceContents() as resource):
            return resource.text
        case types.ImageContent() if images:
            return _read_image(block.data, f"{block.type} of type {block.mime_type}")
        case types.EmbeddedResource(resource=types.BlobResourceContents(mime_type=str(kind)) as resource) if (
            images and kind.startswith("image/")
        ):
            return _read_image(resource.blob, f"{kind} at {resource.uri}")
        case types.EmbeddedResource(resource=resource):
            return f"[{resource.mime_type or 'a file'} at {resource.uri} left out: {_readable(images)}]"
        case types.ResourceLink():
            return f"[{block.name}: {block.uri}]"
        case _:
            return f"[{block.type} of type {block.mime_type} left out: {_readable(images)}]"


def _readable(images: bool) -> str:
    return "only text and images can be read" if images else "only text can be read"


def _read_image(data: str, name: str) -> Image | str:
    """Return an image that can be decoded, or a text that names it."""
    try:
        image = Image(base64.b64decode(data, validate=True))
        image.to_pil()
    except ValueError as error:
        return f"[{name} left out: {error}]"
    return image
