"""Independent renderings to hold ours against: the chat templates that ``trl`` ships, and the package ``renderers``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from agentrl.core.tool import Tool
from agentrl.core.types import Message
from agentrl.render.formats.base import tool_schema

TEMPLATES: Mapping[str, str] = {
    "qwen2.5": "qwen2_5",
    "qwen3": "qwen3",
    "qwen3-instruct": "qwen3_instruct_2507",
    "llama3": "llama3",
    "llama3.1": "llama3_1",
    "llama3.2": "llama3_2",
    "deepseek-r1": "deepseekv3",  # trl's name; it opens with <think> and drops reasoning, as R1's does
    "glm-4.5": "glm4moe",
}
"""By chat format: the name of trl's template of it. ``template`` takes any other name too."""


@cache
def template(name: str) -> str:
    """Return the text of trl's chat template ``name``, or of the one of that chat format."""
    package = find_spec("trl")
    assert package is not None, "pip install trl (part of agentrl-framework[dev])"
    file = Path(str(package.origin)).parent / "chat_templates" / f"{TEMPLATES.get(name, name)}.jinja"
    return file.read_text(encoding="utf-8")


def as_dicts(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return messages in OpenAI's shape, which templates and other renderers take."""
    dicts: list[dict[str, Any]] = []
    for message in messages:
        fields: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.tool_call_id is not None:
            fields["tool_call_id"] = message.tool_call_id
        if message.tool_calls:
            fields["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
                for call in message.tool_calls
            ]
        dicts.append(fields)
    return dicts


def template_text(
    tokenizer: PreTrainedTokenizerBase,
    name: str,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    opener: bool = True,
    **variables: Any,
) -> str:
    """Return what transformers makes of a conversation with trl's template ``name``."""
    text = tokenizer.apply_chat_template(
        as_dicts(messages),
        tools=[tool_schema(tool) for tool in tools] or None,
        chat_template=template(name),
        add_generation_prompt=opener,
        tokenize=False,
        **variables,
    )
    assert isinstance(text, str)
    return text


class Other:
    """A renderer of the package ``renderers``.

    Args:
        tokenizer: of the family.
        name: as ``renderers.config_from_name`` has it, such as ``qwen3``.
        options: of the renderer's config.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str, **options: Any) -> None:
        from renderers import config_from_name, create_renderer

        config = config_from_name(name)
        self._renderer = create_renderer(tokenizer, config.model_copy(update=options))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> tuple[int, ...]:
        """Return the ids of a conversation with the opener of the next turn."""
        specs = [tool_schema(tool) for tool in tools] or None
        return tuple(self._renderer.render_ids(as_dicts(messages), tools=specs, add_generation_prompt=True))

    def bridge(
        self, prompt: Sequence[int], sampled: Sequence[int], new: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> tuple[int, ...] | None:
        """Return the next prompt, or None where it cannot be had by appending."""
        specs = [tool_schema(tool) for tool in tools] or None
        made = self._renderer.bridge_to_next_turn(list(prompt), list(sampled), as_dicts(new), tools=specs)
        return None if made is None else tuple(made.token_ids)
