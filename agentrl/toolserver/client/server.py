"""One tool server as its clients see it: requests, retries, and what its answers mean."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx
import orjson

from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import ConfigError, EnvironmentFailure, SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.toolserver.client.http import PROBE_S, Wire

_log = logging.getLogger(__name__)

TOKEN_VARIABLE = "AGENTRL_TOOLS_TOKEN"
"""Environment variable with the bearer token, for servers and clients that are configured with none."""
PROCESS = secrets.token_hex(8)
"""Stands before episode ids, which come again from run to run: a server that several runs use must not give one the
session of another. All clients of a process share it, so that an episode's tools at one server share its session."""
BACKOFF_S = 0.2
"""Wait before the first retry; it doubles with each."""
END_S = 10.0
"""Seconds that closing a session may take: a sandbox is torn down in it."""


class Silent(Exception):
    """The server did not answer, after all retries."""


class Busy(Exception):
    """The server takes no new session now: it is full, or told to stop."""

    def __init__(self, words: str, retry_s: float) -> None:
        super().__init__(words)
        self.retry_s = retry_s
        """Seconds after which it wants to be asked again."""


@dataclass(frozen=True, slots=True)
class RemoteSession:
    """A session that a server has opened."""

    server: RemoteServer
    id: str
    """The server's name of it."""
    instance: str
    """The server's process: another one knows nothing of this session."""


