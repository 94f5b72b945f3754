"""The search tool as agentrl starts and calls it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from agentrl import ToolCall, ToolResult, ToolService, ToolStatus
from agentrl.core.errors import ConfigError, MissingError, UnknownNameError

from .calls import as_result, parse_call
from .corpora import E5_MODEL, RetrieverName, missing_extra, open_corpora
from .corpus import Document, named_files, write_corpus
from .options import SearchOptions

if TYPE_CHECKING:
    from agentrl import TaskSet
    from agentrl.core.tool import ToolClient


class SearchService(ToolService):
    """Retrieval over JSONL corpora, with BM25 or with E5 and FAISS."""

    name: ClassVar[str] = "search"

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the server's options."""
        add = parser.add_argument
        add(
            "--corpus",
            action="append",
            required=True,
            metavar="[NAME=]FILE.jsonl[.gz]",
            help="documents {'id', 'contents'}, one a line; repeat it with names to serve several corpora",
        )
        add("--topk", type=int, default=3, help="documents a search, where a request does not say")
        add(
            "--retriever", choices=get_args(RetrieverName), default="bm25", help="by words, or by meaning (agentrl[e5])"
        )
        add("--model", default=E5_MODEL, help=f"E5's model, a folder or hub id; default {E5_MODEL}")
        add(
            "--index",
            action="append",
            default=[],
            metavar="[NAME=]FILE",
            help="E5's FAISS index: loaded where the file exists, else built and saved there",
        )
        add("--device", choices=("cpu", "cuda"), default="cpu", help="where E5 and a flat index lie")

    def serve(self, arguments: argparse.Namespace) -> None:
        """Open the corpora and serve until told to stop.

        Raises:
            ConfigError: a corpus, model or index that cannot be used.
            PortInUseError: something else listens on ``--port``.

        """
        from .server import serve

        opener = partial(
            open_corpora,
            named_files(arguments.corpus, "--corpus"),
            arguments.retriever,
            model=arguments.model,
            indexes=named_files(arguments.index, "--index"),
            device=arguments.device,
        )
        serve(opener, host=arguments.host, port=arguments.port, topk=arguments.topk)

    def check(self, options: Mapping[str, Any]) -> None:
        """Check values, and that the corpus files and the extra for E5 are there."""
        parsed = SearchOptions.parse(options)
        if parsed.retriever == "bm25" and parsed.index is not None:
            raise ConfigError(
                f"tools.search.options.index={parsed.index} is for E5: set tools.search.options.retriever=e5, or leave it out"
            )
        lacks = [
            f"tools.search.options.corpus: there is no file {path} (corpus {name!r})"
            for name, path in parsed.files().items()
            if not path.is_file()
        ]
        if parsed.retriever == "e5" and (extra := missing_extra()):
            lacks.append(extra)
        if lacks:
            raise MissingError("\n".join(lacks))

    def launch_arguments(self, options: Mapping[str, Any], tasks: TaskSet, folder: Path) -> Sequence[str]:
        """Return ``--corpus`` for each file of the option, or for the taskset's corpora, written under ``folder``."""
        parsed = SearchOptions.parse(options)
        self.check(options)
        files = parsed.files()
        if not files:
            for name, documents in tasks.corpora().items():
                files[name] = folder / f"{name}.jsonl"
                write_corpus(documents, files[name])
        if not files:
            raise ConfigError(
                f"tools.search.options.corpus is not set, and {type(tasks).__name__} brings no documents of its own"
            )
        arguments = [*(f"--corpus={name}={path.resolve()}" for name, path in files.items()), f"--topk={parsed.topk}"]
        if parsed.retriever == "bm25":
            return arguments
        indexes = [f"--index={name}={path.resolve()}" for name, path in parsed.indexes().items()]
        return [*arguments, "--retriever=e5", *indexes, f"--model={parsed.model}", f"--device={parsed.device}"]

    def client(self, url: str, options: Mapping[str, Any]) -> ToolClient:
        """Return a client; it belongs to the event loop that first calls it."""
        from .client import SearchClient

        return SearchClient(url, SearchOptions.parse(options))

    @classmethod
    def local(
        cls, corpora: Mapping[str, Iterable[Document]], options: Mapping[str, Any] | None = None
    ) -> Callable[[ToolCall], ToolResult]:
        """Return the same search as a plain function, without a server: for demonstrations and tests. Always BM25.

        Example::

            search = SearchService.local(tasks.corpora())
            result = search(ToolCall("1", "search", {"query": "Tamo Rilek", "corpus": "train"}))
        """
        from .bm25 import bm25_corpora

        parsed = SearchOptions.parse(options or {})
        if parsed.retriever != "bm25":
            raise ConfigError(f"tools.search.options.retriever={parsed.retriever}: without a server there is only bm25")
        topk = parsed.topk
        indexes = bm25_corpora(corpora, "corpora")

        def search(call: ToolCall) -> ToolResult:
            asked = parse_call(call, topk)
            if isinstance(asked, ToolResult):
                return asked
            try:
                return as_result(call.id, indexes.search([asked.query], asked.topk, asked.corpus)[0])
            except UnknownNameError as error:
                return ToolResult(call.id, ToolStatus.INVALID, str(error))

        return search
