"""Client of a server that scores tokens by SGLang's protocol: a teacher, or an engine of the policy."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping, Sequence
from typing import Any
from uuid import uuid4

import aiohttp
import msgspec
import numpy as np
from numpy.typing import NDArray

from agentrl.core.errors import EngineError, SamplerError
from agentrl.core.images import PlacedImage
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.generation import NOT_A_REPLY, ROUNDING, Finish, TokenId
from agentrl.inference.client.http import CONNECTION_ERRORS, EngineHttp, ErrorReply
from agentrl.inference.client.request_images import check_expansion, with_images
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
        image_token_id: the token that stands for each of an image's features; None: the model takes no images.
    """

    def __init__(
        self, url: str, name: str, *, timeout_s: float, vocabulary_size: int, image_token_id: int | None = None
    ) -> None:
        self._http = EngineHttp(url, timeout_s)
        self._name = name
        self._vocabulary_size = vocabulary_size
        self._image_token_id = image_token_id
        # Several teachers, and several runs, may score at one server, which refuses the id of a request in progress.
        self._id_prefix = f"score-{uuid4().hex[:12]}"
        self._numbers = itertools.count()
        self._running = asyncio.Semaphore(MAX_RUNNING)

    async def aclose(self) -> None:
        """Close all connections."""
        await self._http.aclose()

    async def score(
        self,
        token_ids: Sequence[int],
        start: int,
        adapter: str | None = None,
        images: Sequence[PlacedImage] = (),
    ) -> NDArray[np.float32]:
        """Return the log-probabilities of ``token_ids[start:]``, each given all tokens before it, at temperature 1.

        Args:
            token_ids: a prompt, with the tokens of its images in full.
            start: at least 1.
            adapter: name of the engine's LoRA adapter that scores; None: the engine's weights alone.
            images: of the prompt, in the order of their tokens.

        Raises:
            EngineError: the server cannot be reached, refuses, or its reply is not one.
            ConfigError: its tokens of images are not those of the prompt, or the policy takes no images.
        """
        body = score_body(
            [int(token) for token in token_ids], start, f"{self._id_prefix}-{next(self._numbers)}", adapter
        )
        sent_body = with_images(body, images, self._image_token_id, body["rid"])
        async with self._running:
            return await self._send(body, sent_body, self._image_token_id if images else None)

    async def _send(
        self, body: Mapping[str, object], sent_body: Mapping[str, object], image_token_id: int | None
    ) -> NDArray[np.float32]:
        for attempt in itertools.count(1):
            # The server may not have noticed yet that the connection of an earlier attempt is lost.
            attempt_id = {"rid": f"{body['rid']}-{attempt}"}
            try:
                with waiting("scores", f"of {self._name}", self._http.url):
                    async with self._http.request("POST", "/generate", {**sent_body, **attempt_id}) as reply:
                        content = await reply.read()
                scores = read_scores(content, {**body, **attempt_id}, self._vocabulary_size, image_token_id)
                return np.array(scores, np.float32)
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
        server_info: dict[str, Any] = {}
        for path in ("/model_info", "/server_info"):
            reply = await control.call(path, None)
            server_info |= reply if isinstance(reply, dict) else {}
        return server_info


class _Meta(msgspec.Struct):
    """``meta_info`` of a scored prompt."""

    finish_reason: Finish
    id: str
    prompt_tokens: int
    completion_tokens: int
    input_token_logprobs: list[tuple[float | None, TokenId, str | None]]


class _Reply(msgspec.Struct):
    meta_info: _Meta
    prompt_token_ids: list[int] | None = None


_REPLIES = msgspec.json.Decoder(_Reply)


def score_body(ids: Sequence[int], start: int, rid: str, adapter: str | None = None) -> dict[str, Any]:
    """Return the body for ``/generate`` that scores the tokens of a prompt from ``start`` on, which is at least 1.

    ``adapter`` is the name of the engine's LoRA adapter.
    """
    sampling = {"max_new_tokens": 0, "temperature": 1.0}
    # Engines give the first token from logprob_start_len on no log-probability.
    options = {"return_logprob": True, "logprob_start_len": start - 1, "rid": rid}
    body = {"input_ids": list(ids), "sampling_params": sampling, **options}
    return body if adapter is None else body | {"lora_path": adapter}


def read_scores(
    content: bytes, body: Mapping[str, Any], vocabulary_size: int, image_token_id: int | None = None
) -> tuple[float, ...]:
    """Return the log-probabilities, at temperature 1, of a prompt's tokens.

    Args:
        content: the reply of ``/generate``.
        body: the request that it answers, with the tokens of images in full; see `score_body`.
        vocabulary_size: of the policy's model. SGLang 0.5.23 writes 0 in place of the last id.
        image_token_id: of a prompt with images; SGLang writes 0 in place of it. None: the prompt has none.

    Raises:
        SamplerError: it is not a reply to this request: another prompt length, other ids, impossible values.
        ConfigError: the engine has expanded images to other tokens; see `check_expansion`.
    """
    try:
        reply = _REPLIES.decode(content)
    except NOT_A_REPLY as error:
        raise SamplerError(f"the reply to {body['rid']} is not one: {error}") from error
    meta = reply.meta_info
    if image_token_id is not None:
        check_expansion(body["input_ids"], reply.prompt_token_ids, meta.prompt_tokens, body["rid"])
    ids, (first, *entries) = (
        body["input_ids"][body["logprob_start_len"] :],
        meta.input_token_logprobs or [(None, -1, None)],
    )
    logprobs = [entry[0] for entry in entries if entry[0] is not None]
    echoed = [first[1], *(entry[1] for entry in entries)]
    ids_match = all(
        sent_id == echoed_id or (sent_id in (vocabulary_size - 1, image_token_id) and not echoed_id)
        for sent_id, echoed_id in zip(ids, echoed, strict=False)
    )
    faults = {
        f"is to {meta.id[:100]!r}, not to {body['rid']!r}": meta.id != body["rid"],
        f"ended with {meta.finish_reason.type[:100]!r}": meta.finish_reason.type != "length",
        f"counts {meta.prompt_tokens} prompt tokens, {len(body['input_ids'])} were sent": meta.prompt_tokens
        != len(body["input_ids"]),
        f"has {meta.completion_tokens} sampled tokens": meta.completion_tokens != 0,
        f"has {len(echoed)} scored tokens, {len(ids)} were requested": len(echoed) != len(ids),
        "has other token ids than were sent": not ids_match,
        "has no log-probability for a token": len(logprobs) != len(entries),
        f"has a log-probability of {max(logprobs, default=0.0)}": max(logprobs, default=0.0) > ROUNDING,
    }
    for fault, applies in faults.items():
        if applies:
            raise SamplerError(f"the reply to {body['rid']} {fault}")
    return tuple(min(value, 0.0) for value in logprobs)
