"""HTTP to one tool server: requests with retries, and the checks that its replies are a tool server's."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import aiohttp
import orjson

from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import ConfigError, SandboxFailure, ToolFailure
from agentrl.core.tool import Tool
from agentrl.toolserver.request_limits import TOKEN_VARIABLE

_log = logging.getLogger(__name__)

PROCESS = secrets.token_hex(8)
"""Prefix of episode ids, which repeat from run to run: a server that several runs use must not give one the session of
another. All clients of a process share it, so that an episode's tools at one server share its session."""
BACKOFF_S = 0.2
"""Wait before the first retry; it doubles with each."""
PROBE_S = 5.0
"""Seconds that a connection, ``GET /health`` and ``GET /tools`` may take."""
KEEP_S = 30.0
"""Seconds an idle connection is kept; servers keep theirs longer."""

CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError)
"""Errors of a request without a whole reply."""


class ServerDown(Exception):
    """The server did not answer, after all retries."""


class Reply(NamedTuple):
    """A whole HTTP reply."""

    status: int
    content: bytes
    retry_after_s: float = 0.0
    """The header ``Retry-After``; 0 without one."""

    @property
    def error(self) -> str:
        """The reason in an error reply: a server's field ``error``, or the text."""
        try:
            return str(orjson.loads(self.content)["error"])
        except (ValueError, KeyError, TypeError):
            return self.content[:300].decode(errors="replace")


