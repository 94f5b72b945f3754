"""The search tool: calls and plain queries run as batches of one retriever."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TYPE_CHECKING, Any

from agentrl import Tool, ToolCall, ToolResult, ToolStatus
from agentrl.core.errors import ConfigError, UnknownNameError
from agentrl.core.user_code import call_in_thread
from agentrl.toolserver.hosted_tool import StatelessTool

from .corpora import open_corpora
from .options import MAX_TOPK, SearchOptions, query_fault
from .retriever import Corpora, Hit

if TYPE_CHECKING:
    from starlette.routing import BaseRoute

BATCH = 256
"""Queries that the retriever gets at the same time."""
_DESCRIPTION = "Search the documents of a corpus and return the contents of those that match a query best."


class SearchTool(StatelessTool):
    """Retrieval over corpora. Equal queries give equal results, so calls may be repeated.

    Args:
        options: what to open at `start`.
        corpora: open corpora, in place of those of the options.
    """

    def __init__(self, options: SearchOptions, corpora: Corpora | None = None) -> None:
        super().__init__(Tool("search", _DESCRIPTION, _parameters(options.topk)), max_batch=BATCH)
        self.searched = 0
        """Queries so far."""
        self._options = options
        self._corpora = corpora
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="search")

    @property
    def topk(self) -> int:
        """Documents a search, if the call does not say."""
        return self._options.topk

    async def start(self) -> None:
        """Open the corpora; building an index may take hours.

        Raises:
            ConfigError: there is no corpus, or a corpus, model or index cannot be used.
        """
        if self._corpora is not None:
            return
        options = self._options
        if not options.files():
            raise ConfigError("--corpus (tools.search.corpus): no corpus given")
        work = partial(
            open_corpora,
            options.files(),
            options.retriever,
            model=options.model,
            indexes=options.indexes(),
            device=options.device,
        )
        self._corpora = await call_in_thread(work, "open-corpora")  # SIGTERM ends a server that builds an index

    async def call_batch(self, calls: Sequence[ToolCall]) -> Sequence[ToolResult]:
        """Search in a thread, so that the server stays responsive."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, self.answer, calls)

    def answer(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Return a result for each call with checked arguments: its hits as text, and as data ``[{"document", "score"}]``."""
        groups: dict[tuple[int, str | None], list[int]] = {}
        results: dict[int, ToolResult] = {}
        for number, call in enumerate(calls):
            if fault := query_fault(call.arguments["query"]):
                results[number] = ToolResult(call.id, ToolStatus.INVALID, f"search: {fault}")
                continue
            groups.setdefault((call.arguments.get("topk", self.topk), call.arguments.get("corpus")), []).append(number)
        for (topk, corpus), numbers in groups.items():
            try:
                hits_by_query = self._search([calls[number].arguments["query"] for number in numbers], topk, corpus)
            except UnknownNameError as error:
                results |= {n: ToolResult(calls[n].id, ToolStatus.INVALID, f"search: {error}") for n in numbers}
                continue
            for number, hits in zip(numbers, hits_by_query, strict=True):
                text = "\n\n".join(hit["document"]["contents"] for hit in hits) or "No document matches the query."
                results[number] = ToolResult(calls[number].id, ToolStatus.OK, text, data=hits)
        return [results[number] for number in range(len(calls))]

    async def search(self, queries: Sequence[str], topk: int, corpus: str | None) -> list[list[Hit]]:
        """Return for each query at most ``topk`` documents, best first.

        Raises:
            UnknownNameError: there is no such corpus, or no name was given and there are several.
        """
        loop, hits = asyncio.get_running_loop(), list[list[Hit]]()
        for start in range(0, len(queries), BATCH):  # calls of policies run in between
            batch = queries[start : start + BATCH]
            hits += await loop.run_in_executor(self._thread, self._search, batch, topk, corpus)
        return hits

    def _search(self, queries: Sequence[str], topk: int, corpus: str | None) -> list[list[Hit]]:
        assert self._corpora is not None, "start comes first"
        self.searched += len(queries)
        return self._corpora.search(queries, topk, corpus)

    def routes(self) -> Sequence[BaseRoute]:
        """Return ``POST /retrieve``."""
        from .retrieve import retrieve_route

        return [retrieve_route(self.search, self.topk)]

    def health(self) -> Mapping[str, Any]:
        """Return the documents of each corpus, and the queries so far."""
        assert self._corpora is not None, "start comes first"
        return {
            "corpora": {name: len(retriever) for name, retriever in self._corpora.retrievers.items()},
            "searched": self.searched,
        }


def _parameters(topk: int) -> Mapping[str, Any]:
    return {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "what to search for"},
            "topk": {
                "type": "integer",
                "minimum": 1,
                "maximum": MAX_TOPK,
                "default": topk,
                "description": "documents to return",
            },
            "corpus": {"type": "string", "description": "which corpus, if there are several"},
        },
        "required": ["query"],
        "additionalProperties": False,
    }
