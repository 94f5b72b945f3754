"""The form in which a chat template reads content, reasoning and tool calls, found with probe conversations."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from agentrl.core.images import IMAGE_MARK
from agentrl.core.types import THINK, THINK_END, Message, ToolCall
from agentrl.render.formats.base import split_thinking, to_json

Fields = dict[str, Any]
"""A message as a chat template reads it."""
Apply = Callable[[Sequence[Fields], bool], str]
"""``apply(messages, opener)``: the template's text, with tools offered if a message calls one; ValueError if it refuses."""

ASK, MORE = Message("user", "qa1"), Message("user", "qa2")
SAID, THOUGHT = "as1", "re1"
REASONED = f"{THINK}\n{THOUGHT}\n{THINK_END}\n\n{SAID}"
MARKUP = re.compile(r"</?[^\s<>]{1,40}>|\[/?[A-Z_]{2,20}\]")
"""A string that looks like a special token, in the texts of tokenizers that do not have it."""
_ANY = 1_000
"""`TemplateInputs.max_calls` of templates that write more than one call in a turn."""
_FIELDS = ("reasoning_content", "thinking", "reasoning")
"""Names of the field that holds reasoning, in the chat templates of published models."""
CALLS = tuple(ToolCall(f"call0000{number}", "look_up", {"word": f"ar{number}"}) for number in (1, 2))
"""Ids have nine letters and digits, as Mistral's templates require."""
RESULTS = tuple(Message("tool", f"fo{number}", tool_call_id=call.id) for number, call in enumerate(CALLS))


@dataclass(frozen=True, slots=True)
class TemplateInputs:
    """The form of messages that a chat template reads."""

    parts: bool = False
    """Content is a list of parts, ``[{"type": "text", "text": …}]``, not a string."""
    reasoning: str = ""
    """Field of reasoning; empty: it is in the content, in ``<think>``."""
    opening: str = THINK
    """Text that starts reasoning in a sampled turn."""
    closing: str = THINK_END
    """Text that ends it."""
    arguments_as_text: bool = False
    """Arguments of calls are JSON text, not a mapping."""
    max_calls: int = 0
    """Calls that the template writes in one turn; 0 if it writes none."""
    content_before_calls: bool = False
    """In a turn of reasoning, content and calls, the content comes before the calls and nothing else between them."""

    @property
    def thinks(self) -> bool:
        """Whether reasoning is in ``<think>``."""
        return self.closing == THINK_END

    def fields(self, message: Message) -> Fields:
        """Return a message that was not sampled."""
        reasoning, content = None, message.content
        if message.role == "assistant" and self.reasoning and THINK_END in content:
            reasoning, content = split_thinking(content)
        return self.with_reasoning(message, reasoning, content, message.tool_calls)

    def with_reasoning(
        self, message: Message, reasoning: str | None, content: str, calls: Sequence[ToolCall]
    ) -> Fields:
        """Return a message with other content and calls, and with reasoning in its field if there is some."""
        fields: Fields = {
            "role": message.role,
            "content": _content_parts(content, message) if self.parts or message.images else content,
        }
        if reasoning is not None:
            fields[self.reasoning] = reasoning
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if calls:
            arguments = [to_json(call.arguments) if self.arguments_as_text else call.arguments for call in calls]
            fields["tool_calls"] = [
                {"type": "function", "id": call.id, "function": {"name": call.name, "arguments": argument}}
                for call, argument in zip(calls, arguments, strict=True)
            ]
        return fields

    def split(self, text: str) -> tuple[str | None, str]:
        """Return reasoning and the rest of a sampled turn, verbatim. Without closed reasoning the first is None."""
        if self.closing not in text:
            return None, text
        if self.thinks:  # as templates do
            head, _, answer = text.rpartition(self.closing)
        else:
            head, _, answer = text.partition(self.closing)
        return (head.rpartition(self.opening)[2] if self.opening else head), answer


def _content_parts(content: str, message: Message) -> list[dict[str, str]]:
    """Return a content as a list of parts; texts between images that are empty are left out."""
    if not message.images:
        return [{"type": "text", "text": content}]
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        parts += [{"type": "image"}] if number else []
        parts += [{"type": "text", "text": text}] if text else []
    return parts


def texts_between_images(message: Message) -> list[str]:
    """Return the texts of a message around its images, without white space at their ends."""
    texts = message.content.split(IMAGE_MARK) if message.images else [message.content]
    return [text.strip() for text in texts]


