"""Hostile repetitions through every parser, scorer and reward helper: time grows with the text, not with its square.

All of these run on an event loop that other episodes or sessions share.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable

import pytest
from agentrl_envs.python_math.scoring import is_numeral
from agentrl_envs.search_r1.protocol import parse as search_r1_action
from agentrl_tools.judge.verdicts import Rule
from agentrl_tools.python.tool import without_fence

from agentrl.core.tool import Tool
from agentrl.render.parsers.base import split_markers, split_reasoning
from agentrl.render.parsers.registry import PARSERS
from agentrl.render.special_token_escaping import unicode_text
from agentrl.rewards import answer_text, exact_match, f1, last_boxed, last_number, normalize
from agentrl.rewards.choices import named_option
from agentrl.rewards.constraints import CHECKS, sentences
from agentrl.rewards.programs import is_encodable, program_in

SIZE = 8_000
"""Characters of a text: a quadratic function takes half a second."""
CPU_S = 0.15

PIECES = [
    " ", "\n", "\t", "\r\n", "\xa0", "`", "```", "```\n", "```python\n", "~~~", "\\boxed{", "\\boxed {", "\\boxed{5",
    "{", "}", "{}", "\\{", "[", "]", "[[", "(", ")", "<", ">", "<a>", "</a>", "<add>", "</add>", "<add>{", "<add><a>",
    "<x>", "<think>", "</think>", "<answer>", "</answer>", "<search>", "</search>", "<tool_call>", "</tool_call>",
    "<tool_call>{", '<tool_call>{"name": "add"', "<function=add>", "</function>", "<function=", "<parameter=a>",
    "</parameter>", "\n</parameter>", "<arg_key>", "<arg_key>a</arg_key>", "<arg_value>", "</arg_value>",
    "functions.add:0", "add.call(", "add(", "add(a=", "a=", "[add(", "[add(a=1)", "add, ", "<|python_tag|>",
    "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<|tool_call_begin|>", "<|tool_calls_section_begin|>",
    "<|im_end|>", "<|", "|>", "1", "1,", "1,000", "1 ", "1/", "1 1/", ".", "1.", "-", "−", "+", "$", "%", "1e", "e5",
    "10^", "10^{", "\\times 10^", "\\frac", "\\frac{1}", "\\frac{1}{", "\\left", "\\,", "^", "_{", '"', "'", '\\"',
    "\\", '{"a":', '{"a": [', '"a": 1, ', ",", ";", ":", "a", "the ", "aé", "\ud800", "\udc00", "#", "\\n",
]  # fmt: skip
BEFORE = ["", "```python\n", "\\boxed{5", "[add(a="]

ADD = Tool(
    "add",
    "Adds.",
    {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "integer"}}, "required": ["a"]},
)


def texts(beginnings: str) -> list[str]:
    """Each piece repeated, before a character that fits nothing; and pairs of pieces.

    Args:
        beginnings: ``all``: pieces are repeated after each beginning too, or ``one``: each piece after one of them.
    """
    texts = [
        state_before + piece * (SIZE // len(piece)) + "x"
        for number, state_before in enumerate(BEFORE)
        for place, piece in enumerate(PIECES)
        if not state_before or beginnings == "all" or place % (len(BEFORE) - 1) == number - 1
    ]
    rng = random.Random(0)
    for _ in range(40):
        first_piece, second_piece, third = rng.choice(PIECES), rng.choice(PIECES), rng.choice(PIECES)
        half = SIZE // 2
        texts.append((first_piece + second_piece) * (SIZE // len(first_piece + second_piece)) + third)
        texts.append(first_piece * (half // len(first_piece)) + second_piece * (half // len(second_piece)) + third)
    return texts


def parsed(name: str) -> Callable[[str], object]:
    parser = PARSERS[name]()
    return lambda text: parser.calls(
        split_reasoning(list(split_markers([text], parser.markers)), opened=False)[1], [ADD]
    )


FUNCTIONS: dict[str, Callable[[str], object]] = {
    **{f"parser {name}": parsed(name) for name in PARSERS},
    "without_fence": without_fence,
    "program_in": program_in,
    "is_encodable": is_encodable,
    "is_numeral": is_numeral,
    "search_r1": search_r1_action,
    "answer_text": answer_text,
    "last_boxed": last_boxed,
    "named_option": named_option,
    "sentences": sentences,
    "highlights": lambda text: CHECKS["detectable_format:number_highlighted_sections"](text, num_highlights=1),
    "placeholders": lambda text: CHECKS["detectable_content:number_placeholders"](text, num_placeholders=1),
    "titles": CHECKS["detectable_format:title"],
    "last_number": last_number,
    "normalize": normalize,
    "exact_match": lambda text: exact_match(text, (text[1:],)),
    "f1": lambda text: f1(text, (text[1:],)),
    "unicode_text": unicode_text,
    "tokens": lambda text: Rule("tokens", 1e-6).fits(text, text + "1"),
    "lines": lambda text: Rule("lines").fits(text, text + "1"),
}


def cpu_s(function: Callable[[str], object], text: str) -> float:
    """The least CPU time of three calls, so that a garbage collection does not count; of one if that is short."""
    least = math.inf
    for _ in range(3):
        started = time.thread_time()
        function(text)
        least = min(least, time.thread_time() - started)
        if least < CPU_S:
            break
    return least


@pytest.mark.parametrize("beginnings", ["one", pytest.param("all", marks=pytest.mark.long)])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_time_grows_with_the_text(name: str, beginnings: str) -> None:
    spent = {text: cpu_s(FUNCTIONS[name], text) for text in texts(beginnings)}
    assert not [(seconds, text[:30], text[-10:]) for text, seconds in spent.items() if seconds > CPU_S]


@pytest.mark.parametrize("name", PARSERS)
def test_markers_that_are_searched_for_in_vain(name: str) -> None:
    """A search for a marker that is not there reads the whole text: eight times the text shows whether it is repeated."""
    for piece in (*PARSERS[name]().markers, "<add>", "<tool_call>"):
        assert cpu_s(FUNCTIONS[f"parser {name}"], piece * (8 * SIZE // len(piece))) < CPU_S, piece
