"""Description of tools in the system message, for chat templates that have no place for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from agentrl.core.errors import ConfigError
from agentrl.core.tool import Tool
from agentrl.core.types import Message
from agentrl.render.formats.base import to_json, tool_schema
from agentrl.render.parsers.base import CallParser
from agentrl.render.parsers.hermes import HermesParser
from agentrl.render.parsers.tags import TagsParser

_CALLS: dict[type, str] = {
    HermesParser: '<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>',
    TagsParser: "<{tag}>{arguments}</{tag}>",
}
"""How a call is written, by the class of the parser that reads it."""


@dataclass(frozen=True, slots=True)
class Preamble:
    """Describes tools in the system message, and writes calls into contents."""

    call: str
    """One of `_CALLS`."""

    def __call__(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Sequence[Message]:
        """Return messages with the tools described in the system message, and calls that were not sampled in contents."""
        messages = [message if message.token_ids else self.with_calls(message) for message in messages]
        if not tools:
            return messages
        lines = [
            "You can call the following tools:",
            *(to_json(tool_schema(tool)["function"]) for tool in tools),
            "To call one, write",
            self.call.format(name="NAME", tag="NAME", arguments='{"PARAMETER": VALUE}'),
            "with its name and arguments. The results are in the next message.",
        ]
        text = "\n".join(lines)
        if messages and messages[0].role == "system":
            return (replace(messages[0], content=f"{messages[0].content}\n\n{text}"), *messages[1:])
        return (Message("system", text), *messages)

    def with_calls(self, message: Message) -> Message:
        """Return a message with its calls written into its content."""
        if not message.tool_calls:
            return message
        calls = [
            self.call.format(name=to_json(call.name), tag=call.name, arguments=to_json(call.arguments))
            for call in message.tool_calls
        ]
        return replace(message, content="\n".join(filter(None, (message.content, *calls))), tool_calls=())


def make_preamble(parser: CallParser) -> Preamble:
    """Return the preamble for calls that ``parser`` reads.

    Raises:
        ConfigError: it has no text for them.
    """
    call = _CALLS.get(type(parser))
    if call is None:
        raise ConfigError(
            "render.tool_preamble=true describes calls of render.tool_parser=hermes and tags; set one of them"
        )
    return Preamble(call)
