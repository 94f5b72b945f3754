"""GLM-4 and GLM-4.5, in which a turn ends with the role marker of the next message.

::

    [gMASK]<sop><|system|>\\n…<|user|>\\n…<|assistant|>\\n…<|observation|>\\n…<|assistant|>\\n…<|user|>

The policy samples that marker: it is trained on, and it is the first token of the next message. The opener is only
``<|assistant|>``, so the policy also samples the newline after it.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.base import Format, split_thinking, to_json, tool_schema
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.glm import ASSISTANT, CLOSE, KEY, KEY_END, OPEN, VALUE, VALUE_END, Glm4Parser, GlmParser

START = "[gMASK]<sop>"
SYSTEM, USER, OBSERVATION, END_OF_TEXT = "<|system|>", "<|user|>", "<|observation|>", "<|endoftext|>"
EMPTY_THOUGHT = f"\n{THINK}{THINK_END}"
NO_THINK = "/nothink"

GLM4_TOOLS = (
    "你是一个名为 ChatGLM 的人工智能助手。你是基于智谱AI训练的语言模型 GLM-4 模型开发的，"
    "你的任务是针对用户的问题和要求提供适当的答复和支持。\n\n# 可用工具"
)
"""Start of GLM-4's system message, before the tools."""

GLM4_TOOL = "\n\n## {name}\n\n{schema}\n在调用上述函数时，请使用 Json 格式表示调用的参数。"
"""Description of a tool in GLM-4's system message."""

GLM45_TOOLS = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n",
    "</tools>\n\nFor each function call, output the function name and arguments within the following XML format:\n"
    f"{OPEN}{{function-name}}\n"
    f"{KEY}{{arg-key-1}}{KEY_END}\n{VALUE}{{arg-value-1}}{VALUE_END}\n"
    f"{KEY}{{arg-key-2}}{KEY_END}\n{VALUE}{{arg-value-2}}{VALUE_END}\n"
    f"...\n{CLOSE}",
)
"""The tool instructions with which GLM-4.5 was trained; JSON schemas go in between, each before a newline."""


class Glm4(Format):
    """GLM-4 in the format of ``glm-4-9b-chat``: a call is a separate turn ``NAME\\n{…}``, a result is ``<|observation|>``.

    Messages without content are written too; the model's template omits them.
    """

    name = "glm-4"
    ends: tuple[str, ...] = (USER, OBSERVATION, END_OF_TEXT)
    opens_thinking = False
    parser: CallParser = Glm4Parser()

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        tools_text = "".join(
            GLM4_TOOL.format(name=tool.name, schema=to_json(tool_schema(tool)["function"], indent=4)) for tool in tools
        )
        head = START + (f"{SYSTEM}\n{GLM4_TOOLS}{tools_text}" if tools else "")
        return head + "".join(map(_glm4_turn, messages)) + (ASSISTANT if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        return "".join(map(_glm4_turn, new)) + ASSISTANT


def _glm4_turn(message: Message) -> str:
    if message.role != "assistant":
        return f"{_MARKERS[message.role]}\n{message.content}"
    if message.token_ids:
        return ASSISTANT + message.content
    calls = [f"{ASSISTANT}{call.name}\n{to_json(call.arguments)}" for call in message.tool_calls]
    content = f"{ASSISTANT}\n{message.content}" if message.content or not calls else ""
    return content + "".join(calls)


_MARKERS = {"system": SYSTEM, "user": USER, "tool": OBSERVATION}


class Glm45(Format):
    """GLM-4.5: reasoning in ``<think>``, kept in turns after the last user message; earlier turns get an empty thought.

    Args:
        thinking: whether the model reasons; if not, user messages end with ``/nothink`` and the opener with an empty thought.
        keep_thinking: keep all turns unchanged, unlike the template, so that a conversation stays one row.
    """

    name = "glm-4.5"
    ends: tuple[str, ...] = (USER, OBSERVATION, END_OF_TEXT)
    opens_thinking = False
    parser: CallParser = GlmParser()

    def __init__(self, *, thinking: bool = True, keep_thinking: bool = False) -> None:
        self._thinking = thinking
        self._keep = keep_thinking
        self._opener = ASSISTANT if thinking else ASSISTANT + EMPTY_THOUGHT

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        schemas = "".join(f"{to_json(tool_schema(tool))}\n" for tool in tools)
        head = START + (f"{SYSTEM}\n{schemas.join(GLM45_TOOLS)}" if tools else "")
        return head + self._turns(messages) + (self._opener if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """White space around sampled text, which `text` would strip, is kept."""
        rewritten = "" if self._keep else self._rewritten(history, new)
        return Fork(ForkReason.THINKING, rewritten) if rewritten else self._turns(new) + self._opener

    def _rewritten(self, history: Sequence[Message], new: Sequence[Message]) -> str:
        """Return how `text` changes earlier turns when ``new`` messages follow; empty if it keeps them unchanged.

        Reasoning before the last user message was dropped when that message was added.
        """
        last_turn = history[-1].content
        if self._thinking and THINK_END not in last_turn:
            return "the format adds an empty thought to a turn without reasoning"
        if not self._thinking and THINK_END in last_turn:
            return "the format replaces the opener's empty thought by the reasoning of the turn"
        turns = (message.content for message in history[_last_user(history) + 1 :] if message.role == "assistant")
        if _last_user(new) >= 0 and any(split_thinking(turn)[0].strip() for turn in turns):
            return "a new user message leaves earlier reasoning out"
        return ""

    def _turns(self, messages: Sequence[Message]) -> str:
        last_user = _last_user(messages)
        return "".join(self._turn(messages, index, index > last_user) for index in range(len(messages)))

    def _turn(self, messages: Sequence[Message], index: int, current: bool) -> str:
        """Return the text of one message; ``current`` if no user message follows."""
        message = messages[index]
        if message.role == "assistant":
            return self._assistant(message, current)
        if message.role == "tool":
            first = index == 0 or messages[index - 1].role != "tool"
            return f"{OBSERVATION if first else ''}\n<tool_response>\n{message.content}\n</tool_response>"
        no_think = message.role == "user" and not self._thinking and not message.content.endswith(NO_THINK)
        return f"{_MARKERS[message.role]}\n{message.content}{NO_THINK if no_think else ''}"

    def _assistant(self, message: Message, current: bool) -> str:
        if self._keep and message.token_ids:
            return self._opener + message.content
        reasoning, content = split_thinking(message.content)
        if message.token_ids:
            closed = THINK_END in message.content
            if current and closed:
                return ASSISTANT + message.content
            answer = message.content.rpartition(THINK_END)[2]
            line = "" if answer.startswith("\n") else "\n"
            return ASSISTANT + EMPTY_THOUGHT + (line + answer if answer.strip() else "")
        thought = reasoning.strip() if current or self._keep else ""
        blocks = [f"{THINK}{thought}{THINK_END}", *([content.strip()] if content.strip() else [])]
        return ASSISTANT + "".join(f"\n{block}" for block in [*blocks, *map(_call_text, message.tool_calls)])


def _call_text(call: ToolCall) -> str:
    arguments = "".join(
        f"{KEY}{key}{KEY_END}\n{VALUE}{value if isinstance(value, str) else to_json(value)}{VALUE_END}\n"
        for key, value in call.arguments.items()
    )
    return f"{OPEN}{call.name}\n{arguments}{CLOSE}"


def _last_user(messages: Sequence[Message]) -> int:
    return max((index for index, message in enumerate(messages) if message.role == "user"), default=-1)
