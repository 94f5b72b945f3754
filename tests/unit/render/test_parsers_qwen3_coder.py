"""What the parser of Qwen3-Coder's and Qwen3.5's calls reads."""

from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.config.model import RenderConfig
from agentrl.core.types import CallStatus, Message, ToolCall
from agentrl.render.registry import make_renderer
from tests.unit.render.oracles import template
from tests.unit.render.test_parsers_glm import typed
from tests.unit.render.tokenizers import qwen_tokenizer

_free = st.text("ab c019é你.-+\n\t\\/{}[]\":,'", max_size=12)
_items = st.lists(st.integers() | _free, max_size=3)
arguments = st.fixed_dictionaries({}, optional={
    "text": _free, "count": st.integers(), "sure": st.booleans(), "items": _items, "point": st.dictionaries(_free, _free),
})  # fmt: skip


@cache
def renderer_of():
    """Qwen3.5, whose template shows these calls."""
    return make_renderer(qwen_tokenizer(template("qwen3_5_nothink")), RenderConfig())


def read(text, tools=(typed,)):
    return renderer_of().parse(renderer_of().encode(text), tools).tool_calls


@given(arguments=arguments)
def test_calls_that_the_template_writes_are_read_again(arguments):
    """Values keep every character but the newlines that the template puts around them."""
    call = ToolCall("", "typed", {key: value for key, value in arguments.items() if value != ""})
    renderer = renderer_of()
    text = renderer.decode(
        renderer.render((Message("user", "q"), Message("assistant", "", (call,)), Message("user", "x"))).token_ids
    )
    markup = text[text.index("<tool_call>") : text.index("</tool_call>") + len("</tool_call>")]
    assert read(markup) == (call,)


parts = st.sampled_from(
    [
        "<tool_call>",
        "</tool_call>",
        "<function=typed>",
        "</function>",
        "<parameter=text>",
        "</parameter>",
        "\n",
        "x",
        "{",
        "<function=",
    ]
)


@given(text=st.lists(parts, max_size=14).map("".join))
def test_whatever_is_said_is_read(text):
    assert all(call.status in CallStatus for call in read(text))


@pytest.mark.parametrize(
    ("text", "status", "fault"),
    [
        ("<function=typed>\n<parameter=text>\nx\n</parameter>", CallStatus.INVALID_JSON, "not <function=NAME>"),
        ("typed", CallStatus.INVALID_JSON, "not <function=NAME>"),
        ("<function=typed>\n<parameter=text>\nx\n</function>", CallStatus.INVALID_JSON, "text has no </parameter>"),
        ("<function=typed>\nx\n</function>", CallStatus.INVALID_JSON, "'x' stands where <parameter=…> is due"),
        (
            "<function=typed>\n<parameter=count>\nx\n</parameter>\n</function>",
            CallStatus.INVALID_JSON,
            "count is not valid",
        ),
        ("<function=other>\n</function>", CallStatus.UNKNOWN_TOOL, "no tool 'other'"),
    ],
)
def test_malformed_calls_say_what_is_wrong(text, status, fault):
    [call] = read(f"<tool_call>\n{text}\n</tool_call>")
    assert call.status is status
    assert fault in call.fault


def test_a_call_cut_off_anywhere_is_truncated():
    full_markup = "<tool_call>\n<function=typed>\n<parameter=text>\nx\n</parameter>\n</function>\n</tool_call>"
    for size in range(len("<tool_call>"), len(full_markup) - 1):
        [call] = read(full_markup[:size])
        assert call.status is CallStatus.TRUNCATED
