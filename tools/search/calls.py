"""A search as a tool call, and its hits as a tool's result: the same in the process and over HTTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jsonschema

from agentrl import ToolCall, ToolResult, ToolStatus

from .retriever import Hit

MAX_TOPK = 100
"""More documents than this are no search any more."""

PARAMETERS: Mapping[str, Any] = {
    "type": "object",
    "properties": {
        "query": {"type": "string", "description": "what to search for"},
        "topk": {"type": "integer", "minimum": 1, "maximum": MAX_TOPK, "description": "documents to return"},
        "corpus": {"type": "string", "description": "which corpus, where there are several"},
    },
    "required": ["query"],
    "additionalProperties": False,
}
"""JSON Schema of a call's arguments."""

_VALIDATOR = jsonschema.Draft202012Validator(dict(PARAMETERS))


@dataclass(frozen=True, slots=True)
class Search:
    """One checked call."""

    query: str
    """What to search for."""
    topk: int
    """Documents to return."""
    corpus: str | None
    """Which corpus; None where there is one only."""


def parse_call(call: ToolCall, topk: int) -> Search | ToolResult:
    """Return what ``call`` asks for (``topk`` where it does not say), or the result that tells its fault."""
    fault = jsonschema.exceptions.best_match(_VALIDATOR.iter_errors(dict(call.arguments)))
    if fault is not None:
        return ToolResult(call.id, ToolStatus.INVALID, f"search: {fault.message}")
    return Search(call.arguments["query"], call.arguments.get("topk", topk), call.arguments.get("corpus"))


def as_result(call_id: str, hits: Sequence[Hit]) -> ToolResult:
    """Return ``hits`` as text for a policy, and as data for an environment that formats them itself."""
    text = "\n\n".join(hit["document"]["contents"] for hit in hits)
    return ToolResult(call_id, ToolStatus.OK, text or "No document matches the query.", data=list(hits))
