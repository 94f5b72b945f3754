"""An OpenEnv server in this process, whose replies a test writes; the protocol is that of openenv 0.3 and later."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import WSMsgType, web

Json = dict[str, Any]
TEXT_ACTION = {"properties": {"text": {"type": "string"}, "metadata": {"type": "object"}}, "required": ["text"]}
LOSE = "lose"
"""A reply in place of which the server drops the connection."""


@dataclass
class FakeOpenEnv:
    """A server; `reply` returns the data of its answer to a message, an error as ``{"code": …}``, or `LOSE`."""

    reply: Callable[[str, Json], Json | str]
    schema: Json = field(default_factory=lambda: dict(TEXT_ACTION))
    capacity: int = 64
    sessions: int = 0
    most_sessions: int = 0
    messages: list[tuple[str, Json]] = field(default_factory=list)
    url: str = ""

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[FakeOpenEnv]:
        """Serve at a free port."""
        app = web.Application()
        app.add_routes([web.get("/ws", self._socket), web.get("/schema", self._schema)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            await runner.cleanup()

    async def _schema(self, request: web.Request) -> web.Response:
        return web.json_response({"action": self.schema, "observation": {}, "state": {}})

    async def _socket(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        await socket.prepare(request)
        if self.sessions >= self.capacity:
            full = {"message": f"{self.sessions}/{self.capacity} sessions", "code": "CAPACITY_REACHED"}
            await socket.send_str(json.dumps({"type": "error", "data": full}))
            await socket.close()
            return socket
        self.sessions += 1
        self.most_sessions = max(self.most_sessions, self.sessions)
        try:
            await self._answer(socket)
        finally:
            self.sessions -= 1
        await socket.close()
        return socket

    async def _answer(self, socket: web.WebSocketResponse) -> None:
        async for received in socket:
            if received.type is not WSMsgType.TEXT:
                return
            message = json.loads(received.data)
            if message["type"] == "close":
                return
            self.messages.append((message["type"], message["data"]))
            content = self.reply(message["type"], message["data"])
            if content == LOSE:
                assert socket._req is not None
                assert socket._req.transport is not None
                socket._req.transport.abort()
                return
            kind = "error" if isinstance(content, dict) and "code" in content else "observation"
            await socket.send_str(content if isinstance(content, str) else json.dumps({"type": kind, "data": content}))


def observe(done: bool = False, reward: float | None = None, **observation: Any) -> Json:
    """What a server says of a step."""
    return {"observation": {**observation, "metadata": {}}, "reward": reward, "done": done}
