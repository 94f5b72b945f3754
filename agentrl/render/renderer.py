"""The renderer of chat formats: messages to tokens, and sampled tokens to messages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property
from itertools import groupby, takewhile
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from typing_extensions import override

from agentrl.core.errors import ConversationError, ModelError
from agentrl.core.images import IMAGE_MARK, ImageSpan, PlacedImage
from agentrl.core.tool import Tool, validate_call
from agentrl.core.types import THINK, Fork, ForkReason, Message, Prompt, ToolCall
from agentrl.models.image_processor import ImageProcessor
from agentrl.models.token_text import byte_level
from agentrl.render.base import Renderer
from agentrl.render.formats.base import Format, InterchangeableEnds, ReadsSampledCalls, WritesImages, split_thinking
from agentrl.render.parsers.base import (
    CallParser,
    OwnText,
    Piece,
    join_pieces,
    reasoning_markers,
    split_markers,
    split_reasoning,
    unreadable_call,
)
from agentrl.render.probes import ArrivalProof, message_shapes
from agentrl.render.special_token_escaping import EscapingEncoder, unicode_json, unicode_text
from agentrl.render.tool_preamble import Preamble
from agentrl.render.written_turns import split_end, turn_body

_OPENER_TOKENS = 16
"""Upper bound of the tokens of ``<think>`` and the white space after it, in any tokenizer."""


class ChatRenderer(Renderer):
    """Converts messages to tokens and sampled tokens to messages, in one chat format; see `Renderer`.

    Special-token text inside messages is encoded as plain text. Not thread-safe.

    A conversation that starts with an inline message is a raw prompt: no chat format is applied, and its first text is
    encoded including the special tokens in it.

    Args:
        tokenizer: tokenizer of the policy.
        format: chat format.
        parser: tool-call parser; that of the format if None.
        end_ids: the model's own end tokens, at which engines stop too.
        escape_added_tokens: see ``render.escape_added_tokens``.
        tool_preamble: describes tools in the system message, in place of the format (``render.tool_preamble``).
        load_images: loads the image processor of the model, at the first image; None if the model reads text only.

    Raises:
        ModelError: the tokenizer lacks the token that ends the format's turns, or one of ``end_ids`` is ordinary text in it.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        format: Format,
        parser: CallParser | None = None,
        *,
        end_ids: Sequence[int] = (),
        escape_added_tokens: bool = False,
        tool_preamble: Preamble | None = None,
        load_images: Callable[[], ImageProcessor] | None = None,
    ) -> None:
        self.format = format
        self._load_images = load_images
        self.tool_preamble = tool_preamble
        """Describes tools in the system message; None: the format does."""
        self._tokenizer = tokenizer
        self._decode = _decoder(tokenizer)
        self._where = f"tokenizer of model.path={tokenizer.name_or_path!r}"
        self._encoder = EscapingEncoder(tokenizer, added_tokens=escape_added_tokens)
        self._plain = EscapingEncoder(tokenizer) if escape_added_tokens else self._encoder
        self._end_ids = self._find_ends(end_ids)
        closings = format.closings if isinstance(format, InterchangeableEnds) else ()
        self._closing_ids = {self._encoder.special_ids[text] for text in closings if text in self._encoder.special_ids}
        self._prepare_parser(parser or format.parser)
        self.arrival = ArrivalProof(format, None if load_images is None else lambda: self.images.placeholder)
        """What arrives in the prompt."""

    def with_parser(self, parser: CallParser) -> ChatRenderer:
        """Return a renderer that reads tool calls with another parser, and is otherwise this one."""
        renderer = copy.copy(self)
        renderer._prepare_parser(parser)
        return renderer

    def _prepare_parser(self, parser: CallParser) -> None:
        """Set the parser, and what is asked of it each turn."""
        self.parser, self._reasoning = parser, reasoning_markers(parser)
        self._own_text = parser if isinstance(parser, OwnText) else None
        self._thought_marks = tuple(marker for pair in self._reasoning for marker in pair)
        self._markers = (*self._thought_marks, *parser.markers)
        self._marker_ids = self._find_markers()
        self._text_markers = tuple(marker for marker in self._markers if marker not in self._marker_ids.values())

    @property
    def reads_images(self) -> bool:
        """Whether messages may have images: the model has an image processor, and the chat format has a place for them."""
        return self._load_images is not None and isinstance(self.format, WritesImages)

    @cached_property
    def images(self) -> ImageProcessor:
        """The image processor of the model.

        Raises:
            ConversationError: it has none, or the chat format has no place for images.
            ModelError, MissingError: see `agentrl.models.image_processor.load_image_processor`.
        """
        if self._load_images is None:
            raise ConversationError(
                f"a message has images, but the model of the {self._where} reads text only; set model.path to a "
                "vision-language model"
            )
        if not isinstance(self.format, WritesImages):
            raise ConversationError(
                f"a message has images, which the chat format render.format={self.format.name} does not write; set "
                "render.format=template"
            )
        return self._load_images()

    @property
    @override
    def end_token_id(self) -> int:
        return self._end_ids[0]

    @property
    @override
    def end_token_ids(self) -> tuple[int, ...]:
        return self._end_ids

    @property
    @override
    def pad_token_id(self) -> int:
        pad = self._tokenizer.pad_token_id
        return int(pad) if pad is not None else self.end_token_id

    @override
    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> Prompt:
        if messages and messages[0].inline:
            return self._raw(messages)
        self._refuse_inline_images([message for message in messages if message.inline])
        if self.tool_preamble is not None:
            messages, tools = self.tool_preamble(messages, tools), ()
        merged = self._escape_messages(messages)
        still_open = bool(messages) and messages[-1].inline and merged[-1].role == "assistant"
        complete = merged[:-1] if still_open else merged
        with self._refusal(complete):
            text = self.format.text(complete, self._escape_tools(tools))
        self._require_arrival(complete, tools)
        ids = self._encoder.template(text)
        if still_open:
            ids += self._encoder.template(merged[-1].content)
        return self._place_images(ids, merged)

    def _place_images(self, ids: tuple[int, ...], messages: Sequence[Message]) -> Prompt:
        """Return ids with the placeholder of each image of ``messages`` replaced by the image's ids.

        Raises:
            ConversationError: there are not as many placeholders as images, or an image cannot be processed.
        """
        images = [image for message in messages for image in message.images]
        if not images:
            return Prompt(ids)
        placeholder = self.images.placeholder_id
        if ids.count(placeholder) != len(images):
            raise ConversationError(
                f"the chat format {self.format.name} of the {self._where} writes {ids.count(placeholder)} of "
                f"{self.images.placeholder!r} for {len(images)} images"
            )
        expanded, placed, start = list[int](), list[PlacedImage](), 0
        for image in images:
            at = ids.index(placeholder, start)
            expanded += ids[start:at]
            image_ids = self.images.expand(image)
            placed.append(PlacedImage(ImageSpan(len(expanded), len(image_ids), image.digest), image))
            expanded += image_ids
            start = at + 1
        return Prompt((*expanded, *ids[start:]), tuple(placed))

    def write_turn(
        self, history: Sequence[Message], message: Message, new: Sequence[Message] = (), tools: Sequence[Tool] = ()
    ) -> tuple[int, ...]:
        """Return the ids that a policy samples to say ``message`` after the prompt of ``history``, its end token included.

        Args:
            history: the conversation so far, as `render` takes it.
            message: of an assistant, not sampled; its reasoning is in ``<think>`` at the start of its content.
            new: the messages that follow, on which the end token may depend.
            tools: tools offered to the policy.

        Raises:
            ConversationError: the format refuses the message after ``history``, or leaves a part of it out.
        """
        if history and history[0].inline:
            return (*self.encode(message.content), self.end_token_id)
        new = new or (Message("tool" if message.tool_calls else "user", ""),)
        if self.tool_preamble is not None:
            history, tools, message = self.tool_preamble(history, tools), (), self.tool_preamble.with_calls(message)
        conversation = self._escape_messages((*history, message))
        *earlier, turn = conversation
        self._require_arrival((*earlier, replace(turn, content=split_thinking(turn.content)[1])), tools)
        ends = {self.decode((index,)): index for index in self._end_ids}
        escaped_tools = self._escape_tools(tools)
        with self._refusal(conversation):
            text, end = split_end(turn_body(self.format, earlier, turn, escaped_tools), ends, self._encoder.special_ids)
        if not end:  # it may be the start of the next message
            sampled = replace(turn, content=text, token_ids=(self.end_token_id,))
            boundary = self.format.boundary((*earlier, sampled), self._escape_messages(new), escaped_tools)
            following = boundary if isinstance(boundary, str) else ""
            end = next((end for end in ends if following.startswith(end)), "")
            text = text.removesuffix(following[: len(following) - len(following.lstrip())])
        return (*self._encoder.template(text), ends.get(end, self.end_token_id))

    @contextmanager
    def _refusal(self, messages: Sequence[Message]) -> Iterator[None]:
        """Turn a ValueError of the format in the body into a ConversationError."""
        try:
            yield
        except ValueError as error:
            roles = ", ".join(message.role for message in messages)
            raise ConversationError(
                f"the chat format {self.format.name} of the {self._where} refuses messages of roles {roles}: {error}"
            ) from error

    def _require_arrival(self, messages: Sequence[Message], tools: Sequence[Tool]) -> None:
        if any(message.images for message in messages):
            _ = self.images  # refuses models without
        try:
            lost = self.arrival.lost(message_shapes(messages), bool(tools))
        except ValueError as error:
            lost = (f"something that probe messages do not show: {error}",)
        if lost:
            raise ConversationError(
                f"the chat format {self.format.name} of the {self._where} leaves out {', '.join(lost)}; set "
                "render.chat_template to a template that has such messages, or render.format; for tool calls also "
                "render.tool_preamble=true"
            )

    @override
    def bridge(
        self, history: Sequence[Message], sampled_ids: Sequence[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> Prompt | Fork:
        inline = tuple(takewhile(lambda message: message.inline, new))
        self._refuse_inline_images(inline)
        added = tuple(index for message in inline for index in self._encoder.content(message.content))
        messages = tuple(new[len(inline) :])
        if not messages:
            return Prompt(added)
        if any(message.images for message in messages):
            self._require_arrival((Message("user", "?"), history[-1], *messages), tools)
        if any(message.inline for message in messages):
            return Fork(ForkReason.TEMPLATE, "inline messages follow other new messages")
        if self.tool_preamble is not None and not history[0].inline:
            history, tools = self.tool_preamble(history, tools), ()
        escaped = [self._escape_message(message) for message in messages]
        *earlier, turn = _merge_inline(self._join_cut_turns((*history, *inline)))
        turn = replace(turn, tool_calls=self._escape_calls(turn))
        boundary = self.format.boundary((*earlier, turn), escaped, self._escape_tools(tools))
        if isinstance(boundary, Fork):
            return boundary
        ids = self._encoder.template(boundary)
        if not sampled_ids or inline or sampled_ids[-1] not in self._end_ids:
            return self._place_images(added + ids, messages)
        following = self._after_end(sampled_ids[-1], ids)
        return following if isinstance(following, Fork) else self._place_images(following, messages)

    def _refuse_inline_images(self, messages: Sequence[Message]) -> None:
        if any(message.images for message in messages):
            raise ConversationError(
                "an inline message or raw prompt has images: only the chat template says how images are written; send them in "
                "messages that are not inline, and set data.apply_chat_template=true"
            )

    @override
    def parse(
        self, sampled_ids: Sequence[int], tools: Sequence[Tool] = (), *, prompt_ids: Sequence[int] = ()
    ) -> Message:
        end = len(sampled_ids)
        if end and sampled_ids[end - 1] in self._end_ids:
            end -= 1
        ids = tuple(sampled_ids[:end])
        text = self.decode(ids)
        pieces = tuple(self._pieces(ids, text))
        return Message(
            "assistant", text, tuple(self._calls(pieces, tools, self._opens_reasoning(prompt_ids))), token_ids=ids
        )

    @override
    def split_turn(self, message: Message, *, prompt_ids: Sequence[int] = ()) -> tuple[str, str]:
        pieces = tuple(self._pieces(message.token_ids, message.content))
        if self._own_text is not None:
            return self._own_text.split_text(pieces)
        reasoning, spoken = split_reasoning(pieces, opened=self._opens_reasoning(prompt_ids), markers=self._reasoning)
        thought = join_pieces(
            [piece for piece in reasoning if not (piece.marker and piece.text in self._thought_marks)]
        )
        if any(call.is_readable for call in message.tool_calls):
            marks = self.parser.markers
            # A format without markers writes calls as the whole turn.
            end = next((index for index, piece in enumerate(spoken) if piece.marker and piece.text in marks), 0)
            spoken = spoken[:end]
        text = join_pieces(spoken)
        return thought.strip("\n"), text.lstrip("\n") if reasoning else text

    @override
    def decode(self, token_ids: Sequence[int]) -> str:
        return self._decode(token_ids)

    def encode(self, text: str) -> tuple[int, ...]:
        """Return the ids of plain text: special-token text in it is not special, and no token is added."""
        return self._plain.content(text)

    @property
    def unescaped_tokens(self) -> tuple[str, ...]:
        """Added tokens whose text in contents becomes the token; ``render.escape_added_tokens`` escapes them too."""
        return self._encoder.unescaped

    def _opens_reasoning(self, prompt_ids: Sequence[int]) -> bool:
        """Return whether a prompt ends with ``<think>``; in DeepSeek R1 it does not after a tool result."""
        if not self.format.opens_thinking or not prompt_ids:
            return self.format.opens_thinking
        return self.decode(prompt_ids[-_OPENER_TOKENS:]).rstrip().endswith(THINK)

    def _calls(self, pieces: Sequence[Piece], tools: Sequence[Tool], opened: bool) -> Iterable[ToolCall]:
        _, spoken = split_reasoning(pieces, opened=opened, markers=self._reasoning)
        calls = map(_unicode_call, self.parser.calls(spoken, tools) if spoken else [])
        return (validate_call(call, tools) for call in calls) if tools else calls

    def _pieces(self, ids: Sequence[int], text: str) -> Iterable[Piece]:
        """Cut a turn, whose whole ``text`` is known, at markers: by id if they are tokens, otherwise by text."""
        plain = self._text_markers
        if self._marker_ids.keys().isdisjoint(ids):
            yield from split_markers([text], plain)
            return
        start = 0
        for index, token in enumerate([*ids, None]):
            if token is not None and token not in self._marker_ids:
                continue
            if index > start:
                yield from split_markers([self.decode(ids[start:index])], plain)
            if token is not None:
                yield Piece(self._marker_ids[token], marker=True)
            start = index + 1

    def _find_markers(self) -> dict[int, str]:
        added = {token.content: index for index, token in self._tokenizer.added_tokens_decoder.items()}
        return {added[marker]: marker for marker in self._markers if marker in added}

    def _find_ends(self, model_ends: Sequence[int]) -> tuple[int, ...]:
        special = self._encoder.special_ids
        ends = [special[text] for text in self.format.ends if text in special]
        if self.format.ends and (not ends or ends[0] != special.get(self.format.ends[0])):
            raise ModelError(
                f"the {self._where} has no token {self.format.ends[0]!r}, which ends a turn of the chat format "
                f"{self.format.name}; set render.format"
            )
        if self._tokenizer.eos_token_id is not None:
            ends.append(int(self._tokenizer.eos_token_id))
        added = self._tokenizer.added_tokens_decoder
        for index in model_ends:
            if index < len(self._tokenizer) and index not in added and index not in self._tokenizer.all_special_ids:
                raise ModelError(
                    f"eos_token_id in config.json or generation_config.json has {index}, which is {self.decode((index,))!r} for "
                    f"the {self._where}: engines end every turn at this text; correct the file, or model.path"
                )
        ends += model_ends
        if not ends:
            raise ModelError(f"{self._where} has no end token: neither its chat template nor its eos_token ends a turn")
        return tuple(dict.fromkeys(ends))

    def _after_end(self, sampled: int, boundary: tuple[int, ...]) -> tuple[int, ...] | Fork:
        """Return the boundary without the end token that the policy has sampled."""
        if boundary and (sampled == boundary[0] or {sampled, boundary[0]} <= self._closing_ids):
            return boundary[1:]
        sampled_text, expected_text = self.decode((sampled,)), self.decode(boundary[:1])
        return Fork(
            ForkReason.END_TOKEN, f"the turn ended with {sampled_text!r} instead of the format's {expected_text!r}"
        )

    def _raw(self, messages: Sequence[Message]) -> Prompt:
        """Return a raw prompt with the assistant and inline messages that continue its text."""
        self._refuse_inline_images(messages)
        first, *continuation = messages
        turns = [message.role for message in continuation if not message.inline and message.role != "assistant"]
        if turns:
            raise ConversationError(
                f"the conversation starts with a raw prompt, and messages of roles {', '.join(turns)} follow, which need a chat "
                "template; set data.apply_chat_template=true, or send inline messages"
            )
        ids = list(self._tokenizer.encode(first.content, add_special_tokens=False))
        return Prompt(tuple(ids) + tuple(index for message in continuation for index in self.encode(message.content)))

    def _join_cut_turns(self, messages: Sequence[Message]) -> Sequence[Message]:
        """Return the messages with each turn that was cut and continued as one, decoded as a whole: a cut may split a letter."""
        joined: list[Message] = []
        for message in messages:
            if joined and message.inline and message.token_ids and joined[-1].token_ids:
                previous = joined[-1]
                ids, calls = previous.token_ids + message.token_ids, previous.tool_calls + message.tool_calls
                joined[-1] = replace(previous, content=self.decode(ids), token_ids=ids, tool_calls=calls)
            else:
                joined.append(message)
        return joined

    def _escape_messages(self, messages: Sequence[Message]) -> Sequence[Message]:
        with_images = any(message.images for message in messages)
        return _merge_inline([self._escape_message(message, with_images) for message in self._join_cut_turns(messages)])

    def _escape_message(self, message: Message, with_images: bool = False) -> Message:
        """Return a message with special-token text escaped, except for special tokens that the policy sampled.

        In a conversation with images, placeholders that it sampled are escaped too: no image belongs to them.
        """
        escape = self._encoder.escape
        if message.token_ids:  # the content has the calls verbatim
            calls = self._escape_calls(message) if isinstance(self.format, ReadsSampledCalls) else ()
            escaped_ids = {self.images.placeholder_id, *self.images.pad_ids} if with_images else set[int]()
            return replace(message, content=self._escape_sample(message, escaped_ids), tool_calls=calls)
        calls = self._escape_calls(message)
        call_id = None if message.tool_call_id is None else escape(message.tool_call_id)
        content = self._escape_content(message)
        return replace(message, content=content, tool_calls=calls, tool_call_id=call_id)

    def _escape_content(self, message: Message) -> str:
        """Return the content of a message that was not sampled, escaped except for the marks of its images."""
        texts = message.content.split(IMAGE_MARK) if message.images else [message.content]
        special_only = message.role == "assistant"
        return IMAGE_MARK.join(self._encoder.escape(text, special_only=special_only) for text in texts)

    def _escape_calls(self, message: Message) -> tuple[ToolCall, ...]:
        escape, json = self._encoder.escape, self._encoder.escape_json
        return tuple(
            replace(call, id=escape(call.id), name=escape(call.name), arguments=json(call.arguments))
            for call in message.tool_calls
        )

    def _escape_sample(self, message: Message, escaped_ids: Set[int]) -> str:
        """Return a sampled message's text, with special-token text escaped unless it was sampled as a special token.

        Tokens of ``escaped_ids`` are escaped even then.
        """
        special = set(self._encoder.special_ids.values()) - escaped_ids
        runs = groupby(message.token_ids, special.__contains__)
        texts = [(self.decode(tuple(run)), is_special) for is_special, run in runs]
        return "".join(text if is_special else self._encoder.escape(text) for text, is_special in texts)

    def _escape_tools(self, tools: Sequence[Tool]) -> list[Tool]:
        def escape_tool(tool: Tool) -> Tool:
            json: Any = self._encoder.escape_json
            return replace(
                tool, name=json(tool.name), description=json(tool.description), parameters=json(tool.parameters)
            )

        return [escape_tool(tool) for tool in tools]


def _unicode_call(call: ToolCall) -> ToolCall:
    """Return a call without lone surrogates, which JSON can spell but tokenizers and JSON writers reject."""
    name, id, fault = unicode_text(call.name), unicode_text(call.id), unicode_text(call.fault)
    try:
        return replace(call, name=name, id=id, arguments=unicode_json(call.arguments), fault=fault)
    except RecursionError:
        return unreadable_call("the arguments are nested too deeply", name)


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    """Return a function that decodes ids as the tokenizer does, in a fraction of the time.

    If no class of the tokenizer has another, the backend's own decoder is used: transformers checks the type of each id first.
    Tokens of a byte-level vocabulary are bytes, which are looked up.
    """
    kind = type(tokenizer)
    plain = kind.decode is PreTrainedTokenizerBase.decode and kind._decode is PreTrainedTokenizerFast._decode
    if not isinstance(tokenizer, PreTrainedTokenizerFast) or not plain:
        decode: Any = tokenizer.decode
        return lambda ids: str(decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))
    backend = tokenizer.backend_tokenizer
    if isinstance(backend.decoder, ByteLevel):
        token_bytes = _TokenBytes(backend)
        return lambda ids: b"".join(map(token_bytes.__getitem__, ids)).decode(errors="replace")
    return lambda ids: str(backend.decode(list(ids), skip_special_tokens=False))


class _TokenBytes(dict[int, bytes]):
    """The bytes of tokens by id, in a byte-level vocabulary: each character of a token stands for a byte.

    A token with any other character, such as an added one, is its text. As in ``decoders.ByteLevel`` of tokenizers; ids without
    a token have no bytes.
    """

    def __init__(self, backend: Tokenizer) -> None:
        super().__init__()
        self._backend = backend

    def __missing__(self, token_id: int) -> bytes:
        token = self._backend.id_to_token(token_id) or ""
        byte_of = byte_level()
        is_bytes = all(character in byte_of for character in token)
        token_bytes = bytes(map(byte_of.__getitem__, token)) if is_bytes else token.encode()
        self[token_id] = token_bytes
        return token_bytes


def _merge_inline(messages: Sequence[Message]) -> Sequence[Message]:
    if not any(message.inline for message in messages):
        return messages
    merged: list[Message] = []
    for index, message in enumerate(messages):
        continues = message.role == "assistant" and index > 0 and messages[index - 1].inline
        if (message.inline or continues) and merged and merged[-1].role == "assistant":
            previous, calls = merged[-1], message.tool_calls
            merged[-1] = replace(
                previous,
                content=previous.content + message.content,
                tool_calls=previous.tool_calls + calls,
                token_ids=previous.token_ids + message.token_ids,
                images=previous.images + message.images,
            )
        else:
            merged.append(message)
    return merged
