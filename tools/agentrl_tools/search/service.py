"""The search tool as agentrl starts and calls it."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, get_args

from agentrl import ToolCall, ToolResult, ToolStatus
from agentrl.config.base import Section
from agentrl.core.errors import ConfigError, MissingError
from agentrl.toolserver.hosted_tool import HostedTool
from agentrl.toolserver.options import make_server_config, read_options
from agentrl.toolserver.service import HostedService, serve

from .corpora import E5_MODEL, RetrieverName, require_e5
from .corpus import Document, named_files, write_corpus
from .options import SearchOptions
from .tool import SearchTool

if TYPE_CHECKING:
    from agentrl import TaskSet
    from agentrl.core.tool import ToolClient


class SearchService(HostedService):
    """Retrieval over JSONL corpora, with BM25 or with E5 and FAISS."""

    name: ClassVar[str] = "search"
    Options: ClassVar[type[Section]] = SearchOptions
    stateless: ClassVar[bool] = True

    def create_tools(self, options: SearchOptions) -> Sequence[HostedTool]:
        """Return the one tool."""
        if options.retriever == "bm25" and options.index is not None:
            raise ConfigError(
                f"--index (tools.search.options.index={options.index}) is for --retriever e5 "
                "(tools.search.options.retriever=e5); BM25 is built in memory"
            )
        return [SearchTool(options)]

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add the options of every server, and a flag for each of the tool's."""
        super().add_arguments(parser)
        add = parser.add_argument
        add(
            "--corpus",
            action="append",
            default=[],
            metavar="[NAME=]FILE.jsonl[.gz]",
            help="documents {'id', 'contents'}, one a line; repeat it with names to serve several corpora",
        )
        add("--topk", type=int, help="documents a search, if a request does not say; default 3")
        add(
            "--retriever",
            choices=get_args(RetrieverName),
            help="by words (the default), or by meaning (agentrl-framework[e5])",
        )
        add("--model", help=f"E5's model, a folder or hub id; default {E5_MODEL}")
        add(
            "--index",
            action="append",
            default=[],
            metavar="[NAME=]FILE",
            help="E5's FAISS index: loaded if the file exists, otherwise built and saved there",
        )
        add("--device", choices=("cpu", "cuda"), help="where E5 and a flat index are; default cpu")

    def serve(self, arguments: argparse.Namespace) -> None:
        """Serve until SIGTERM or SIGINT; flags come before the settings of ``--config``.

        Raises:
            ConfigError: a corpus, model or index cannot be used.
            PortInUseError: another process listens on ``--port``.
        """
        config = make_server_config(arguments.config, arguments.overrides, [self.name])
        for name in ("corpus", "index"):
            if files := named_files(getattr(arguments, name), f"--{name}"):
                config.tools[self.name][name] = files
        for name in ("topk", "retriever", "model", "device"):
            if getattr(arguments, name) is not None:
                config.tools[self.name][name] = getattr(arguments, name)
        serve(config, host=arguments.host, port=arguments.port)

    def check(self, options: Mapping[str, Any]) -> None:
        """Check the options, and that the corpus files and the extra for E5 exist."""
        super().check(options)
        parsed = self._parse(options)
        if parsed.retriever == "e5":
            require_e5()
        missing_files = [
            f"tools.search.options.corpus: there is no file {path} (corpus {name!r})"
            for name, path in parsed.files().items()
            if not path.is_file()
        ]
        if missing_files:
            raise MissingError("\n".join(missing_files))

    def launch_arguments(self, options: Mapping[str, Any], tasks: TaskSet, folder: Path) -> Sequence[str]:
        """Write the server's configuration, and without ``corpus`` the taskset's corpora, under ``folder``."""
        self.check(options)
        parsed = read_options(SearchOptions, options, self.name)
        files = parsed.tool.files()
        if not files:
            for name, documents in tasks.corpora().items():
                files[name] = folder / f"{name}.jsonl"
                write_corpus(documents, files[name])
        if not files:
            raise ConfigError(f"tools.search.options.corpus is not set, and {type(tasks).__name__} has no corpora")
        paths = {
            field: {name: path.resolve() for name, path in by_name.items()} or None
            for field, by_name in (("corpus", files), ("index", parsed.tool.indexes()))
        }
        return self._write_config(replace(parsed, tool=parsed.tool.model_copy(update=paths)), folder)

    def local_client(self, corpora: Mapping[str, Iterable[Document]], options: Mapping[str, Any]) -> ToolClient:
        """Return a client of the same search in this process: for demonstrations and tests. Always BM25.

        Example::

            search = SearchService().local_client(tasks.corpora(), {})
            call = ToolCall("1", "search", {"query": "Tamo Rilek", "corpus": "train"})
            result = await search.call(call, episode_id="1")
        """
        from .bm25 import bm25_corpora

        parsed = self._parse(options)
        if parsed.retriever != "bm25":
            raise ConfigError(f"tools.search.options.retriever={parsed.retriever}: without a server there is only bm25")
        return _LocalSearch(SearchTool(parsed, bm25_corpora(corpora, "corpora")))

    def _parse(self, options: Mapping[str, Any]) -> SearchOptions:
        return read_options(SearchOptions, options, self.name).tool


class _LocalSearch:
    """Searches in the calling thread. There are no sessions to close."""

    keeps_sessions = False

    def __init__(self, tool: SearchTool) -> None:
        self._tool = tool

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        fault = self._tool.spec.schema_fault(call.arguments)
        return ToolResult(call.id, ToolStatus.INVALID, fault) if fault else self._tool.answer([call])[0]

    async def close_session(self, episode_id: str) -> None:
        """Do nothing."""

    async def aclose(self) -> None:
        """Do nothing."""
