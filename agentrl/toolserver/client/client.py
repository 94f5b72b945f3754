"""The client of tool servers: one session an episode, opened at its first call."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass

import orjson

from agentrl.config.toolserver import ClientConfig
from agentrl.core.errors import AgentrlError, ConfigError, EnvironmentFailure, SandboxFailure, TaskError, ToolFailure
from agentrl.core.images import Image
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import MAX_NESTING, is_too_deep
from agentrl.core.types import ToolCall, ToolResult, ToolStatus
from agentrl.obs.waiting import waiting
from agentrl.toolserver import request_limits
from agentrl.toolserver.batcher import Batcher
from agentrl.toolserver.client import pool as pool_module
from agentrl.toolserver.client import server as server_module
from agentrl.toolserver.client.pool import ServerPool
from agentrl.toolserver.client.server import ServerDown, ToolServer

_log = logging.getLogger(__name__)

WAIT_S = 2.0
"""Seconds the end of an episode waits for the close of its session, which otherwise continues in the background."""
LAST_S = 5.0
"""Seconds `ToolServerClient.aclose` waits for sessions to be closed."""
BATCH = 64
"""Calls of stateless tools in one request."""
REQUESTS = 2
"""Concurrent requests with stateless calls for each server: it reads one while it runs the other."""
END_S = 10.0
"""Seconds that closing a session may take: a sandbox is torn down in it."""


_Encoded = tuple[ToolCall, bytes]
"""A call, and its JSON."""
_RESULT = ("call_id", "status", "content")


@dataclass(frozen=True, slots=True)
class Session:
    """An episode's session at a server."""

    server: ToolServer
    id: str
    """The server's id of it."""
    instance: str
    """The server process that opened it: another one does not know this session."""

    @property
    def path(self) -> str:
        """Below the server's address."""
        return f"/sessions/{self.id}"


