"""BM25 over one corpus (Robertson and Zaragoza 2009, as ``bm25s`` computes it)."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from agentrl import ConfigError

from .corpus import Document
from .retriever import Corpora, Hit

# bm25s imports JAX if it is installed, and JAX reserves most of a GPU's memory at its start: on the CPU it reserves none.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import bm25s

logging.getLogger("bm25s").setLevel(logging.WARNING)  # it sets its own to DEBUG, and logs each index


def _words(texts: list[str]) -> list[list[str]]:
    # Queries are mostly names: no stemmer, no stop words, one-letter words kept.
    words: list[list[str]] = bm25s.tokenize(
        texts, lower=True, token_pattern=r"\w+", stopwords=[], stemmer=None, return_ids=False, show_progress=False
    )
    return words


class BM25:
    """A `Retriever` by words. Ties go to the document that stands first in the corpus."""

    def __init__(self, documents: Iterable[Document], key: str = "--corpus") -> None:
        """Index ``documents``; a sequence is kept as it is, and read again for the documents that are found.

        Raises:
            ConfigError: there are none, or none has a word in it.
        """
        self._documents = documents if isinstance(documents, Sequence) else list(documents)
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
        matches = np.flatnonzero(scores > 0)
        if len(matches) > topk:
            # Documents that tie for the last place are kept, so that the stable order below decides and not the partition.
            last = np.partition(scores[matches], -topk)[-topk]
            matches = matches[scores[matches] >= last]
        best = matches[np.argsort(-scores[matches], kind="stable")][:topk]
        return [{"document": self._documents[i], "score": float(scores[i])} for i in best.tolist()]


def bm25_corpora(documents: Mapping[str, Iterable[Document]], key: str = "--corpus") -> Corpora:
    """Return every corpus under BM25.

    Raises:
        ConfigError: there is none, or one is empty.
    """
    return Corpora({name: BM25(rows, f"{key} {name}") for name, rows in documents.items()}, key)
