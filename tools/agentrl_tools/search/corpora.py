"""Opens the corpora that the server's options name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from agentrl import ConfigError
from agentrl.core.extras import require

from .corpus import open_corpus
from .retriever import Corpora

RetrieverName = Literal["bm25", "e5"]
"""By words, or by meaning."""
E5_MODEL = "intfloat/e5-base-v2"
"""The model that the published wiki-18 index was made with."""


def open_corpora(
    files: Mapping[str, Path],
    retriever: RetrieverName = "bm25",
    *,
    model: str = E5_MODEL,
    indexes: Mapping[str, Path] | None = None,
    device: str = "cpu",
) -> Corpora:
    """Read corpora and make them searchable; only what ``retriever`` needs is imported.

    Raises:
        ConfigError: a corpus, model or index that cannot be used.
        MissingError: the extra for E5 is not installed.
    """
    if retriever == "e5":
        require_e5()
        from .e5 import e5_corpora

        return e5_corpora(
            {name: open_corpus(path, "--corpus") for name, path in files.items()}, model, indexes or {}, device
        )
    if indexes:
        raise ConfigError("--index (tools.search.options.index) is for --retriever e5; BM25 is built in memory")
    from .bm25 import bm25_corpora

    return bm25_corpora({name: open_corpus(path, "--corpus") for name, path in files.items()})


def require_e5() -> None:
    """Raise `MissingError` if the extra for E5 is not installed."""
    require("faiss", "--retriever e5 (tools.search.options.retriever=e5)")
