"""A model at an endpoint that a test scripts: no server, messages in and messages out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from agentrl.clients.chat_messages import reply_to_wire
from agentrl.core.chat_endpoint import ChatReply, Usage, WireMessage
from agentrl.core.tool import Tool
from agentrl.core.types import FinishReason, Message, SamplingParams, ToolCall


@dataclass(frozen=True)
class Requested:
    """What was requested of the endpoint."""

    messages: list[WireMessage]
    tools: tuple[str, ...]
    params: SamplingParams


Turn = str | tuple[str, Sequence[ToolCall]] | tuple[str, FinishReason] | Exception
Script = Sequence[Turn] | Callable[[Requested], Turn]
"""Turns in their order, or by request: a text, one with calls, one that its limit ended, or an error."""


@dataclass
class ScriptedEndpoint:
    """Implements `agentrl.core.chat_endpoint.ChatEndpoint`. Each message counts as 10 tokens, a turn as 5."""

    script: Script
    model: str = "big"
    requests: list[Requested] = field(default_factory=list)
    connections: int = 0
    """Contexts of `keep_connections` that are open."""

    @asynccontextmanager
    async def keep_connections(self) -> AsyncIterator[None]:
        self.connections += 1
        try:
            yield
        finally:
            self.connections -= 1

    async def reply(self, messages: Sequence[WireMessage], tools: Sequence[Tool], params: SamplingParams) -> ChatReply:
        request = Requested([*messages], tuple(tool.name for tool in tools), params)
        self.requests.append(request)
        turn = self.script(request) if callable(self.script) else self.script[len(self.requests) - 1]
        if isinstance(turn, Exception):
            raise turn
        text, extra = turn if isinstance(turn, tuple) else (turn, ())
        calls = () if isinstance(extra, FinishReason) else tuple(extra)
        finish = extra if isinstance(extra, FinishReason) else FinishReason.STOP
        raw: dict[str, Any] = {"tool_calls": [{"id": call.id, "function": {"name": call.name}} for call in calls]}
        wire = reply_to_wire(raw, text, calls, ())
        return ChatReply(Message("assistant", text, calls), wire, finish, Usage(10 * len(messages), 5))
