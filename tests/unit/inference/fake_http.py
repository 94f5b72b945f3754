"""Replies of an engine without HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import Any

import orjson


class FakeReply:
    """A reply with JSON."""

    content_type = "application/json"

    def __init__(self, value: Any) -> None:
        self._value = value

    async def read(self) -> bytes:
        return orjson.dumps(self._value)


@asynccontextmanager
async def replying(answer: Awaitable[Any]) -> AsyncIterator[FakeReply]:
    """The context of a request that ``answer`` answers, or whose error it raises."""
    yield FakeReply(await answer)
