"""Client of a server that scores tokens by SGLang's protocol: a teacher, or an engine of the policy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence
from typing import Any

import aiohttp
import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import EngineError, SamplerError
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.generation import read_scores, score_body
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.obs.waiting import waiting

ATTEMPTS = 3
"""How often a request is sent whose reply breaks off, or reports that the server cannot serve it now."""
MAX_RUNNING = 64
"""Concurrent requests: enough that a server has always more to do, so few that none waits there for its whole timeout."""
_BACKOFF_S = 0.5
_TOO_MANY = 429


class ScoringClient:
    """Scores tokens at one address. Scoring changes nothing at the server, so requests may be repeated.

    Args:
        url: of the server.
        name: of the server in messages, with its key, such as ``teacher 'math' (algo.distillation.teachers.math.url)``.
        timeout_s: how long a reply may take.
        vocabulary_size: of the policy's model.
    """

    def __init__(self, url: str, name: str, *, timeout_s: float, vocabulary_size: int) -> None:
        self._http = EngineHttp(url, timeout_s)
        self._name = name
        self._vocabulary_size = vocabulary_size
        self._numbers = itertools.count()
        self._running = asyncio.Semaphore(MAX_RUNNING)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def score(self, token_ids: Sequence[int], start: int, adapter: str | None = None) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids[start:]``, each given all tokens before it, at temperature 1.

        Args:
            token_ids: a prompt.
            start: at least 1.
            adapter: name of the engine's LoRA adapter that scores; None: the engine's weights alone.

        Raises:
            EngineError: the server cannot be reached, refuses, or its reply is not one.

        """
        body = score_body([int(token) for token in token_ids], start, f"score-{next(self._numbers)}", adapter)
        async with self._running:
            return await self._send(body)

    async def _send(self, body: dict[str, Any]) -> NDArray[np.float32]:
        for attempt in itertools.count(1):
            try:
                with waiting("scores", f"of {self._name}", self._http.url):
                    async with self._http.request("POST", "/generate", body) as reply:
                        content = await reply.read()
                return np.array(read_scores(content, body, self._vocabulary_size), np.float32)
            except SamplerError as error:
                raise EngineError(f"{self._name}, {self._http.url}: {error}") from error
            except ErrorReply as error:
                if (error.status < 500 and error.status != _TOO_MANY) or attempt == ATTEMPTS:
                    raise EngineError(f"{self._name} refuses a request at {self._http.url}: {error}") from error
            except CONNECTION_ERRORS as error:
                # Lost connections were tried again before, by the connection.
                if isinstance(error, TimeoutError | aiohttp.ClientConnectionError) or attempt == ATTEMPTS:
                    why = f"{type(error).__name__} {error}"
                    raise EngineError(f"{self._name} does not answer at {self._http.url}: {why}") from error
            await asyncio.sleep(_BACKOFF_S * 2 ** (attempt - 1))
        raise AssertionError("the loop returns or raises")

    async def info(self) -> dict[str, Any]:
        """Return what the server reports of itself: at least ``model_path`` and ``max_req_input_len``.

        A prompt must be shorter than the latter.

        Raises:
            EngineError: it does not answer.

        """
        control = ControlEndpoint(self._http)
        found: dict[str, Any] = {}
        for path in ("/model_info", "/server_info"):
            part = await control.call(path, None)
            found |= part if isinstance(part, dict) else {}
        return found
