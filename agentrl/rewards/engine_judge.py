"""A judge that an engine of the run samples: messages in, a message out, by the model's own chat format."""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from agentrl.core.chat_endpoint import ChatReply, Usage, WireMessage
from agentrl.core.sampler import Sampler
from agentrl.core.tool import Tool
from agentrl.core.types import Message, Prompt, SamplingParams
from agentrl.obs.waiting import waiting
from agentrl.render.base import Renderer


class EngineJudge:
    """Implements `agentrl.core.chat_endpoint.ChatEndpoint` with an engine of the run.

    Args:
        model: name of the model, for messages.
        renderer: of its chat format.
        sampler: of its engines.
    """

    def __init__(self, model: str, renderer: Renderer, sampler: Sampler) -> None:
        self._model, self._renderer, self._sampler = model, renderer, sampler
        self._name = f"judge-{secrets.token_hex(8)}"  # engines are shared with other processes of the run
        self._numbers = itertools.count()

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._model

    @asynccontextmanager
    async def keep_connections(self) -> AsyncIterator[None]:
        """Do nothing: connections to engines stay open."""
        yield

    async def reply(self, messages: Sequence[WireMessage], tools: Sequence[Tool], params: SamplingParams) -> ChatReply:
        """Return the next turn; see `ChatEndpoint.reply`.

        Raises:
            SamplerError: the engine failed, or the conversation does not fit into it.
            ConversationError: the chat format refuses the messages.
        """
        prompt: Prompt = self._renderer.render([Message(wire["role"], wire["content"]) for wire in messages], tools)
        params = replace(
            params, stop_token_ids=tuple(dict.fromkeys((*params.stop_token_ids, *self._renderer.end_token_ids)))
        )
        request_id = f"{self._name}/{next(self._numbers)}"
        try:
            with waiting("judge", request_id):
                generation = await self._sampler.generate(prompt, params, session_id=request_id, request_id=request_id)
        except asyncio.CancelledError:
            await self._sampler.abort(request_id)
            raise
        finally:
            await self._sampler.close_session(request_id)
        message = self._renderer.parse(generation.token_ids, tools, prompt_ids=prompt.token_ids)
        usage = Usage(len(prompt.token_ids), len(generation.token_ids), generation.cached_tokens)
        wire = {"role": "assistant", "content": message.content}
        return ChatReply(message, wire, generation.finish_reason, usage)
