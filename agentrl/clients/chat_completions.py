"""Models behind OpenAI's chat completions: opponents in games, and models that are evaluated."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from typing import TypeVar, cast
from weakref import WeakValueDictionary

from agentrl.clients.chat_messages import call_from_wire, reply_to_wire, tool_to_wire, with_reasoning
from agentrl.clients.http import Json, ServiceClient, UnusableReplyError
from agentrl.config.services import ChatModelConfig
from agentrl.core.chat_endpoint import ChatReply, Usage, WireMessage
from agentrl.core.errors import ConfigError, SamplerError, ServiceError, ServiceRefusedError
from agentrl.core.tool import Tool
from agentrl.core.types import FinishReason, Message, SamplingParams

_log = logging.getLogger(__name__)

T = TypeVar("T")

ROUTE = "/chat/completions"
_STOPS = 4
"""Stop strings that OpenAI takes."""
_ENDS = {"stop": FinishReason.STOP, "tool_calls": FinishReason.STOP, "function_call": FinishReason.STOP,
         "length": FinishReason.LENGTH}  # fmt: skip
"""``finish_reason`` of a turn. With others, such as SGLang's ``abort``, the server has ended it: its text is no turn."""
_REASONING = ("reasoning_content", "reasoning")
_REASONING_FIELDS = (*_REASONING, "reasoning_details", "thinking_blocks")
"""Fields of a reply that are sent back with ``send_reasoning``."""


class ChatCompletions:
    """Requests turns from ``URL/chat/completions``; implements `agentrl.core.chat_endpoint.ChatEndpoint`.

    `open_chat_model` makes one for each process, so that its limits hold for all episodes of the process.

    Args:
        config: address, model and limits.
        key: configuration key of ``config``, for messages.
        client: sends the requests; by default one for ``config``.
    """

    def __init__(self, config: ChatModelConfig, key: str, client: ServiceClient | None = None) -> None:
        self.client = client or ServiceClient(config, key)
        """Sends the requests, and counts them."""
        self.usage = Usage()
        """Tokens of all requests so far."""
        self._config = config
        self._key = key
        self._tokens_field = "max_tokens"
        self._sends_stop = True

    def __reduce__(self) -> tuple[Callable[..., ChatCompletions], tuple[ChatModelConfig, str]]:
        """Pickle as the model of another process."""
        return open_chat_model, (self._config, self._key)

    @property
    def model(self) -> str:
        """Name of the model."""
        return self._config.model

    def keep_connections(self) -> AbstractAsyncContextManager[object]:
        """Return a context in which connections stay open between requests."""
        return self.client

    async def reply(self, messages: Sequence[WireMessage], tools: Sequence[Tool], params: SamplingParams) -> ChatReply:
        """Return the next turn; see `ChatEndpoint.reply`.

        Raises:
            SamplerError: the endpoint refused the request, failed at every attempt, or its reply is no turn.
        """
        try:
            return await self.request(messages, tools, params)
        except ServiceError as error:
            raise SamplerError(str(error)) from error

    async def request(
        self, messages: Sequence[WireMessage], tools: Sequence[Tool], params: SamplingParams
    ) -> ChatReply:
        """Return the next turn.

        Raises:
            ServiceError: see `ServiceClient.post`.
        """
        reply = await self._post(messages, tools, params, lambda reply: self._read(reply, params))
        self.usage += reply.usage
        return reply

    async def check(self, samplings: Iterable[tuple[float, float, int]]) -> None:
        """Request one token, to find out whether address, key, model and sampling parameters are right.

        Args:
            samplings: temperature, top-p and top-k of requests to come.

        Raises:
            ConfigError: the endpoint refuses the request, or does not answer; the message has the key to change.
        """
        for temperature, top_p, top_k in dict.fromkeys(samplings):
            params = SamplingParams(max_new_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, seed=0)
            try:
                await self._post(({"role": "user", "content": "Say yes."},), (), params, _check_choices)
            except ServiceError as error:
                raise ConfigError(str(error)) from error

    async def _post(
        self,
        messages: Sequence[WireMessage],
        tools: Sequence[Tool],
        params: SamplingParams,
        read: Callable[[object], T],
    ) -> T:
        """Send a request, again with another name of its limit, or without stop strings, if the endpoint wants that.

        So do OpenAI's reasoning models. A text is cut at the stop strings here in any case.
        """
        while True:
            field, sends_stop = self._tokens_field, self._sends_stop
            try:
                return await self._post_body(self._body(messages, tools, params), read)
            except ServiceRefusedError as error:
                text, model = str(error), self._config.model
                if error.status != 400:
                    raise
                if field == "max_tokens" and "max_completion_tokens" in text:
                    _log.info("%s takes max_completion_tokens in place of max_tokens", model)
                    self._tokens_field = "max_completion_tokens"
                elif sends_stop and params.stop and "'stop'" in text:
                    _log.info("%s takes no stop strings: its turns are longer, and cut here", model)
                    self._sends_stop = False
                else:
                    raise

    async def _post_body(self, body: Json, read: Callable[[object], T]) -> T:
        try:
            return await self.client.post(ROUTE, body, read, about=f", model {self._config.model}")
        except ServiceRefusedError as error:
            if error.status not in (400, 422):
                raise
            hint = f"{self._key}.options sets further fields of requests, and with null leaves one out"
            raise ServiceRefusedError(f"{error}; {hint}", error.status) from None

    def _body(self, messages: Sequence[WireMessage], tools: Sequence[Tool], params: SamplingParams) -> Json:
        body: Json = {
            "model": self._config.model,
            "messages": list(messages),
            "temperature": params.temperature,
            self._tokens_field: params.max_new_tokens,
        }
        if params.seed is not None:
            body["seed"] = params.seed
        if params.top_p < 1:
            body["top_p"] = params.top_p
        if params.top_k > 0:
            body["top_k"] = params.top_k
        if params.stop and self._sends_stop:
            body["stop"] = list(params.stop[:_STOPS])
        if tools:
            body["tools"] = [tool_to_wire(tool) for tool in tools]
        body |= self._config.options
        return {name: value for name, value in body.items() if value is not None}

    def _read(self, reply: object, params: SamplingParams) -> ChatReply:
        """Return the turn of a reply.

        Raises:
            UnusableReplyError: it has none.
        """
        shown = f"{reply!r:.200}"
        try:
            body = cast("Json", reply)
            choice = body["choices"][0]
            wire, end = choice["message"], choice.get("finish_reason")
            text, calls = wire.get("content"), tuple(map(call_from_wire, wire.get("tool_calls") or ()))
            usage = _read_usage(body.get("usage"))
        except (KeyError, IndexError, TypeError, AttributeError) as error:
            raise UnusableReplyError(f"a reply without a text ({type(error).__name__}: {error}): {shown}") from None
        if isinstance(text, list):  # content in parts
            text = "".join(part.get("text") or "" for part in text if isinstance(part, Mapping))
        reasoning = next((wire[name] for name in _REASONING if isinstance(wire.get(name), str)), "")
        if end == "content_filter":
            raise UnusableReplyError(
                f"the endpoint's filter withheld the reply (finish_reason='content_filter'): {shown}"
            )
        if end not in _ENDS:
            raise UnusableReplyError(f"a reply with finish_reason={end!r}: {shown}", again=True)
        if not isinstance(text, str) and not (text is None and (calls or reasoning)):
            raise UnusableReplyError(f"a reply without a text: {shown}")
        finish = _ENDS[end]
        if finish is FinishReason.LENGTH and not (text or "").strip() and not calls and not reasoning:
            limit = params.max_new_tokens
            raise UnusableReplyError(f"max_new_tokens={limit} ended a reply before it had a text; raise it")
        text = text or ""
        if finish is FinishReason.STOP and not calls:
            text += _left_out_stop(text, choice, params.stop)
        text, was_cut = _up_to_stop(text, params.stop)
        if was_cut:
            calls, finish = (), FinishReason.STOP
        message = Message("assistant", with_reasoning(reasoning, text), calls)
        fields = _REASONING_FIELDS if self._config.send_reasoning else ()
        return ChatReply(message, reply_to_wire(wire, text, calls, fields), finish, usage)


