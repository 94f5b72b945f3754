"""Hypothesis strategies for conversations: what people, tools and policies may say, well-formed and not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import Any, Literal

from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from agentrl.core.tool import Tool, tool
from agentrl.core.types import Fork, Message, Prompt, ToolCall
from tests.unit.render.tokenizers import MARKERS


@tool(timeout_s=1)
async def look_up(word: str, lines: int = 1) -> str:
    """Look a word up."""
    return word * lines


@tool(timeout_s=1)
async def add(a: float, b: float) -> str:
    """Add two numbers: `a` & <b>."""
    return str(a + b)


TOOLS: tuple[Tool, ...] = (look_up, add)


def added_ids(bridged: Prompt | Fork) -> tuple[int, ...] | Fork:
    """Return the ids of what `Renderer.bridge` returned, or its fork."""
    return bridged if isinstance(bridged, Fork) else bridged.token_ids


words = st.text("abcdeghilmnoprstuvwxyz é你ñ", min_size=1, max_size=12).map(str.strip).filter(bool)
"""Plain text: no marker, no white space at its ends. It can be cut off from what is around it without a change of ids."""

_MARKUP = (
    "<tool_response>",
    "</tool_response>",
    "<tools>",
    "<|python_tag|>",
    "```json\n",
    "\n\n",
    "\n",
    " ",
    "{",
    '"',
    "\ue000",
    "\ue0000\ue001",
)
_fragments = st.one_of(words, st.text(max_size=8), st.sampled_from((*MARKERS, *_MARKUP)))

contents = st.lists(_fragments, max_size=5).map("".join)
"""Anything: unicode, white space, nothing at all, and text of special tokens of every family."""

_json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-999, 999) | st.floats(-9, 9) | words | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(words, inner, max_size=2),
    max_leaves=4,
)
_arguments = st.one_of(
    st.fixed_dictionaries({"word": words}, optional={"lines": st.integers(1, 3)}),
    st.fixed_dictionaries({"a": st.integers(-9, 9), "b": st.floats(-9, 9)}),
    st.dictionaries(words, _json_values, max_size=3),
)
_names = st.sampled_from([item.name for item in TOOLS])


@st.composite
def calls(draw: st.DrawFn, *, wild: bool = True) -> ToolCall:
    """One call; ``wild`` ones may name what there is not, or hold special-token text."""
    name = draw(_names)
    arguments: dict[str, Any] = draw(_arguments) if wild else {"word": draw(words)}
    if wild and draw(st.booleans()):
        name, arguments = "nothing" if draw(st.booleans()) else name, {**arguments, "word": draw(contents)}
    return ToolCall("", name, arguments)


def thought(reasoning: str, answer: str) -> str:
    """Return what a policy says that reasons first, as Qwen3 writes it."""
    return f"<think>\n{reasoning}\n</think>\n\n{answer}"


def hermes(call: ToolCall) -> str:
    """Return a call as Hermes and Qwen write it."""
    return f"<tool_call>\n{json.dumps({'name': call.name, 'arguments': dict(call.arguments)})}\n</tool_call>"


@dataclass(frozen=True)
class Sampled:
    """A turn of the policy, before a tokenizer makes ids of it."""

    text: str
    letters: bool
    """Text of special tokens is spelt letter by letter, rather than said in those tokens."""
    cuts: tuple[float, ...]
    """Where, as parts of its length, no token reaches across: without any, the tokenisation is the canonical one."""
    end: Literal["token", "eos", "stop", "length"]
    """What ended it: the format's end token, the tokenizer's (may be the same), a stop string, or the limit of length,
    which takes the last token away."""

    def ids(self, tokenizer: PreTrainedTokenizerBase, end_id: int) -> tuple[int, ...]:
        """Return what an engine would have sampled; at least one token."""
        places = sorted({0, *(round(cut * len(self.text)) for cut in self.cuts), len(self.text)})
        ids: list[int] = []
        for start, stop in pairwise(places):
            token_text = self.text[start:stop]
            ids += tokenizer.encode(token_text, add_special_tokens=False, split_special_tokens=self.letters)
        if self.end == "length":
            ids = ids[:-1]
        if self.end == "token" or not ids:
            ids.append(end_id)
        elif self.end == "eos":
            ids.append(int(tokenizer.eos_token_id))
        return tuple(ids)


_call_texts = st.one_of(
    calls().map(hermes),
    st.builds(lambda call, size: hermes(call)[:-size], calls(), st.integers(1, 30)),
    st.builds(lambda call, size: hermes(call)[size:], calls(), st.integers(1, 30)),
    contents.map(lambda text: f"<tool_call>{text}</tool_call>"),
    contents.map(lambda text: f"[look_up(word={text!r})]"),
    contents.map(lambda text: json.dumps({"name": "look_up", "parameters": {"word": text}})),
)  # fmt: skip
_said = st.one_of(contents, words, st.lists(st.one_of(contents, _call_texts), min_size=1, max_size=3).map("".join))
_texts = st.one_of(
    _said,
    st.builds(thought, words, _said),
    st.builds(lambda reasoning, answer: f"{reasoning}\n</think>\n\n{answer}", contents, _said),
    st.builds(lambda reasoning, answer: f"<think>{reasoning}{answer}", contents, _said),
)

samples: st.SearchStrategy[Sampled] = st.builds(
    Sampled,
    _texts,
    st.booleans(),
    st.lists(st.floats(0, 1), max_size=3).map(tuple),
    st.sampled_from(["token", "token", "eos", "stop", "length"]),
)
"""Turns of a policy that says anything in any way."""


@cache  # Hypothesis validates each strategy when it is drawn from first
def answers(
    tools: bool, *, inline: bool = True, text: st.SearchStrategy[str] = contents
) -> st.SearchStrategy[tuple[Message, ...]]:
    """Return a strategy for what follows a turn: a user, results of tools, or text in the policy's own turn."""
    user = st.builds(lambda said: (Message("user", said),), text)
    results = st.lists(text, min_size=1, max_size=3).map(
        lambda found: tuple(Message("tool", said, tool_call_id=f"call_{number}") for number, said in enumerate(found))
    )
    choices = [user]
    if tools:
        choices += [results, st.builds(lambda found, said: (*found, *said), results, user)]
    if inline:
        inside = text.map(lambda said: (Message("user", said, inline=True),))
        choices += [inside, st.builds(lambda said, then: (*said, *then), inside, user)]
    return st.one_of(choices)


