"""A server of HTTP whose replies a test writes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

T = TypeVar("T")

CUT = "cut"
"""A reply: the connection is closed without one."""
SILENT = "silent"
"""A reply: none comes, until the test ends."""


@dataclass
class Received:
    """A request as the server got it."""

    path: str
    headers: dict[str, str]
    body: Any


@dataclass
class Served:
    """What a conversation with the server returned, and what the server got."""

    result: Any
    requests: list[Received] = field(default_factory=list)
    waits: list[float] = field(default_factory=list)
    """Seconds that the client would have waited."""
    most_at_once: int = 0


Reply = str | tuple[int, Any] | tuple[int, Any, dict[str, str]]
"""`CUT`, `SILENT`, or a status, a body (bytes, or JSON) and headers."""
Serve = Callable[..., Served]


@pytest.fixture
def serve() -> Serve:
    """``serve(talk, *replies)``: run ``talk(url, sleep)`` against a server that gives these replies, the last one forever."""

    def run(talk: Callable[[str, Callable[[float], Awaitable[None]]], Awaitable[T]], *replies: Reply) -> Served:
        served = Served(None)
        remaining = list(replies)
        at_once = 0

        async def main() -> None:
            ended = asyncio.Event()

            async def handle(request: web.BaseRequest) -> web.StreamResponse:
                nonlocal at_once
                content = await request.read()
                served.requests.append(Received(request.path, dict(request.headers), json.loads(content or b"null")))
                at_once += 1
                served.most_at_once = max(served.most_at_once, at_once)
                reply = remaining.pop(0) if len(remaining) > 1 else remaining[0]
                try:
                    if isinstance(reply, str):
                        if reply == SILENT:
                            await ended.wait()
                        assert request.transport is not None
                        request.transport.abort()
                        return web.Response()
                    await asyncio.sleep(0)  # others begin meanwhile
                    status, body, *headers = reply
                    content = body if isinstance(body, bytes) else json.dumps(body).encode()
                    return web.Response(status=status, body=content, headers=headers[0] if headers else None)
                finally:
                    at_once -= 1

            async def sleep(seconds: float) -> None:
                served.waits.append(seconds)

            async with RawTestServer(handle) as server:
                try:
                    served.result = await talk(str(server.make_url("/v1")), sleep)
                finally:
                    ended.set()

        asyncio.run(main())
        return served

    return run
