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
_ENDS = ("stop", "length")
"""``finish_reason`` of a turn. With others, such as SGLang's ``abort``, the server has ended it: its text is no move."""


class _Again(Exception):
    """A fault after which the same request can succeed."""


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
        fault = ""
        for attempt in range(config.attempts):
            if attempt:
                await asyncio.sleep(self._backoff_s * 2 ** (attempt - 1))
            try:
                return self._read(*await self._post(orjson.dumps(body)), stop)
            except TimeoutError:
                fault = f"no reply within timeout_s={config.timeout_s:g}"
            except aiohttp.ClientError as error:
                fault = f"{type(error).__name__}: {error}"
            except _Again as error:
                fault = str(error)
        raise self._error(fault)

    def _read(self, status: int, reply: bytes, stop: Sequence[str]) -> str:
        """Return the text of a reply.

        Raises:
            _Again: the request can be sent again.
            SamplerError: it cannot.
        """
        shown = reply[:200].decode("utf-8", "replace")
        if status != 200:
            fault = f"HTTP {status}: {shown}"
            raise _Again(fault) if status in _AGAIN or status >= 500 else self._error(fault)
        text, reason = _choice(reply)
        if text is None:
            raise self._error(f"a reply without a text: {shown}")
        if reason not in _ENDS:
            raise _Again(f"a reply with finish_reason={reason!r}: {shown}")
        if reason == "length" and not text.strip():
            raise self._error(
                f"max_new_tokens={self._config.max_new_tokens} ended a reply before it had a text; raise it"
            )
        return _up_to_stop(text, stop)

    def _error(self, fault: str) -> SamplerError:
        return SamplerError(f"the endpoint {self._url}, model {self._config.model}: {fault}")

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


def _choice(reply: bytes) -> tuple[str | None, object]:
    """Return the text of a reply and its ``finish_reason``; None if it has no text."""
    try:
        choice = orjson.loads(reply)["choices"][0]
        text, reason = choice["message"]["content"], choice["finish_reason"]
    except (orjson.JSONDecodeError, KeyError, IndexError, TypeError):
        return None, None
    return (text if isinstance(text, str) else None), reason


def _up_to_stop(text: str, stop: Sequence[str]) -> str:
    """Return the text up to the first stop string, which stays in it as in a policy's turn: servers would leave it out."""
    return text[
        : min(
            (text.index(stop_string) + len(stop_string) for stop_string in stop if stop_string in text),
            default=len(text),
        )
    ]