def find_inputs(apply: Apply) -> TemplateInputs:
    """Return the form of messages that a template reads."""
    forms = (TemplateInputs(), TemplateInputs(parts=True))
    inputs = max(forms, key=lambda form: _count_arrived(apply, form))  # the first of equals
    inputs = _with_reasoning(apply, _with_calls(apply, inputs))
    if not (inputs.thinks and inputs.max_calls):
        return inputs
    turn = inputs.fields(Message("assistant", REASONED, CALLS[:1]))
    text = try_text(apply, [inputs.fields(ASK), turn, inputs.fields(RESULTS[0]), inputs.fields(MORE)]) or ""
    between, argument, _ = text.partition(SAID)[2].partition(str(CALLS[0].arguments["word"]))
    return replace(inputs, content_before_calls=bool(argument) and RESULTS[0].content not in between)


def _count_arrived(apply: Apply, form: TemplateInputs) -> int:
    """Return how many texts arrive in the prompts of short conversations."""
    system, answer = Message("system", "sy1"), Message("assistant", SAID)
    conversations = (
        (ASK,),
        (system, ASK),
        (ASK, answer, MORE),
        (ASK, replace(answer, tool_calls=CALLS[:1]), RESULTS[0]),
    )
    texts = (try_text(apply, map(form.fields, messages)) or "" for messages in conversations)
    return sum(
        message.content in text for text, messages in zip(texts, conversations, strict=True) for message in messages
    )


def _with_calls(apply: Apply, inputs: TemplateInputs) -> TemplateInputs:
    def max_calls(form: TemplateInputs) -> int:
        for count in (2, 1):
            turn = Message("assistant", "", CALLS[:count])
            text = try_text(apply, map(form.fields, (ASK, turn, *RESULTS[:count])))
            if text is not None and all(str(call.arguments["word"]) in text for call in CALLS[:count]):
                return _ANY if count > 1 else count
        return 0

    forms = [replace(inputs, arguments_as_text=as_text) for as_text in (False, True)]
    best = max(forms, key=max_calls)
    return replace(best, max_calls=max_calls(best))


def _with_reasoning(apply: Apply, inputs: TemplateInputs) -> TemplateInputs:
    """Return ``inputs`` with the form of reasoning: the content, unless the template writes it otherwise."""
    opened = try_text(apply, [inputs.fields(ASK)], opener=True) or ""
    inline = try_text(apply, [inputs.fields(ASK), inputs.fields(Message("assistant", REASONED))]) or ""
    turn_text = inline[len(opened) :] if inline.startswith(opened) else ""
    verbatim = (
        (THINK not in turn_text) == opened.rstrip().endswith(THINK)
        and turn_text.count(THINK_END) == 1
        and THOUGHT in turn_text
    )
    for field in _FIELDS:
        form = replace(inputs, reasoning=field)
        text_before, text_after = _around_reasoning(apply, form)
        if not text_after.strip():
            continue
        if THINK_END in text_after:
            return inputs if verbatim else form
        shared = shared_prefix([text_before, opened.rpartition(ASK.content)[2]])
        return replace(form, opening=text_before[len(shared) :].strip(), closing=text_after.strip())
    return inputs


def _around_reasoning(apply: Apply, form: TemplateInputs) -> tuple[str, str]:
    """Return the text before reasoning, and what follows it before content and calls alike; empty if none arrives."""
    surroundings: list[tuple[str, str]] = []
    thought = Message("assistant", REASONED)
    turns: list[tuple[Fields, ...]] = [(form.fields(thought),)]
    if form.max_calls:
        turns.append((form.with_reasoning(thought, THOUGHT, "", CALLS[:1]), form.fields(RESULTS[0])))
    for turn in turns:
        text = try_text(apply, [form.fields(ASK), *turn]) or ""
        text_before, marker, text_after = text.partition(THOUGHT)
        end = [at for word in (SAID, CALLS[0].name) if (at := text_after.find(word)) >= 0]
        if marker and end:
            surroundings.append((text_before.rpartition(ASK.content)[2], text_after[: min(end)]))
    if not surroundings:
        return "", ""
    text_after = shared_prefix([text_after for _, text_after in surroundings])
    if len(surroundings) == 1 and (mark := MARKUP.match(text_after.lstrip())):
        return surroundings[0][0], mark[0]  # what follows may belong to the call
    return surroundings[0][0], text_after


def try_text(apply: Apply, messages: Iterable[Fields], *, opener: bool = False) -> str | None:
    """Return the template's text, or None if it refuses the messages."""
    try:
        return apply(list(messages), opener)
    except ValueError:
        return None


def shared_prefix(texts: Sequence[str]) -> str:
    """Return the longest text that all of ``texts`` start with."""
    first, last = min(texts), max(texts)
    differences = (at for at, letter in enumerate(first) if not last.startswith(letter, at))
    return first[: next(differences, len(first))]
