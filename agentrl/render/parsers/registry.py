"""Tool-call parsers by name, and the choice of one by chat template."""

from __future__ import annotations

from agentrl.render.parsers.base import CallParser, MakeParser
from agentrl.render.parsers.deepseek import DeepSeekParser
from agentrl.render.parsers.glm import Glm4Parser, GlmParser
from agentrl.render.parsers.hermes import HermesParser
from agentrl.render.parsers.kimi import KimiParser
from agentrl.render.parsers.llama3 import Llama3Parser
from agentrl.render.parsers.pythonic import PythonicParser
from agentrl.render.parsers.qwen3_coder import Qwen3CoderParser
from agentrl.render.parsers.tags import TagsParser

PARSERS: dict[str, MakeParser] = {
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "pythonic": PythonicParser,
    "deepseek": DeepSeekParser,
    "glm-4": Glm4Parser,
    "glm": GlmParser,
    "kimi": KimiParser,
    "qwen3-coder": Qwen3CoderParser,
    "tags": TagsParser,
}
"""Parsers by ``render.tool_parser``."""

SIGNS: tuple[tuple[str, str], ...] = (
    ("<arg_key>", "glm"),
    ("<function=", "qwen3-coder"),
    ("可用工具", "glm-4"),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("[func_name1(", "pythonic"),  # before Llama 3: such templates may show its JSON calls in few-shot examples
    ("Environment: ipython", "llama3"),
)
"""Text that occurs in the chat templates of a parser's format; the first one found decides."""


def parser_of_template(template: str) -> CallParser:
    """Return the parser of a chat template's call format, by default the Hermes parser."""
    name = next((name for sign, name in SIGNS if sign in template), "hermes")
    return PARSERS[name]()
