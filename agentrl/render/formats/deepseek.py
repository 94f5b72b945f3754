"""DeepSeek V3, and the reasoning model R1.

::

    <｜begin▁of▁sentence｜>SYSTEM<｜User｜>…<｜Assistant｜>…<｜end▁of▁sentence｜><｜User｜>…<｜Assistant｜>

Tool results directly follow the policy's turn, and its next turn follows them without ``<｜Assistant｜>`` and, in R1,
without ``<think>``::

    …<｜tool▁calls▁end｜><｜end▁of▁sentence｜><｜tool▁outputs▁begin｜><｜tool▁output▁begin｜>…<｜tool▁output▁end｜><｜tool▁outputs▁end｜>…

The published templates write this up to the first tool result of a conversation. Later they omit start tokens
(``<｜Assistant｜><｜tool▁calls▁begin｜>``, ``<｜tool▁outputs▁begin｜>``) and end tokens (``<｜tool▁outputs▁end｜>``); here every
exchange is written like the first.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from agentrl.core.tool import Tool
from agentrl.core.types import THINK, THINK_END, Fork, ForkReason, Message, ToolCall
from agentrl.render.formats.base import Format, to_json, tool_schema
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.deepseek import CALL, CALL_END, CALLS, CALLS_END, SEP, TYPE, DeepSeekParser

BEGIN, END = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
USER, ASSISTANT = "<｜User｜>", "<｜Assistant｜>"
OUTPUTS, OUTPUTS_END = "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>"
OUTPUT, OUTPUT_END = "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>"

TOOLS = "## Tools\n\n### Function\n\nYou have the following functions available:\n"
"""Start of the tool instructions in the system prompt, from DeepSeek's model cards. The templates ignore tools."""


class DeepSeekV3(Format):
    """DeepSeek V3: earlier turns stay unchanged. Tools are described in the system prompt."""

    name = "deepseek-v3"
    ends: tuple[str, ...] = (END,)
    opens_thinking = False
    parser: CallParser = DeepSeekParser()

    @override
    def text(self, messages: Sequence[Message], tools: Sequence[Tool], *, opener: bool = True) -> str:
        """All system messages are joined at the start."""
        system = [message.content for message in messages if message.role == "system"]
        if tools:
            system.append(tools_text(tools))
        turns = [message for message in messages if message.role != "system"]
        return BEGIN + "\n\n".join(system) + self._turns(turns) + (self._opener(turns) if opener else "")

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        if any(message.role == "system" for message in new):
            return Fork(ForkReason.TEMPLATE, "system messages are joined at the start, and a new one follows")
        return END + self._turns(new) + self._opener(new)

    def _turns(self, messages: Sequence[Message]) -> str:
        return "".join(self._turn(messages, index) for index in range(len(messages)))

    def _turn(self, messages: Sequence[Message], index: int) -> str:
        message = messages[index]
        previous_role, next_role = _role(messages, index - 1), _role(messages, index + 1)
        if message.role == "tool":
            opening, closing = "" if previous_role == "tool" else OUTPUTS, "" if next_role == "tool" else OUTPUTS_END
            return f"{opening}{OUTPUT}{message.content}{OUTPUT_END}{closing}"
        if message.role == "user":
            return USER + message.content
        opening = "" if previous_role == "tool" else ASSISTANT
        return opening + self._content(message, previous_role) + _calls_text(message.tool_calls) + END

    def _opener(self, messages: Sequence[Message]) -> str:
        return "" if _role(messages, len(messages) - 1) == "tool" else ASSISTANT + self._thought

    @property
    def _thought(self) -> str:
        """End of the opener."""
        return ""

    def _content(self, message: Message, previous_role: str) -> str:
        """Return the content of an assistant message as written after a message of the role ``previous_role``."""
        return message.content


class DeepSeekR1(DeepSeekV3):
    """DeepSeek R1: the opener starts the reasoning, and earlier reasoning is dropped.

    Only turns directly after a tool result, and messages with ``tool_calls``, keep their reasoning.

    Args:
        keep_thinking: keep all reasoning, unlike the template, so that a conversation stays one row.
    """

    name = "deepseek-r1"
    opens_thinking = True

    def __init__(self, *, keep_thinking: bool = False) -> None:
        self._keep = keep_thinking

    @override
    def boundary(self, history: Sequence[Message], new: Sequence[Message], tools: Sequence[Tool]) -> str | Fork:
        """Fork where the template later drops at least the opening ``<think>`` of a turn."""
        boundary = super().boundary(history, new, tools)
        if not self._keep and isinstance(boundary, str) and _role_before_turn(history) != "tool":
            return Fork(
                ForkReason.THINKING, "the reasoning of a turn, and its opening <think>, are left out afterwards"
            )
        return boundary

    @property
    def _thought(self) -> str:
        return f"{THINK}\n"

    def _content(self, message: Message, previous_role: str) -> str:
        content = message.content
        if previous_role == "tool":
            return content
        if self._keep:
            reasons = THINK_END in content and THINK not in content.partition(THINK_END)[0]
            return self._thought + content if message.token_ids or reasons else content
        return content if message.tool_calls else content.rpartition(THINK_END)[2]


def tools_text(tools: Sequence[Tool]) -> str:
    """Return the tool instructions of the system prompt."""
    return TOOLS + "".join(
        f"\n- `{tool.name}`:\n```json\n{to_json(tool_schema(tool)['function'], indent=4)}\n```" for tool in tools
    )


def _calls_text(calls: Sequence[ToolCall]) -> str:
    if not calls:
        return ""
    call_texts = (f"{CALL}{TYPE}{SEP}{call.name}\n```json\n{to_json(call.arguments)}\n```{CALL_END}" for call in calls)
    return CALLS + "\n".join(call_texts) + CALLS_END


def _role(messages: Sequence[Message], index: int) -> str:
    return messages[index].role if 0 <= index < len(messages) else ""


def _role_before_turn(history: Sequence[Message]) -> str:
    """Return the role of the message before the policy's last turn; inline messages are part of the turn."""
    turn_start = len(history) - 1
    while turn_start > 0 and (history[turn_start].inline or history[turn_start - 1].inline):
        turn_start -= 1
    earlier = [message for message in history[:turn_start] if message.role != "system"]
    return _role(earlier, len(earlier) - 1)
