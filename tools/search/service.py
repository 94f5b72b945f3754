"""The search tool as agentrl starts and calls it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from agentrl import ToolCall, ToolResult, ToolService, ToolStatus
from agentrl.errors import ConfigError, UnknownNameError

from .calls import as_result, parse_call
from .corpus import Document, write_corpus
from .index import Corpora
from .options import SearchOptions

if TYPE_CHECKING:
    from agentrl import TaskSet
    from agentrl.protocols import ToolClient


class SearchService(ToolService):
    """BM25 retrieval over JSONL corpora."""

    name: ClassVar[str] = "search"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add ``--corpus`` and ``--topk``."""
        parser.add_argument(
            "--corpus",
            action="append",
            required=True,
            metavar="[NAME=]FILE.jsonl",
            help="documents {'id', 'contents'}, one a line; repeat it with names to serve several corpora",
        )
        parser.add_argument("--topk", type=int, default=3, help="documents a search, where a request does not say")

    def serve(self, arguments: argparse.Namespace) -> None:
        """Index the corpora and serve until told to stop.

        Raises:
            ConfigError: a corpus that cannot be read.
            PortInUseError: something else listens on ``--port``.

        """
        from .server import serve

        serve(arguments.corpus, host=arguments.host, port=arguments.port, topk=arguments.topk)

    def launch_arguments(self, options: Mapping[str, Any], tasks: TaskSet, folder: Path) -> Sequence[str]:
        """Return ``--corpus`` for each file of the option, or for the taskset's corpora, written under ``folder``."""
        parsed = SearchOptions.parse(options)
        files = parsed.files()
        for name, path in files.items():
            if not path.is_file():
                raise ConfigError(f"tools.search.options.corpus: there is no file {path} (corpus {name!r})")
        if not files:
            for name, documents in tasks.corpora().items():
                files[name] = folder / f"{name}.jsonl"
                write_corpus(documents, files[name])
        if not files:
            raise ConfigError(
                f"tools.search.options.corpus is not set, and {type(tasks).__name__} brings no documents of its own"
            )
        corpora_arguments = [f"--corpus={name}={path.resolve()}" for name, path in files.items()]
        return [*corpora_arguments, f"--topk={parsed.topk}"]

    def client(self, url: str, options: Mapping[str, Any]) -> ToolClient:
        """Return a client; it belongs to the event loop that first calls it."""
        from .client import SearchClient

        return SearchClient(url, SearchOptions.parse(options))

    @classmethod
    def local(
        cls, corpora: Mapping[str, Iterable[Document]], options: Mapping[str, Any] | None = None
    ) -> Callable[[ToolCall], ToolResult]:
        """Return the same search as a plain function, without a server: for demonstrations and tests.

        Example::

            search = SearchService.local(tasks.corpora())
            result = search(ToolCall("1", "search", {"query": "Tamo Rilek", "corpus": "train"}))
        """
        topk = SearchOptions.parse(options or {}).topk
        indexes = Corpora(corpora, "corpora")

        def search(call: ToolCall) -> ToolResult:
            asked = parse_call(call, topk)
            if isinstance(asked, ToolResult):
                return asked
            try:
                return as_result(call.id, indexes.search([asked.query], asked.topk, asked.corpus)[0])
            except UnknownNameError as error:
                return ToolResult(call.id, ToolStatus.INVALID, str(error))

        return search