class ToolServer:
    """Requests to one server.

    Args:
        url: its address.
        config: timeouts, retries and token.
        key: the configuration key of the address, for messages.
        tools: the tools that the run needs there.

    Raises:
        ConfigError: the address is invalid.
    """

    def __init__(self, url: str, config: ClientConfig, key: str, tools: Sequence[Tool] = ()) -> None:
        self.url = _check_url(url, key)
        self.load = 0
        """Sessions that this client has here or is about to open."""
        self._config = config
        self._key = key
        self._tools = tools
        self._checked_instance = ""  # the server process whose tools were compared with ours
        self._http: aiohttp.ClientSession | None = None
        self._probes: aiohttp.ClientSession | None = None  # a new connection for each request

    async def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        *,
        description: str,
        instance: str = "",
        retry_errors: bool = False,
        retries: int | None = None,
        timeout_s: float | None = None,
    ) -> Reply:
        """Send a request; retry with exponential backoff if no reply came.

        Args:
            method: of HTTP.
            path: below the server's address.
            body: JSON.
            description: the request in words, for messages.
            instance: the server process that it is for: a retry is never sent to another, which has not seen the first.
            retry_errors: retry replies of status 500 and above too.
            retries: further tries; the configuration's if None.
            timeout_s: seconds a try may take; the configuration's if None.

        Raises:
            ServerDown: the server does not answer this and no other request.
            SandboxFailure: it was restarted, so that ``instance`` and its sessions are gone.
            ToolFailure: it answers, and not this request.
        """
        retries = self._config.retries if retries is None else retries
        fault = ""
        for attempt in range(retries + 1):
            try:
                if attempt:
                    await asyncio.sleep(BACKOFF_S * 2 ** (attempt - 1))
                    if instance and await self.instance() != instance:
                        raise SandboxFailure(f"{self.name} was restarted; the session and its files are lost")
                async with self._connections().request(
                    method, self.url + path, data=body, timeout=_timeout(timeout_s or self._config.timeout_s)
                ) as response:
                    retry_after = response.headers.get("retry-after", "")
                    reply = Reply(
                        response.status, await response.read(), float(retry_after) if retry_after.isdecimal() else 0.0
                    )
            except CONNECTION_ERRORS as error:
                fault = describe_error(error)
                continue
            if not retry_errors or reply.status < 500:
                return reply
            fault = f"HTTP {reply.status}: {reply.error}"
        try:
            await self.instance()
        except CONNECTION_ERRORS as error:
            raise ServerDown(fault) from error
        raise ToolFailure(f"{self.name} did not answer {description}: {fault}")

    async def instance(self) -> str:
        """Return the id of the server process that answers.

        On a new connection: a healthy server may have closed those in the pool, as it does after an internal error.

        Raises:
            aiohttp.ClientError, TimeoutError: none does.
            ToolFailure: it is no tool server.
        """
        if self._probes is None:
            self._probes = self._new_pool(aiohttp.TCPConnector(force_close=True))
        async with self._probes.get(f"{self.url}/health", timeout=_timeout(PROBE_S)) as response:
            reply = Reply(response.status, await response.read())
        return str(self.reply_fields(reply, "GET /health", {"server": str, "status": str})["server"])

    async def check_tools(self, instance: str) -> None:
        """Check once for each server process that it has the tools that policies are offered.

        Raises:
            ConfigError: it lacks one.
        """
        if self._checked_instance == instance or not self._tools:
            return
        reply = await self.request("GET", "/tools", description="GET /tools", timeout_s=PROBE_S)
        served = {tool["name"]: tool for tool in self.reply_fields(reply, "GET /tools", {"tools": list})["tools"]}
        for tool in self._tools:
            if tool.name not in served:
                raise ConfigError(f"{self.name} has no tool {tool.name!r}; it has: {', '.join(served) or 'none'}")
            expected = {
                "description": tool.description,
                "parameters": orjson.loads(orjson.dumps(dict(tool.parameters))),
            }
            if any(served[tool.name].get(field) != value for field, value in expected.items()):
                message = (
                    "%s describes %r differently from what the policy reads: it was started with other options than %s"
                )
                _log.warning(message, self.name, tool.name, self._key.removesuffix(".url") + ".options")
        self._checked_instance = instance

    def reply_fields(self, reply: Reply, request: str, field_types: Mapping[str, type]) -> dict[str, Any]:
        """Return the JSON object in a reply, which has the ``field_types`` fields.

        Raises:
            ConfigError: the token was refused.
            ToolFailure: the reply is another error, or not a tool server's.
        """
        if reply.status in (401, 403):
            options = self._key.removesuffix(".url") + ".options.client.token"
            raise ConfigError(f"{self.name} refuses our token: set {options} or {TOKEN_VARIABLE} to the server's")
        if reply.status >= 400:
            raise ToolFailure(f"{self.name} refused {request} with status {reply.status}: {reply.error}")
        try:
            fields = orjson.loads(reply.content)
            if isinstance(fields, dict) and all(
                isinstance(fields.get(name), kind) for name, kind in field_types.items()
            ):
                return fields
        except ValueError:
            pass  # reported below, as every other reply that is not a tool server's
        raise ToolFailure(f"{self.name} is not a tool server: it answered {request} with {reply.content[:200]!r}")

    @property
    def name(self) -> str:
        """The server in a message."""
        return f"the tool server at {self.url} ({self._key})"

    def _connections(self) -> aiohttp.ClientSession:
        """Return the connection pool, which belongs to the event loop of the first request."""
        if self._http is None:
            self._http = self._new_pool(aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_S))
        return self._http

    def _new_pool(self, connector: aiohttp.TCPConnector) -> aiohttp.ClientSession:
        token = self._config.token or os.environ.get(TOKEN_VARIABLE)
        return aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            headers={"content-type": "application/json", **({"authorization": f"Bearer {token}"} if token else {})},
        )

    async def aclose(self) -> None:
        """Close all connections."""
        for pool in (self._http, self._probes):
            if pool is not None:
                await pool.close()


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds, sock_connect=PROBE_S)


def describe_error(error: Exception) -> str:
    """Return the kind and the message of an error."""
    return f"{type(error).__name__} {error}".rstrip()


def _check_url(url: str, key: str) -> str:
    try:
        parsed = urlsplit(url)
        valid = parsed.scheme in ("http", "https") and bool(parsed.hostname) and (parsed.port or 1) > 0
    except ValueError as error:
        raise ConfigError(f"{key}={url}: {error}") from None
    if not valid:
        raise ConfigError(f"{key}={url}: write http://HOST:PORT; several addresses are separated by commas")
    return url.rstrip("/")