@dataclass(frozen=True)
class Script:
    """A whole conversation: what the policy reads first, and turns, each with what follows it."""

    first: tuple[Message, ...]
    tools: tuple[Tool, ...]
    turns: tuple[tuple[Sampled, tuple[Message, ...]], ...]


@st.composite
def scripts(draw: st.DrawFn, *, most_turns: int = 3, inline: bool = True) -> Script:
    """Conversations with a policy that says anything in any way."""
    system = draw(_system_messages(contents))
    tools = TOOLS if draw(st.booleans()) else ()
    first = (*system, Message("user", draw(contents)))
    return Script(first, tools, tuple(draw(_turns(bool(tools), inline, most_turns))))


@cache
def _turns(tools: bool, inline: bool, most_turns: int) -> st.SearchStrategy[list[tuple[Sampled, tuple[Message, ...]]]]:
    return st.lists(st.tuples(samples, answers(tools, inline=inline)), min_size=1, max_size=most_turns)


@cache
def _system_messages(text: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
    return st.lists(text.map(lambda said: Message("system", said)), max_size=1)


_up_to_two_calls = st.lists(calls(wild=False), max_size=2)


@st.composite
def well_formed(
    draw: st.DrawFn, *, reasoning: bool = False, most_turns: int = 4, text: st.SearchStrategy[str] = words
) -> tuple[tuple[Message, ...], tuple[Tool, ...]]:
    """Conversations as a demonstration has them, ending with a user or tools: with calls as ``tool_calls``, each
    answered, and with ``<think>`` blocks in Qwen3's way in some assistant messages if ``reasoning``.
    """
    system = draw(_system_messages(text))
    tools = TOOLS if draw(st.booleans()) else ()
    messages: list[Message] = [*system, Message("user", draw(text))]
    for turn in range(draw(st.integers(0, most_turns))):
        said = draw(text)
        if reasoning and draw(st.booleans()):
            said = thought(draw(words), said)
        made = draw(_up_to_two_calls) if tools else []
        named = tuple(ToolCall(f"call_{turn}{number}", call.name, call.arguments) for number, call in enumerate(made))
        messages.append(Message("assistant", said, named))
        messages += [Message("tool", draw(text), tool_call_id=call.id) for call in named]
        if not named or draw(st.booleans()):
            messages.append(Message("user", draw(text)))
    return tuple(messages), tools


def turns_of(messages: Sequence[Message]) -> list[int]:
    """Return the indices of the assistant's messages."""
    return [index for index, message in enumerate(messages) if message.role == "assistant"]
