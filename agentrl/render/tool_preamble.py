"""Description of tools in the system message, for chat templates that have no place for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from agentrl.core.errors import ConfigError
from agentrl.core.tool import Tool
from agentrl.core.types import Message
from agentrl.render.formats.base import to_json, tool_schema
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.hermes import HermesParser
from agentrl.render.parsers.tags import TagsParser

Preamble = Callable[[Sequence[Message], Sequence[Tool]], Sequence[Message]]
"""Returns messages with the tools described in the system message."""

_CALLS: dict[type, str] = {
    HermesParser: '<tool_call>\n{"name": NAME, "arguments": {"PARAMETER": VALUE}}\n</tool_call>',
    TagsParser: '<NAME>{"PARAMETER": VALUE}</NAME>',
}
"""How a call is written, by the class of the parser that reads it."""


def make_preamble(parser: CallParser) -> Preamble:
    """Return the preamble for calls that ``parser`` reads.

    Raises:
        ConfigError: it has no text for them.
    """
    example = _CALLS.get(type(parser))
    if example is None:
        raise ConfigError(
            "render.tool_preamble=true describes calls of render.tool_parser=hermes and tags; set one of them"
        )

    def with_tools(messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
        if not tools:
            return messages
        lines = [
            "You can call the following tools:",
            *(to_json(tool_schema(tool)["function"]) for tool in tools),
            "To call one, write",
            example,
            "with its name and arguments. The results are in the next message.",
        ]
        text = "\n".join(lines)
        if messages and messages[0].role == "system":
            return (Message("system", f"{messages[0].content}\n\n{text}"), *messages[1:])
        return (Message("system", text), *messages)

    return with_tools