class RemoteServer:
    """Requests to one server. Sessions are its callers' to remember.

    Args:
        url: its address.
        config: timeouts, retries and token.
        key: what the configuration calls the address, for messages.
        tools: those that it must have.

    Raises:
        ConfigError: the address is none.

    """

    def __init__(self, url: str, config: ClientConfig, key: str, tools: Sequence[Tool] = ()) -> None:
        self.url = _checked(url, key)
        self.load = 0
        """Sessions that this client has here or is about to open."""
        self._config = config
        self._key = key
        self._tools = tools
        self._checked = ""  # the process whose tools were looked at
        token = config.token or os.environ.get(TOKEN_VARIABLE)
        self._wire = Wire(self.url, token, config.timeout_s)

    async def open(self, episode_id: str) -> RemoteSession:
        """Open the episode's session, or get the one that it has.

        Raises:
            Busy: no place is free, for as long as the server lets one wait.
            Silent: the server is gone.
            ToolFailure: it answers, and not with a session.
            ConfigError: the token is refused, or it is a server of other tools.

        """
        body = orjson.dumps({"episode_id": f"{PROCESS}/{episode_id}"})
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
            try:
                reply = await self._wire.send("POST", "/sessions", body)
            except httpx.TransportError as error:
                fault = _words(error)
                continue
            if reply.status_code == 503:
                after = reply.headers.get("retry-after", "")
                raise Busy(_error_of(reply), float(after) if after.isdecimal() else 0.0)
            self._check(reply, "a session")
            fields = self._fields(reply, {"session_id": str, "server": str})
            session = RemoteSession(self, fields["session_id"], fields["server"])
            try:
                await self._check_tools(session)
            except httpx.TransportError as error:
                fault = _words(error)
                continue
            return session
        await self._check_alive(fault)
        raise ToolFailure(f"{self.named} did not open a session: {fault}")

    async def call(self, session: RemoteSession, call: ToolCall) -> ToolResult:
        """Run a call, and ask for its result again where a reply was lost: the call id makes that harmless.

        Raises:
            Silent: the server is gone.
            SandboxFailure: the sandbox failed, or the server no longer has the session.
            ToolFailure: the tool or the server failed for reasons of its own.
            EnvironmentFailure: the episode has used the call id before, for another call.
            ConfigError: the token is refused.

        """
        try:
            body = _body(call)
        except (ValueError, TypeError, RecursionError) as error:  # NaN, or a depth that no parser takes
            return ToolResult(
                call.id, ToolStatus.INVALID, f"{call.name}: the arguments cannot be sent as JSON: {error}"
            )
        path = f"/sessions/{quote(session.id, safe='')}/call"
        for attempt in range(self._config.retries + 1):
            try:
                if attempt:
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                    await self._check_same(session)
                reply = await self._wire.send("POST", path, body)
            except httpx.TransportError as error:
                fault = _words(error)
                continue
            if reply.status_code >= 500:
                fault = f"HTTP {reply.status_code}: {_error_of(reply)}"
                continue
            return self._result(reply, call)
        await self._check_alive(fault)
        raise ToolFailure(f"{self.named} did not answer call {call.id!r} of {call.name!r}: {fault}")

    async def end(self, session: RemoteSession) -> None:
        """Close a session; one that the server does not have is closed.

        Raises:
            ToolFailure: the server could not be told.

        """
        path = f"/sessions/{quote(session.id, safe='')}"
        for attempt in range(2):
            try:
                reply = await self._wire.send("DELETE", path, timeout_s=END_S)
            except httpx.TransportError as error:
                if not attempt:
                    continue  # most likely a connection that the server had closed meanwhile
                raise ToolFailure(f"{self.named} does not answer: {_words(error)}") from error
            if reply.status_code >= 400 and reply.status_code not in (404, 410):
                raise ToolFailure(f"{self.named} said {reply.status_code} to the end of a session: {_error_of(reply)}")
            return

    async def instance(self) -> str:
        """Return the id of the process that answers.

        Raises:
            httpx.TransportError: none does.
            ToolFailure: it is no tool server.

        """
        reply = await self._wire.send("GET", "/health", timeout_s=PROBE_S)
        self._check(reply, "GET /health")
        return str(self._fields(reply, {"server": str, "status": str})["server"])

    async def aclose(self) -> None:
        """Close all connections."""
        await self._wire.aclose()

    @property
    def named(self) -> str:
        """The server in a message."""
        return f"the tool server at {self.url} ({self._key})"

    async def _check_same(self, session: RemoteSession) -> None:
        """Refuse to send a call again to a process that may never have seen it."""
        instance = await self.instance()
        if instance != session.instance:
            raise SandboxFailure(f"{self.named} was started anew; the session and its files are lost")

    async def _check_tools(self, session: RemoteSession) -> None:
        """Refuse a server without the tools that policies are told of: they would be blamed for calling them."""
        if self._checked == session.instance or not self._tools:
            return
        reply = await self._wire.send("GET", "/tools", timeout_s=PROBE_S)
        self._check(reply, "GET /tools")
        there = {tool["name"]: tool for tool in self._fields(reply, {"tools": list})["tools"]}
        for tool in self._tools:
            if tool.name not in there:
                raise ConfigError(f"{self.named} has no tool {tool.name!r}; it has: {', '.join(there) or 'none'}")
            said = {"description": tool.description, "parameters": orjson.loads(orjson.dumps(dict(tool.parameters)))}
            if any(there[tool.name].get(field) != value for field, value in said.items()):
                words = (
                    "%s describes %r in other words than the policy reads: it was started with other options than %s"
                )
                _log.warning(words, self.named, tool.name, self._key.removesuffix(".url") + ".options")
        self._checked = session.instance

    async def _check_alive(self, fault: str) -> None:
        """Tell a server that is gone from one that only failed at a request."""
        try:
            await self.instance()
        except httpx.TransportError as error:
            raise Silent(fault) from error

    def _result(self, reply: httpx.Response, call: ToolCall) -> ToolResult:
        """Return what the server says of a call; failures of its own are raised."""
        status, words = reply.status_code, _error_of(reply) if reply.status_code >= 400 else ""
        if status in (404, 410):
            raise SandboxFailure(f"{self.named} no longer has the session: {words}")
        if status in (400, 413, 422):  # all but the arguments is ours, and fits
            return ToolResult(call.id, ToolStatus.INVALID, f"{call.name}: {words}")
        if status == 409:
            raise EnvironmentFailure(
                f"call id {call.id!r} of tool {call.name!r} was used before in this episode; every ToolCall needs an id of "
                f"its own: {words}"
            )
        self._check(reply, "a call")
        fields = self._fields(reply, {"call_id": str, "status": str, "content": str})
        if fields["call_id"] != call.id:
            raise ToolFailure(f"{self.named} answered call {fields['call_id']!r} when asked for {call.id!r}")
        try:
            ended = ToolStatus(fields["status"])
        except ValueError:
            raise ToolFailure(f"{self.named} gave a result of unknown status {fields['status']!r}") from None
        if ended is ToolStatus.SANDBOX_FAILURE:
            raise SandboxFailure(f"tool {call.name!r}: {fields['content']}")
        if ended is ToolStatus.UNAVAILABLE:
            raise ToolFailure(f"tool {call.name!r} is unavailable: {fields['content']}")
        return ToolResult(call.id, ended, fields["content"], fields.get("data"))

    def _check(self, reply: httpx.Response, what: str) -> None:
        if reply.status_code in (401, 403):
            options = self._key.removesuffix(".url") + ".options.client.token"
            raise ConfigError(f"{self.named} refuses our token: set {options} or {TOKEN_VARIABLE} to the server's")
        if reply.status_code >= 400:
            raise ToolFailure(f"{self.named} refused {what} with status {reply.status_code}: {_error_of(reply)}")

    def _fields(self, reply: httpx.Response, wanted: Mapping[str, type]) -> dict[str, Any]:
        try:
            fields = orjson.loads(reply.content)
            if isinstance(fields, dict) and all(isinstance(fields.get(name), kind) for name, kind in wanted.items()):
                return fields
        except ValueError:
            pass  # told below, as everything else that is no answer of a tool server
        raise ToolFailure(f"{self.named} does not speak as a tool server: {reply.text[:200]!r}")


def _checked(url: str, key: str) -> str:
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{key}={url}: {error}") from None
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise ConfigError(f"{key}={url}: write http://HOST:PORT; several addresses are separated by commas")
    return url.rstrip("/")


def _body(call: ToolCall) -> bytes:
    # Not orjson: it refuses the numbers beyond 64 bits that a policy may write.
    fields = {"call_id": call.id, "tool": call.name, "arguments": dict(call.arguments)}
    return json.dumps(fields, allow_nan=False).encode()


def _words(error: Exception) -> str:
    return f"{type(error).__name__} {error}".rstrip()


def _error_of(reply: httpx.Response) -> str:
    """Return what an error reply says: a server's field ``error``, or the text."""
    try:
        return str(orjson.loads(reply.content)["error"])
    except (ValueError, KeyError, TypeError):
        return reply.text[:300]