_MODELS: WeakValueDictionary[tuple[str, str], ChatCompletions] = WeakValueDictionary()


def open_chat_model(config: ChatModelConfig, key: str) -> ChatCompletions:
    """Return the model of a configuration in this process; the same one as long as it is used.

    Args:
        config: address, model and limits.
        key: configuration key of ``config``, for messages.
    """
    names = set(ChatModelConfig.model_fields)
    name = (key, config.model_dump_json(include=names))
    model = _MODELS.get(name)
    if model is None:
        model = _MODELS[name] = ChatCompletions(config, key)
    return model


def _check_choices(reply: object) -> None:
    """Check that a reply is one of chat completions.

    Raises:
        UnusableReplyError: it is not.
    """
    if not isinstance(reply, Mapping) or not isinstance(reply.get("choices"), list):
        raise UnusableReplyError(f"a reply without choices: {reply!r:.200}")


def _read_usage(usage: object) -> Usage:
    """Return the usage of a reply; 0 where it has no number."""
    if not isinstance(usage, Mapping):
        return Usage()
    prompt, sampled = (usage.get(f"{name}_tokens_details") or {} for name in ("prompt", "completion"))
    values = (
        usage.get("prompt_tokens"),
        usage.get("completion_tokens"),
        prompt.get("cached_tokens"),
        sampled.get("reasoning_tokens"),
    )
    return Usage(*(value if isinstance(value, int) and value > 0 else 0 for value in values))


def _left_out_stop(text: str, choice: Json, stop: Sequence[str]) -> str:
    """Return the stop string that ended a turn, which servers leave out of its text; empty if none did.

    SGLang and vLLM name it. Other servers do not: there it is the end tag of a tag that the text leaves open.
    """
    if any(string in text for string in stop):
        return ""
    for name in ("matched_stop", "stop_reason"):
        if choice.get(name) in stop:
            return str(choice[name])
    for string in stop:
        if string.startswith("</") and f"<{string[2:]}" in text:
            return string
    return ""


def _up_to_stop(text: str, stop: Sequence[str]) -> tuple[str, bool]:
    """Return the text up to the first stop string, which stays in it as in a policy's turn: servers would leave it out."""
    ends = [text.index(string) + len(string) for string in stop if string in text]
    return (text[: min(ends)], True) if ends else (text, False)
