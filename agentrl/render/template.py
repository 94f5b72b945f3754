"""A renderer for any Hugging Face chat template."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.errors import ConfigError, ModelError
from agentrl.render.boundary import Proof, boundary_text, prove
from agentrl.render.literal import LiteralEncoder
from agentrl.render.toolcalls import MARKUP, hermes_calls
from agentrl.tool import Tool
from agentrl.types import Message, Prompt

_THINK_END = "</think>"


class ChatTemplateRenderer:
    """Turns messages into tokens and back, as the tokenizer's chat template says.

    Sampled ids are never decoded and encoded again: `bridge` appends to them. Special-token text inside messages is
    encoded as plain text. Not for use from several threads at once.

    A conversation that starts with an inline message is a raw prompt: it gets no template, and its first text is encoded
    as it is, with the special tokens that it names. A tokenizer without a chat template can do just this.

    Args:
        tokenizer: the policy's tokenizer.
        end_token_id: ends a turn; without it, the token that the template puts after an assistant message, or without a
            template the tokenizer's own end token.

    Raises:
        ModelError: the tokenizer has no end token.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, end_token_id: int | None = None) -> None:
        self._tokenizer = tokenizer
        self._where = f"tokenizer of model.path={tokenizer.name_or_path!r}"
        self._encoder = LiteralEncoder(tokenizer)
        self._prove = lru_cache(maxsize=64)(self._prove_uncached)
        self._boundary = lru_cache(maxsize=8192)(self._boundary_uncached)
        self._specials = frozenset(self._encoder.special_ids.values())
        self._end = self._find_end() if end_token_id is None else end_token_id
        self._ends = frozenset(index for index in (self._end, tokenizer.eos_token_id) if index is not None)

    @property
    def end_token_id(self) -> int:
        """The token that ends a turn of the policy."""
        return self._end

    @property
    def pad_token_id(self) -> int:
        """The token that fills batches: the tokenizer's padding token, else the end token; nothing attends to it."""
        pad = self._tokenizer.pad_token_id
        return int(pad) if pad is not None else self._end

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        """Return the whole conversation as a prompt that asks the policy to speak next.

        Inline messages continue the assistant message before them. Where they come last, the policy's turn is still
        open, and the prompt ends with them. Where the first message is inline there is no template, see the class.

        Raises:
            ConfigError: the template refuses the conversation, or there is none for messages that need it.
            ModelError: there is no template at all.
        """
        if messages and messages[0].inline:
            return self._raw(messages)
        if not self._tokenizer.chat_template:
            raise ModelError(
                f"{self._where} has no chat template; set model.path to a chat or instruct model, or "
                "data.apply_chat_template=false to give it prompts as they are"
            )
        merged = _merge_inline(messages)
        if messages and messages[-1].inline and merged[-1].role == "assistant":
            return Prompt(self.render(merged[:-1], tools).token_ids + self.encode(merged[-1].content))
        try:
            text = self._text(merged, tools, True)
        except Exception as error:
            roles = ", ".join(message.role for message in merged)
            raise ConfigError(
                f"the chat template of the {self._where} refuses messages of roles {roles}: {error}"
            ) from error
        return Prompt(self._encoder.template(text))

    def bridge(
        self, previous: Prompt, sampled_ids: Sequence[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Prompt | None:
        """Return ``previous + sampled_ids + the template's boundary with the new messages + the opener``.

        The boundary holds what the engine did not sample of the end of the turn: the end token where a stop string or
        the length ended it, and the template's newline after it always. Inline messages are appended as they are.
        None where dummy conversations show that the template changes earlier turns before messages of these roles, or
        where the policy ended its turn with another special token than the template's.
        """
        inline = 0
        while inline < len(new) and new[inline].inline:
            inline += 1
        added = tuple(sampled_ids) + tuple(index for message in new[:inline] for index in self.encode(message.content))
        rest = tuple(new[inline:])
        if not rest:
            return Prompt(previous.token_ids + added)
        if any(message.inline for message in rest) or not self._proven(previous, added, rest, tuple(tools)):
            return None
        boundary = self._boundary(_Key(rest, tuple(tools)))
        if boundary is None:
            return None
        if sampled_ids and sampled_ids[-1] in self._specials and not inline:
            if sampled_ids[-1] != boundary[0]:
                return None
            boundary = boundary[1:]
        return Prompt(previous.token_ids + (added + boundary))

    def parse(self, sampled_ids: Sequence[int]) -> Message:
        """Return what the policy said as an assistant message, its end token left out. Never raises.

        The content is the whole text as it was sampled, tool calls included, so that rendering it again gives the same
        characters; ``tool_calls`` holds the well-formed calls in it.
        """
        end = len(sampled_ids)
        if end and sampled_ids[end - 1] in self._ends:
            end -= 1
        text = self.decode(sampled_ids[:end])
        return Message("assistant", text, hermes_calls(text) if MARKUP in text else ())

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special tokens included."""
        text = self._tokenizer.decode(list(token_ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of text, in which no special token is meant, without any token added."""
        return self._encoder.content(text)

    def _raw(self, messages: Sequence[Message]) -> Prompt:
        """Return a raw prompt with what follows it in the same text: what the policy said, and inline messages."""
        first, *rest = messages
        turns = [message.role for message in rest if not message.inline and message.role != "assistant"]
        if turns:
            raise ConfigError(
                f"the conversation starts with a raw prompt, and messages of roles {', '.join(turns)} follow that only a "
                "chat template can put behind it; set data.apply_chat_template=true, or send inline messages"
            )
        ids = list(self._tokenizer.encode(first.content, add_special_tokens=False))
        return Prompt(tuple(ids) + tuple(index for message in rest for index in self.encode(message.content)))

    def _text(self, messages: Sequence[Message], tools: Sequence[Tool], opener: bool) -> str:
        text = self._tokenizer.apply_chat_template(
            [self._as_dict(message) for message in messages],
            tools=[self._schema(tool) for tool in tools] or None,
            add_generation_prompt=opener,
            tokenize=False,
        )
        assert isinstance(text, str)
        return text

    def _as_dict(self, message: Message) -> dict[str, Any]:
        said: dict[str, Any] = {"role": message.role, "content": self._encoder.escape(message.content)}
        if message.tool_call_id is not None:
            said["tool_call_id"] = message.tool_call_id
        if message.tool_calls and MARKUP not in message.content:  # else the content already says them, word for word
            escape = self._encoder.escape_json
            said["tool_calls"] = [
                {
                    "type": "function",
                    "id": call.id,
                    "function": {"name": call.name, "arguments": escape(call.arguments)},
                }
                for call in message.tool_calls
            ]
        return said

    def _schema(self, tool: Tool) -> dict[str, Any]:
        function = {"name": tool.name, "description": tool.description, "parameters": tool.parameters}
        return {"type": "function", "function": self._encoder.escape_json(function)}

    def _proven(
        self, previous: Prompt, added: tuple[int, ...], new: tuple[Message, ...], tools: tuple[Tool, ...]
    ) -> bool:
        proof = self._prove(tuple(message.role for message in new), _Key((), tools))
        if proof.preserves and not proof.preserves_reasoning:
            return _THINK_END not in self.decode(previous.token_ids + added)
        return proof.preserves

    def _prove_uncached(self, roles: tuple[str, ...], key: _Key) -> Proof:
        return prove(self._text, roles, key.tools)

    def _boundary_uncached(self, key: _Key) -> tuple[int, ...] | None:
        text = boundary_text(self._text, key.messages, key.tools)
        return self._encoder.template(text) if text else None

    def _find_end(self) -> int:
        after = self._boundary(_Key((Message("user", "nw1"),), ()))
        if after is not None and after[0] in self._specials:
            return after[0]
        if self._tokenizer.eos_token_id is None:
            raise ModelError(f"{self._where} has no end token: neither its chat template nor its eos_token ends a turn")
        return int(self._tokenizer.eos_token_id)


class _Key:
    """Messages and tools as a cache key: they hold JSON values, which cannot be hashed, so their text is."""

    __slots__ = ("_text", "messages", "tools")

    def __init__(self, messages: tuple[Message, ...], tools: tuple[Tool, ...]) -> None:
        self.messages = messages
        self.tools = tools
        self._text = (
            tuple(
                (message.role, message.content, message.tool_call_id, repr(message.tool_calls)) for message in messages
            ),
            tuple((tool.name, tool.description, repr(tool.parameters)) for tool in tools),
        )

    def __hash__(self) -> int:
        return hash(self._text)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Key) and self._text == other._text


def _merge_inline(messages: Sequence[Message]) -> list[Message]:
    merged: list[Message] = []
    for message in messages:
        if message.inline and merged and merged[-1].role == "assistant":
            merged[-1] = Message("assistant", merged[-1].content + message.content)
        else:
            merged.append(message)
    return merged
