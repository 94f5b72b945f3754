"""The interface of a retriever, which searches one corpus, and a set of them by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from agentrl.core.errors import ConfigError, UnknownNameError, unknown_name

Hit = dict[str, Any]
"""``{"document": {"id", "contents"}, "score": float}``."""


class Retriever(Protocol):
    """One corpus. Used by one thread at a time."""

    def __len__(self) -> int:
        """Return the number of documents."""
        ...

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query at most ``topk`` documents, best first. Equal queries give equal answers."""
        ...


class Corpora:
    """Retrievers by the name of their corpus."""

    def __init__(self, retrievers: Mapping[str, Retriever], key: str = "--corpus") -> None:
        """Search ``retrievers``.

        Raises:
            ConfigError: there are none.
        """
        if not retrievers:
            raise ConfigError(f"{key}: no corpus given")
        self.retrievers = dict(retrievers)

    def search(self, queries: Sequence[str], topk: int, corpus: str | None = None) -> list[list[Hit]]:
        """Search a corpus by name; without a name, the only one.

        Raises:
            UnknownNameError: there is no such corpus, or no name was given and there are several.
        """
        if corpus is None and len(self.retrievers) == 1:
            return next(iter(self.retrievers.values())).search(queries, topk)
        if corpus is None or corpus not in self.retrievers:
            raise unknown_corpus(corpus, self.retrievers)
        return self.retrievers[corpus].search(queries, topk)


def unknown_corpus(corpus: str | None, names: Iterable[str]) -> UnknownNameError:
    """Return the error for a corpus that is not there."""
    if corpus is None:
        return UnknownNameError(f"which corpus? The server holds several: {', '.join(sorted(names))}")
    return unknown_name("corpus", corpus, names, "the field 'corpus'")
