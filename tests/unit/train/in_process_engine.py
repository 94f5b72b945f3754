"""The embedded engine without a process and a socket: its application behind the client's requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import torch
from transformers import PreTrainedTokenizerBase

from agentrl.inference.client.http import ErrorReply
from agentrl.inference.embedded.app import build_app
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from tests.unit.inference.fake_http import FakeReply


class InProcessEngine:
    """Takes the place of `agentrl.inference.client.http.EngineHttp`."""

    url = "http://in-process"

    def __init__(self, folder: Path, tokenizer: PreTrainedTokenizerBase, context: int = 128) -> None:
        self.model = Model(folder, torch.float32, 32, context)
        self.scheduler = Scheduler(self.model, StopMatcher(tokenizer, self.model.vocabulary), 32, 0, "0")
        transport = httpx.ASGITransport(build_app(self.scheduler, lambda error: None))
        self._client = httpx.AsyncClient(transport=transport, base_url=self.url)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Compute steps in the body."""
        loop = asyncio.create_task(self.scheduler.run())
        try:
            yield
        finally:
            loop.cancel()
            await asyncio.gather(loop, return_exceptions=True)

    @asynccontextmanager
    async def request(self, method: str, path: str, body: Any = None, **_: Any) -> AsyncIterator[FakeReply]:
        """Answer a request."""
        reply = await self._client.request(method, path, json=body)
        if reply.status_code != 200:
            raise ErrorReply(reply.status_code, reply.text)
        yield FakeReply(reply.json())

    async def aclose(self) -> None:
        """Do nothing."""
