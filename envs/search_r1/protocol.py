"""The text protocol of Search-R1 (Jin et al. 2025, arXiv 2503.09516): its prompt, tags and observations.

Pure functions: none of them raises, whatever the text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

PROMPT = (
    "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
    "new information. After reasoning, if you find you lack some knowledge, you can call a search engine by "
    "<search> query </search> and it will return the top searched results between <information> and </information>. "
    "You can search as many times as your want. If you find no further external knowledge needed, you can directly "
    "provide the answer inside <answer> and </answer>, without detailed illustrations. "
    "For example, <answer> Beijing </answer>. Question: {question}\n"
)
"""The prompt as published, its grammar included."""

INVALID_ACTION = (
    "\nMy previous action is invalid. If I want to search, I should put the query between <search> and </search>. "
    "If I want to give the final answer, I should put the answer between <answer> and </answer>. Let me try again.\n"
)
"""What follows a turn that neither searched nor answered; in the policy's own voice, as published."""

STOP = ("</search>", "</answer>")
"""Ends a turn."""

_CLOSING = re.compile(r"</(search|answer)>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """What one turn asks for."""

    kind: Literal["search", "answer", "invalid"]
    """What to do."""
    text: str = ""
    """The query or the answer, without the spaces around it; never empty unless invalid."""


def parse(said: str) -> Parsed:
    """Return what a turn asks for. Its first closing tag ends the turn, as the stop strings do.

    What stands behind that tag is the rest of the token that held it, and no action. The action's text begins
    at the nearest opening tag of the same kind; without one, or with nothing between, the turn is invalid.
    """
    closing = _CLOSING.search(said)
    if closing is None:
        return Parsed("invalid")
    kind: Literal["search", "answer"] = "search" if closing[1] == "search" else "answer"
    _, opening, text = said[: closing.start()].rpartition(f"<{kind}>")
    if not opening or not text.strip():
        return Parsed("invalid")
    return Parsed(kind, text.strip())


def document(index: int, contents: str) -> str:
    r"""Return one retrieved document, ``contents`` being ``"title"\ntext``, as line ``index`` of the information."""
    title, _, text = contents.partition("\n")
    return f"Doc {index}(Title: {title}) {text}\n"


def documents(hits: Iterable[Mapping[str, Any]]) -> str:
    """Return all of a retrieval server's ``hits``, best first, as text."""
    return "".join(document(index, hit["document"]["contents"]) for index, hit in enumerate(hits, 1))


def information(text: str) -> str:
    """Return the observation that carries ``text``; the published code trims its ends too."""
    return f"\n\n<information>{text.strip()}</information>\n\n"
