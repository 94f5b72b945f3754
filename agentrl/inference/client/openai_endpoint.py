"""A player of multi-agent episodes behind an endpoint that speaks the OpenAI protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import aiohttp
import orjson

from agentrl.config.tasks import EndpointConfig
from agentrl.core.errors import SamplerError
from agentrl.core.types import Message

_AGAIN = {408, 409, 429}
"""Statuses, next to 5xx, after which a request is sent again."""


class OpenAiEndpoint:
    """Requests turns from ``URL/chat/completions``; implements `agentrl.core.lineup.ChatEndpoint`.

    Args:
        config: address, model and limits.
        backoff_s: seconds before the second attempt; doubled before each further one.
    """

    def __init__(self, config: EndpointConfig, *, backoff_s: float = 1.0) -> None:
        self._config = config
        self._backoff_s = backoff_s
        self._url = f"{config.url.rstrip('/')}/chat/completions"

    async def reply(self, messages: Sequence[Message], *, stop: Sequence[str], seed: int) -> str:
        """Return the model's next message.

        Raises:
            SamplerError: the endpoint refused the request, failed at every attempt, or its reply has no text.
        """
        config = self._config
        body: dict[str, Any] = {
            "model": config.model,
            "messages": [{"role": message.role, "content": message.content} for message in messages],
            "temperature": config.temperature,
            "max_tokens": config.max_new_tokens,
            "seed": seed,
        }
        if stop:
            body["stop"] = list(stop)
        fault = ""
        for attempt in range(config.attempts):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
            try:
                status, reply = await self._post(orjson.dumps(body))
            except (aiohttp.ClientError, TimeoutError) as error:
                fault = f"{type(error).__name__}: {error}"
                continue
            if status == 200:
                return self._text(reply)
            fault = f"HTTP {status}: {reply[:200].decode('utf-8', 'replace')}"
            if status not in _AGAIN and status < 500:
                break
        raise SamplerError(f"the endpoint {self._url}, model {config.model}: {fault}")

    async def _post(self, body: bytes) -> tuple[int, bytes]:
        headers = {"content-type": "application/json"}
        if self._config.api_key is not None:
            headers["authorization"] = f"Bearer {self._config.api_key}"
        timeout = aiohttp.ClientTimeout(total=self._config.timeout_s)
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(self._url, data=body, headers=headers) as response,
        ):
            return response.status, await response.read()

    def _text(self, reply: bytes) -> str:
        try:
            text = orjson.loads(reply)["choices"][0]["message"]["content"]
        except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
            text = None
        if not isinstance(text, str):
            raise SamplerError(
                f"the endpoint {self._url} replied without a text: {reply[:200].decode('utf-8', 'replace')}"
            )
        return text