class ToolServerClient:
    """Implements `agentrl.core.tool.ToolClient`; belongs to the event loop that first calls it.

    A session stays with the server that opened it: its files are there. When that server dies, its episodes' calls fail.
    Calls of stateless tools need no session: those that wait at the same time share a request to any server.

    Args:
        urls: addresses separated by commas.
        config: timeouts, retries and token.
        key: the configuration key of the addresses, for messages.
        tools: the tools that a policy may call there.
        stateless: whether the tools are `StatelessTool`.
        resumable: whether they continue in a session of another server process; see `HostedService.resumable`.

    Raises:
        ConfigError: an address is invalid.
    """

    def __init__(
        self,
        urls: str,
        config: ClientConfig,
        *,
        key: str,
        tools: Sequence[Tool] = (),
        stateless: bool = False,
        resumable: bool = False,
    ) -> None:
        addresses = dict.fromkeys(url.strip().rstrip("/") for url in urls.split(",") if url.strip())
        if not addresses:
            raise ConfigError(f"{key}={urls!r}: there is no address in it")
        self._config = config
        self._pool = ServerPool([ToolServer(url, config, key, tools) for url in addresses], key)
        self._resumable = resumable
        self._sessions: dict[str, asyncio.Task[Session]] = {}
        self._closing: set[asyncio.Task[None]] = set()
        self._unclosed: dict[ToolServer, list[Session]] = {}
        """Sessions whose server did not answer when they ended. They take its places until it gets the DELETE."""
        self._batcher: Batcher[_Encoded, ToolResult] | None = None
        if stateless:
            self._batcher = Batcher(self._call_batch, max_batch=BATCH, concurrent=REQUESTS * len(addresses))

    @property
    def keeps_sessions(self) -> bool:
        """Whether a server keeps something of an episode between calls that ends with its process."""
        return self._batcher is None and not self._resumable

    async def check(self) -> None:
        """Check that all servers answer, have the tools of the run, and take our token.

        Raises:
            MissingError: one does not answer.
            ConfigError: one refuses our token, has other tools, or is no tool server.
        """
        await self._pool.check_servers()

    async def open_session(self, episode_id: str, *, image: str) -> None:
        """Open the episode's session with sandboxes from ``image``, unless it is open. Stateless tools have no sandboxes.

        Raises:
            TaskError: the server does not allow the image.
            ToolFailure, ConfigError: see `call`.
        """
        if self._batcher is None:
            await self._session(episode_id, image)

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        """Run one call in the episode's session; retries send the same call id, and the server runs it once.

        Raises:
            SandboxFailure: the session is lost with its server's process, or was closed for idleness.
            ToolFailure: its server did not answer, or no server does.
            EnvironmentFailure: the episode has used the call id before, for another call.
            ConfigError: a server refuses our token, or has other tools.
        """
        if is_too_deep(call.arguments):  # fails before a batch with the calls of other episodes does
            fault = f"{call.name}: the arguments are nested more than {MAX_NESTING} levels deep"
            return ToolResult(call.id, ToolStatus.INVALID, fault)
        try:
            # Not orjson: it refuses the numbers beyond 64 bits that a policy may write. An invalid call id fails its own
            # request, and so must not be in a batch.
            call_id = call.id if self._batcher is None else "stateless"
            fields = {"call_id": call_id, "tool": call.name, "arguments": dict(call.arguments)}
            body = json.dumps(fields, ensure_ascii=False, allow_nan=False).encode()
        except (ValueError, TypeError) as error:  # NaN, or half a character
            fault = f"{call.name}: the arguments cannot be sent as JSON: {error}"
            return ToolResult(call.id, ToolStatus.INVALID, fault)
        if self._batcher is not None:
            if len(body) > request_limits.CALL_BYTES:
                fault = f"{call.name}: the arguments have {len(body)} bytes, {request_limits.CALL_BYTES} are allowed"
                return ToolResult(call.id, ToolStatus.INVALID, fault)
            with waiting("tool server", "batch of stateless calls"):
                return await self._batcher.submit((call, body))
        for _ in range(self._config.retries if self._resumable else 0):
            session = await self._session(episode_id)
            try:
                return await self._call_in(session, call, body)
            except (SandboxFailure, ToolFailure) as failure:
                _log.warning("session %s is opened again: %s", session.id, failure)
                self._forget(episode_id, session)
                await self._pool.wait_until_up()
        return await self._call_in(await self._session(episode_id), call, body)

    def _forget(self, episode_id: str, session: Session) -> None:
        """Let the next call open another session."""
        if self._sessions.pop(episode_id, None) is not None:
            session.server.load -= 1

    async def _call_in(self, session: Session, call: ToolCall, body: bytes) -> ToolResult:
        """Run a call in a session; see `call`."""
        server = session.server
        self._pool.check_up(server)
        try:
            with waiting("tool server", server.url):
                reply = await server.request(
                    "POST",
                    f"{session.path}/call",
                    body,
                    description=f"call {call.id!r} of {call.name!r}",
                    instance=session.instance,
                    retry_errors=True,
                )
        except ServerDown as down:
            self._pool.mark_down(server, str(down))
            raise ToolFailure(f"{server.name} does not answer: {down}") from down
        if reply.status in (404, 410):
            raise SandboxFailure(f"{server.name} no longer has the session: {reply.error}")
        if reply.status in (400, 413, 422):  # everything but the arguments is ours, and valid
            return ToolResult(call.id, ToolStatus.INVALID, f"{call.name}: {reply.error}")
        if reply.status == 409 and self._resumable:
            raise SandboxFailure(
                f"{server.name} has run another call with this id, before this run went on: {reply.error}"
            )
        if reply.status == 409:
            raise EnvironmentFailure(
                f"call id {call.id!r} of tool {call.name!r} was used before in this episode; every ToolCall needs a "
                f"unique id: {reply.error}"
            )
        return _as_result(server.reply_fields(reply, "a call", {}), call, call.id, server)

    async def _call_batch(self, batch: Sequence[_Encoded]) -> list[ToolResult | Exception]:
        body = b'{"calls":[%s]}' % b",".join(call_json for _, call_json in batch)
        for attempt in range(self._config.retries + 1):
            if attempt:
                await self._pool.wait_until_up()
            for server in self._pool.by_load():
                server.load += 1
                try:
                    reply = await server.request(
                        "POST", "/calls", body, description="stateless calls", retry_errors=True
                    )
                    fields = server.reply_fields(reply, "stateless calls", {"results": list, "server": str})
                    await server.check_tools(fields["server"])
                    if len(fields["results"]) != len(batch):
                        raise ToolFailure(f"{server.name} gave {len(fields['results'])} results to {len(batch)} calls")
                    results: list[ToolResult | Exception] = []
                    for result_fields, (call, _) in zip(fields["results"], batch, strict=True):
                        try:
                            results.append(_as_result(result_fields, call, "stateless", server))
                        except ToolFailure as failure:  # of this call alone
                            results.append(failure)
                    return results
                except ServerDown as down:
                    self._pool.mark_down(server, str(down))
                finally:
                    server.load -= 1
        self._pool.check_any_up()
        raise ToolFailure("no tool server answers stateless calls")

    async def _session(self, episode_id: str, image: str | None = None) -> Session:
        """Return the episode's session; concurrent calls wait for the same one."""
        opening = self._sessions.get(episode_id)
        if opening is None:
            opening = asyncio.create_task(self._open(episode_id, image), name=f"open {episode_id}")
            self._sessions[episode_id] = opening
        try:
            if opening.done():
                return opening.result()
            with waiting("tool session", "to be opened by a server"):
                return await asyncio.shield(opening)
        except AgentrlError as error:
            if self._sessions.get(episode_id) is opening:
                del self._sessions[episode_id]
            raise type(error)(*error.args) from error  # each waiting call raises its own instance

    async def _open(self, episode_id: str, image: str | None) -> Session:
        """Open a session at the least loaded server; if that one is full or down, at the next.

        Raises:
            ToolFailure: no server opens one; with the addresses and the key to change.
            ConfigError: the token is refused, or a server has other tools.
            TaskError: the image is not allowed.
        """
        fields = {"episode_id": f"{server_module.PROCESS}/{episode_id}"} | ({} if image is None else {"image": image})
        body = orjson.dumps(fields)
        refusal = ""
        retry_after_s = 0.0
        for attempt in range(self._config.retries + 1):
            if attempt:
                await asyncio.sleep(
                    max(server_module.BACKOFF_S * 2 ** (attempt - 1), min(retry_after_s, pool_module.RETURN_S))
                )
                await self._pool.wait_until_up()
            for server in self._pool.by_load():
                server.load += 1  # before the request: sessions that are opened at the same time spread, too
                for unclosed_session in self._unclosed.pop(server, ()):  # it answers again
                    self._start_closing(self._delete(unclosed_session))
                session: Session | None = None
                try:
                    reply = await server.request("POST", "/sessions", body, description="the request for a session")
                    if reply.status == 503:
                        refusal, retry_after_s = f"{server.url}: {reply.error}", reply.retry_after_s
                        continue
                    if reply.status == 422:
                        raise TaskError(f"{server.name}: {reply.error}")
                    opened = server.reply_fields(reply, "a session", {"session_id": str, "server": str})
                    await server.check_tools(opened["server"])
                    session = Session(server, opened["session_id"], opened["server"])
                    return session
                except ServerDown as down:
                    self._pool.mark_down(server, str(down))
                finally:
                    server.load -= session is None
        self._pool.check_any_up()
        raise ToolFailure(
            f"no tool server opens another session ({refusal}); raise its server.max_sessions, or lower rollout.concurrency"
        )

    async def close_session(self, episode_id: str) -> None:
        """Close the episode's session, if it has one; returns after `WAIT_S` even if the server is slower."""
        opening = self._sessions.pop(episode_id, None)
        if opening is None:
            return
        await asyncio.wait({self._start_closing(self._close(opening))}, timeout=WAIT_S)

    def _start_closing(self, close: Coroutine[object, None, None]) -> asyncio.Task[None]:
        closing = asyncio.create_task(close, name="close a session")
        self._closing.add(closing)
        closing.add_done_callback(self._closing.discard)
        return closing

    async def _close(self, opening: asyncio.Task[Session]) -> None:
        # A session that is still being opened has its place in the server's queue and is closed once it is open.
        try:
            session = await opening
        except AgentrlError:
            return  # it was never opened; the calls that needed it have raised the error
        session.server.load -= 1
        await self._delete(session)

    async def _delete(self, session: Session) -> None:
        server = session.server
        try:
            self._pool.check_up(server)
            # One retry, for the connection that the server had closed meanwhile.
            reply = await server.request("DELETE", session.path, description="a DELETE", retries=1, timeout_s=END_S)
        except (ToolFailure, SandboxFailure, ServerDown) as error:
            _log.warning("session %s was not closed: %s", session.id, error)
            self._unclosed.setdefault(server, []).append(session)
            return
        if reply.status >= 400 and reply.status not in (404, 410):
            fault = f"{server.name} answered its DELETE with status {reply.status}: {reply.error}"
            _log.warning("session %s was not closed: %s", session.id, fault)

    async def aclose(self) -> None:
        """Close the remaining sessions and all connections."""
        if self._batcher is not None:
            await self._batcher.close(ToolFailure("the client was closed during the call"))
        for episode_id in list(self._sessions):
            self._start_closing(self._close(self._sessions.pop(episode_id)))
        if self._closing:
            _, unfinished = await asyncio.wait(self._closing, timeout=LAST_S)
            for task in unfinished:
                task.cancel()
            await asyncio.gather(*unfinished, return_exceptions=True)
        await self._pool.aclose()


def _as_result(fields: object, call: ToolCall, call_id: str, server: ToolServer) -> ToolResult:
    """Return a result of any status: `ToolRunner` decides which statuses are failures of the infrastructure."""
    if not isinstance(fields, dict) or not all(isinstance(fields.get(name), str) for name in _RESULT):
        raise ToolFailure(f"{server.name} answered a call with {fields!r:.200}, which is not a result")
    if fields["call_id"] != call_id:
        raise ToolFailure(f"{server.name} answered call {fields['call_id']!r} instead of {call_id!r}")
    if fields["status"] not in {status.value for status in ToolStatus}:
        raise ToolFailure(f"{server.name} gave a result of unknown status {fields['status']!r}")
    try:
        images = tuple(map(Image.from_data_url, fields.get("images", ())))
        return ToolResult(call.id, ToolStatus(fields["status"]), fields["content"], fields.get("data"), images)
    except (TypeError, AttributeError, ValueError) as error:
        raise ToolFailure(f"{server.name} answered a call with images that cannot be used: {error}") from error
