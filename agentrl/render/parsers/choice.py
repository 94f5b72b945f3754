"""Which parser reads a model's tool calls."""

from __future__ import annotations

from agentrl.render.parsers.base import CallParser, MakeParser
from agentrl.render.parsers.hermes import HermesParser

PARSERS: dict[str, MakeParser] = {"hermes": HermesParser}
"""By ``render.tool_parser``."""

SIGNS: tuple[tuple[str, str], ...] = ()
"""Text that a chat template holds if its model writes calls in that parser's format; the first that is found decides."""


def parser_of_template(template: str) -> CallParser:
    """Return the parser of the format that a chat template shows, by default that of Hermes."""
    name = next((name for sign, name in SIGNS if sign in template), "hermes")
    return PARSERS[name]()
