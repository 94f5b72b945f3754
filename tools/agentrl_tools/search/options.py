"""Options of the search tool."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from agentrl.config.base import Section
from agentrl.toolserver import request_limits

from .corpora import E5_MODEL, RetrieverName
from .corpus import DEFAULT

MAX_TOPK = 100
"""The largest number of documents a search."""


class SearchOptions(Section):
    """``tools.search.options`` of a run, ``tools.search`` of a server."""

    topk: int = Field(default=3, ge=1, le=MAX_TOPK)
    """Documents a search, if the call does not say."""
    corpus: Path | dict[str, Path] | None = None
    """A JSONL file (gzipped or not), or files by corpus name; in a run without it, the taskset's own corpora."""
    retriever: RetrieverName = "bm25"
    """``bm25`` by words, ``e5`` by meaning (needs ``agentrl-framework[e5]``)."""
    model: str = E5_MODEL
    """E5's model: a folder or hub id."""
    index: Path | dict[str, Path] | None = None
    """E5's FAISS index, or one by corpus name: loaded if the file exists, otherwise built and saved there."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Where E5 runs, and its index if that is a flat one."""

    def files(self) -> dict[str, Path]:
        """Return the corpus files by name; empty if none is set."""
        return _by_name(self.corpus)

    def indexes(self) -> dict[str, Path]:
        """Return the index files by name; empty if none is set."""
        return _by_name(self.index)


def query_fault(query: str) -> str:
    """Return why a query is refused; empty if it is not."""
    longest = request_limits.QUERY_CHARACTERS
    return "" if len(query) <= longest else f"the query has {len(query)} characters, {longest} are allowed"


def _by_name(files: Path | dict[str, Path] | None) -> dict[str, Path]:
    if files is None:
        return {}
    return {name: path.expanduser() for name, path in (files if isinstance(files, dict) else {DEFAULT: files}).items()}
