"""BM25 over one corpus (Robertson and Zaragoza 2009, as ``bm25s`` computes it), and several corpora by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import bm25s
import numpy as np
from numpy.typing import NDArray

from agentrl.errors import ConfigError, UnknownNameError, unknown_name

from .corpus import Document

Hit = dict[str, Any]
"""``{"document": {"id", "contents"}, "score": float}``."""


def _words(texts: list[str]) -> list[list[str]]:
    # Names are what is searched for: no stemmer, no stop words, one-letter words kept.
    words: list[list[str]] = bm25s.tokenize(
        texts, lower=True, token_pattern=r"\w+", stopwords=[], stemmer=None, return_ids=False, show_progress=False
    )
    return words


class Index:
    """One corpus. Equal queries always give equal answers; ties go to the document that stands first in the corpus."""

    def __init__(self, documents: Iterable[Document], key: str = "--corpus") -> None:
        """Index ``documents``.

        Raises:
            ConfigError: there is none, or none has a word in it.

        """
        self._documents = [{"id": row["id"], "contents": row["contents"]} for row in documents]
        words = _words([row["contents"] for row in self._documents])
        if not any(words):
            raise ConfigError(f"{key}: the corpus holds no document with a word in it")
        self._bm25 = bm25s.BM25(method="lucene")
        self._bm25.index(words, show_progress=False)

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._documents)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query the at most ``topk`` best documents that share a word with it, best first."""
        return [self._best(words, topk) for words in _words(list(queries))]

    def _best(self, words: list[str], topk: int) -> list[Hit]:
        if not words:
            return []
        scores: NDArray[np.float32] = self._bm25.get_scores(words)
        found = np.flatnonzero(scores > 0)
        if len(found) > topk:
            # All that tie with the last place stay in, so that the order below decides and not the partition.
            last = np.partition(scores[found], -topk)[-topk]
            found = found[scores[found] >= last]
        best = found[np.argsort(-scores[found], kind="stable")][:topk]
        return [{"document": self._documents[i], "score": float(scores[i])} for i in best]


class Corpora:
    """Indexes by name."""

    def __init__(self, documents: Mapping[str, Iterable[Document]], key: str = "--corpus") -> None:
        """Index every corpus.

        Raises:
            ConfigError: there is none, or one is empty.

        """
        if not documents:
            raise ConfigError(f"{key}: no corpus given")
        self.indexes = {name: Index(rows, f"{key} {name}") for name, rows in documents.items()}

    def search(self, queries: Sequence[str], topk: int, corpus: str | None = None) -> list[list[Hit]]:
        """Search a corpus by name; without a name, the only one.

        Raises:
            UnknownNameError: there is no such corpus, or no name was given and there are several.

        """
        if corpus is None and len(self.indexes) == 1:
            return next(iter(self.indexes.values())).search(queries, topk)
        if corpus not in self.indexes:
            raise unknown_corpus(corpus, self.indexes)
        return self.indexes[corpus].search(queries, topk)


def unknown_corpus(corpus: str | None, known: Iterable[str]) -> UnknownNameError:
    """Return the error for a corpus that is not there."""
    if corpus is None:
        return UnknownNameError(f"which corpus? The server holds several: {', '.join(sorted(known))}")
    return unknown_name("corpus", corpus, known, "the field 'corpus'")
