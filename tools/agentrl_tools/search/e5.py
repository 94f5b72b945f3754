"""Dense retrieval: E5's vectors in a FAISS index. Needs the extra ``agentrl-framework[e5]``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from agentrl import ConfigError

from .corpus import Document
from .encoder import Encoder
from .retriever import Corpora, Hit
from .vectors import VectorIndex, build_index, is_flat, load_index, on_device, save_index

QUERIES = 256
"""Queries that are encoded and searched at the same time."""


class E5:
    """A `Retriever` by meaning. The score is the cosine, so there are ``topk`` hits if the corpus has as many."""

    def __init__(self, documents: Sequence[Document], encoder: Encoder, index: VectorIndex) -> None:
        """Search ``index``, whose vector ``i`` is document ``i``."""
        self._documents, self._encoder, self._index = documents, encoder, index

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self._documents)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        """Return for each query the ``topk`` nearest documents, nearest first."""
        hits: list[list[Hit]] = []
        for start in range(0, len(queries), QUERIES):
            vectors = self._encoder.encode(queries[start : start + QUERIES], "query")
            scores, numbers = self._index.search(vectors, min(topk, len(self._documents)))
            pairs = zip(scores.tolist(), numbers.tolist(), strict=True)
            hits += [self._hits(row_scores, row_numbers) for row_scores, row_numbers in pairs]
        return hits

    def _hits(self, scores: list[float], numbers: list[int]) -> list[Hit]:
        # An approximate index gives -1 for each hit that it did not find.
        scored_numbers = [(score, number) for score, number in zip(scores, numbers, strict=True) if number >= 0]
        return [{"document": self._documents[number], "score": score} for score, number in scored_numbers]


def e5_corpora(
    documents: Mapping[str, Sequence[Document]], model: str, indexes: Mapping[str, Path], device: str
) -> Corpora:
    """Return every corpus under E5. An index whose file exists is loaded; others are built, and saved if they have a file.

    Args:
        documents: by corpus name.
        model: a folder or hub id.
        indexes: files by corpus name, for any of the corpora.
        device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: the model cannot be loaded, an index does not match it or its corpus, or there is no such corpus.
    """
    strange = sorted(set(indexes) - set(documents))
    if strange:
        raise ConfigError(
            f"--index {strange[0]}={indexes[strange[0]]}: there is no such corpus; --corpus gives {', '.join(documents)}"
        )
    encoder = Encoder(model, device, "--model (tools.search.options.model)")
    return Corpora({name: _open(name, rows, encoder, indexes.get(name)) for name, rows in documents.items()})


def _open(name: str, documents: Sequence[Document], encoder: Encoder, path: Path | None) -> E5:
    log = partial(print, f"{name}:", flush=True)
    index: Any
    if path is not None and path.is_file():
        index = load_index(path, encoder, len(documents), f"--index {name} (tools.search.options.index)")
        log(f"loaded {path}")
    else:
        index = build_index(encoder, documents, log)
        if path is not None:
            save_index(index, path)
        log(f"built the index, {'saved as ' + str(path) if path else 'not saved: --index FILE keeps it'}")
    if encoder.device.type != "cpu" and not is_flat(index):
        log(f"{type(index).__name__} is searched on the CPU: only a flat index goes to the GPU")
    return E5(documents, encoder, on_device(index, encoder.device))
