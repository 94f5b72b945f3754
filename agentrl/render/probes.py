"""Probe conversations: which chat format a template has, and the proof that all text arrives in the prompt."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property, lru_cache

from agentrl.core.images import IMAGE_MARK, Image
from agentrl.core.tool import Tool
from agentrl.core.types import Message, Role, ToolCall, ToolResult, ToolStatus
from agentrl.render.formats.base import Format, ReadsSampledCalls, WritesImages


async def never_run(**_: object) -> ToolResult:
    """Function of the tools in probe conversations."""
    return ToolResult("", ToolStatus.ERROR, "tools of probe conversations are not run")


TOOLS = (
    Tool(
        "look_up",
        "Look a word up.",
        {"type": "object", "properties": {"word": {"type": "string"}}, "required": ["word"]},
        never_run,
        1.0,
    ),
    Tool("add", "Add numbers.", {"type": "object", "properties": {"a": {"type": "integer"}}}, never_run, 1.0),
)

_SYSTEM, _ASK, _MORE = Message("system", "sy1"), Message("user", "qa1"), Message("user", "qa2")
_SAID, _THOUGHT = Message("assistant", "as1"), Message("assistant", "<think>\nre1\n</think>\n\nas1")
_CALL = Message("assistant", "", (ToolCall("call_0", "look_up", {"word": "é"}),))
_FOUND = Message("tool", "fo1", tool_call_id="call_0")
_CALLS = Message(
    "assistant", "as2", (ToolCall("call_0", "look_up", {"word": "a"}), ToolCall("call_1", "add", {"a": 1}))
)
_BOTH = (_FOUND, Message("tool", "fo2", tool_call_id="call_1"))

PROBES: Sequence[tuple[tuple[Message, ...], tuple[Tool, ...]]] = (
    ((_ASK,), ()),
    ((_SYSTEM, _ASK), ()),
    ((_ASK, _SAID, _MORE), ()),
    ((_ASK, _THOUGHT, _MORE), ()),
    ((_SYSTEM, _ASK, _SAID, _MORE, _THOUGHT, _ASK), ()),
    ((_SYSTEM, _ASK, _THOUGHT, _SYSTEM, _MORE), ()),
    ((_ASK,), TOOLS),
    ((_SYSTEM, _ASK), TOOLS),
    ((_ASK, _CALL, _FOUND), TOOLS[:1]),
    ((_ASK, _THOUGHT, _MORE, _CALL, _FOUND, _SAID, _ASK), TOOLS[:1]),
    ((_ASK, _CALLS, *_BOTH), TOOLS),
)
"""Messages and tools. A template may refuse some of them; a matching format refuses the same ones."""


def same_text(first: Format, second: Format) -> bool:
    """Return whether two formats write the same text for every probe conversation.

    If ``second`` ignores tools, ``first`` need not: then the two are compared without tools.
    """
    return all(_same(first, second, *probe) for probe in PROBES)


def _same(first: Format, second: Format, messages: Sequence[Message], tools: Sequence[Tool]) -> bool:
    expected = _text(second, messages, tools)
    if _text(first, messages, tools) == expected:
        return True
    return bool(tools) and expected == _text(second, messages, ()) == _text(first, messages, ())


def _text(format: Format, messages: Sequence[Message], tools: Sequence[Tool]) -> str | None:
    try:
        return format.text(messages, tools)
    except ValueError:
        return None


PROBE_TOOL = Tool(
    "zqname",
    "Describes zq.",
    {
        "type": "object",
        "properties": {"zqargument": {"type": "string", "description": "Means zq."}},
        "required": ["zqargument"],
    },
    never_run,
    1.0,
)
"""A tool with a unique name."""
_PROBE_IMAGE = Image(b"GIF89a")
"""Stands for any image in probe conversations; it is not decoded."""


class Arrival(StrEnum):
    """What becomes of a kind of text in the prompt."""

    ARRIVES = "arrives"
    """It is in the prompt."""
    LOST = "lost"
    """The chat format leaves it out without an error."""
    ABSENT = "absent"
    """The chat format has no place for it."""
    REFUSED = "refused"
    """The chat format refuses such a conversation."""


@dataclass(frozen=True, slots=True)
class MessageShape:
    """The shape of a message in a conversation, without its text."""

    role: Role
    """Its author."""
    sampled: bool = False
    """Whether the policy sampled it."""
    content: bool = True
    """Whether it has content."""
    calls: int = 0
    """Number of its calls."""
    answers: tuple[int, int] | None = None
    """In a tool message, the message and the call in it that it answers; None if it answers no call."""
    images: int = 0
    """Number of its images."""


def message_shapes(messages: Sequence[Message]) -> tuple[MessageShape, ...]:
    """Return the shapes of messages."""
    ids: dict[str, tuple[int, int]] = {}
    shapes = []
    for index, message in enumerate(messages):
        answers = ids.get(message.tool_call_id) if message.tool_call_id is not None else None
        text = message.content.replace(IMAGE_MARK, "") if message.images else message.content
        has_content, calls, images = bool(text.strip()), len(message.tool_calls), len(message.images)
        shapes.append(MessageShape(message.role, bool(message.token_ids), has_content, calls, answers, images))
        ids |= {call.id: (index, number) for number, call in enumerate(message.tool_calls)}
    return tuple(shapes)


class ArrivalProof:
    """Shows for conversations of one format which of their texts arrive, by a probe conversation of the same shapes.

    Args:
        format: the chat format.
        placeholder: returns what the format writes for an image; it is called for conversations with images.
    """

    def __init__(self, format: Format, placeholder: Callable[[], str] | None = None) -> None:
        self._format = format
        self._placeholder = placeholder
        self.lost = lru_cache(maxsize=4096)(self._lost)
        """``lost(shapes, tools)`` returns what the format leaves out of the prompt, in words; ``tools`` is whether tools
        are offered. ValueError if the format refuses such a conversation."""

    @cached_property
    def names_tools(self) -> bool:
        """Whether the format writes the tools into the prompt."""
        try:
            return PROBE_TOOL.name in self._format.text((Message("user", "zq0x"),), (PROBE_TOOL,))
        except ValueError:
            return False

    def _lost(self, shapes: tuple[MessageShape, ...], tools: bool) -> tuple[str, ...]:
        probes = tuple(_probe(shape, index) for index, shape in enumerate(shapes))
        if not isinstance(self._format, ReadsSampledCalls):
            probes = tuple(replace(probe, tool_calls=()) if probe.token_ids else probe for probe in probes)
        text = self._format.text(probes, (PROBE_TOOL,) if tools else ())
        lost = dict.fromkeys(
            f"the {kind} of message {index + 1} ({shape.role})"
            for index, (shape, probe) in enumerate(zip(shapes, probes, strict=True))
            for kind, text_of_probe in _texts(shape, probe)
            if text_of_probe not in text
        )
        return (*lost, *self._lost_images(shapes, probes, text, tools))

    def _lost_images(
        self, shapes: Sequence[MessageShape], probes: Sequence[Message], text: str, tools: bool
    ) -> Iterator[str]:
        """Iterate over the images that the format leaves out: without them its text has as many placeholders."""
        for index, shape in enumerate(shapes):
            if not shape.images:
                continue
            written = 0
            if self._placeholder is not None and isinstance(self._format, WritesImages):
                placeholder = self._placeholder()
                imageless = _probe(replace(shape, images=0), index)
                texts_only = self._format.text(
                    (*probes[:index], imageless, *probes[index + 1 :]), (PROBE_TOOL,) if tools else ()
                )
                written = text.count(placeholder) - texts_only.count(placeholder)
            if written != shape.images:
                yield f"{shape.images - written} of {shape.images} images of message {index + 1} ({shape.role})"


def _probe(shape: MessageShape, index: int) -> Message:
    calls = tuple(
        ToolCall(f"zq{index:03}c{number:03}", PROBE_TOOL.name, {"zqargument": f"zq{index}n{number}x"})
        for number in range(shape.calls)
    )
    answers = f"zq{shape.answers[0]:03}c{shape.answers[1]:03}" if shape.answers else "zq0000000"
    content = (f"zq{index}x" if shape.content else "") + shape.images * IMAGE_MARK
    call_id = answers if shape.role == "tool" else None
    return Message(
        shape.role,
        content,
        calls,
        call_id,
        token_ids=(0,) if shape.sampled else (),
        images=shape.images * (_PROBE_IMAGE,),
    )


def _texts(shape: MessageShape, probe: Message) -> Iterator[tuple[str, str]]:
    """Iterate over the texts that must arrive; the calls of a sampled turn are in its content."""
    if shape.content:
        yield "content", probe.content.replace(IMAGE_MARK, "") if shape.images else probe.content
    for call in () if shape.sampled else probe.tool_calls:
        yield "tool call", str(call.arguments["zqargument"])


_USER, _SAMPLED = MessageShape("user"), MessageShape("assistant", sampled=True)
KINDS: dict[str, tuple[tuple[MessageShape, ...], bool]] = {
    "user messages": ((_USER,), False),
    "a system message at the start": ((MessageShape("system"), _USER), False),
    "later system messages": ((MessageShape("system"), _USER, _SAMPLED, MessageShape("system")), False),
    "later user messages": ((_USER, _SAMPLED, _USER), False),
    "given assistant messages": ((_USER, MessageShape("assistant"), _USER), False),
    "tools": ((_USER,), True),
    "tool calls in given messages": (
        (_USER, MessageShape("assistant", content=False, calls=1), MessageShape("tool", answers=(1, 0))),
        True,
    ),
    "tool results": (
        (_USER, MessageShape("assistant", sampled=True, calls=1), MessageShape("tool", answers=(1, 0))),
        True,
    ),
    "several tool results": (
        (
            _USER,
            MessageShape("assistant", sampled=True, calls=2),
            MessageShape("tool", answers=(1, 0)),
            MessageShape("tool", answers=(1, 1)),
        ),
        True,
    ),
}
"""Kinds of texts, each in the shortest conversation that has them, and whether tools are offered in it."""
_OPTIONAL = ("tools", "tool calls in given messages")


def arrivals(format: Format) -> dict[str, Arrival]:
    """Return what becomes of each of `KINDS` in the prompts of a format."""
    proof, arrival_by_kind = ArrivalProof(format), dict[str, Arrival]()
    for kind, (shapes, tools) in KINDS.items():
        try:
            lost = bool(proof.lost(shapes, tools)) if kind != "tools" else not proof.names_tools
        except ValueError:
            arrival_by_kind[kind] = Arrival.REFUSED
            continue
        if_lost = Arrival.ABSENT if kind in _OPTIONAL else Arrival.LOST
        arrival_by_kind[kind] = if_lost if lost else Arrival.ARRIVES
    return arrival_by_kind
