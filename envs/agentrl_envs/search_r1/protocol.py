"""The text protocol of Search-R1 (Jin et al. 2025, arXiv 2503.09516): its prompt, tags and observations.

Pure functions, which raise for no text.
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
"""Follows a turn that neither searched nor answered; in the policy's voice, as published."""

STOP = ("</search>", "</answer>")
"""Ends a turn."""

_CLOSING = re.compile(r"</(search|answer)>")


@dataclass(frozen=True, slots=True)
class Parsed:
    """The action of one turn."""

    kind: Literal["search", "answer", "invalid"]
    """The action."""
    text: str = ""
    """The query or the answer, stripped; empty only if the turn is invalid."""


def parse(content: str) -> Parsed:
    """Return the action of a turn. Its first closing tag ends the turn, as the stop strings do.

    Text after that tag is the rest of the token that contained it, and is ignored. The action's text begins at the nearest
    opening tag of the same kind; without one, or with no text in between, the turn is invalid.
    """
    closing = _CLOSING.search(content)
    if closing is None:
        return Parsed("invalid")
    kind: Literal["search", "answer"] = "search" if closing[1] == "search" else "answer"
    _, opening, text = content[: closing.start()].rpartition(f"<{kind}>")
    if not opening or not text.strip():
        return Parsed("invalid")
    return Parsed(kind, text.strip())


def document(index: int, contents: str) -> str:
    r"""Return a retrieved document with ``contents`` ``"title"\ntext`` as line ``index`` of the information."""
    title, _, text = contents.partition("\n")
    return f"Doc {index}(Title: {title}) {text}\n"


def documents(hits: Iterable[Mapping[str, Any]]) -> str:
    """Return the ``hits`` of a retrieval server, best first, as text."""
    return "".join(document(index, hit["document"]["contents"]) for index, hit in enumerate(hits, 1))


def information(text: str) -> str:
    """Return the observation with ``text``, stripped as in the published code."""
    return f"\n\n<information>{text.strip()}</information>\n\n"
