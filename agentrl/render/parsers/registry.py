"""Tool-call parsers by name, and the choice of one by chat template."""

from __future__ import annotations

from agentrl.render.parsers.base import CallParser, MakeParser
from agentrl.render.parsers.deepseek import DeepSeekParser
from agentrl.render.parsers.gemma import GemmaParser
from agentrl.render.parsers.glm import Glm4Parser, GlmParser, HunyuanParser
from agentrl.render.parsers.harmony import HarmonyParser
from agentrl.render.parsers.hermes import HermesParser
from agentrl.render.parsers.invoke import AtemParser, DsmlParser, MiniMaxParser, Step3Parser
from agentrl.render.parsers.json_lists import CohereParser, GraniteParser, MistralParser
from agentrl.render.parsers.kimi import KimiParser
from agentrl.render.parsers.llama3 import Llama3Parser
from agentrl.render.parsers.pythonic import Lfm2Parser, PythonicParser, ToolCodeParser
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
    "harmony": HarmonyParser,
    "minimax": MiniMaxParser,
    "dsml": DsmlParser,
    "step3": Step3Parser,
    "atem": AtemParser,
    "mistral": MistralParser,
    "gemma": GemmaParser,
    "tool-code": ToolCodeParser,
    "lfm2": Lfm2Parser,
    "hunyuan": HunyuanParser,
    "cohere": CohereParser,
    "granite": GraniteParser,
    "tags": TagsParser,
}
"""Parsers by ``render.tool_parser``."""

SIGNS: tuple[tuple[str, str], ...] = (
    ("<|channel|>analysis", "harmony"),
    ("<minimax:tool_call>", "minimax"),
    ("｜DSML｜", "dsml"),
    ("steptml:invoke", "step3"),
    ("<atem:invoke", "atem"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|tool_call>call:", "gemma"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call_start|>", "lfm2"),
    ("<|tool_list_start|>", "lfm2"),
    ("<tool_calls", "hunyuan"),
    ("<|START_ACTION|>", "cohere"),
    ("<|tool_call|>", "granite"),
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
