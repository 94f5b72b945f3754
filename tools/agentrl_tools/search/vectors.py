"""FAISS indexes of passages: built, saved, loaded and checked; and a flat one's vectors searched on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import faiss
import numpy as np
import torch
from numpy.typing import NDArray

from agentrl import ConfigError

from .corpus import Document
from .encoder import BATCH, Encoder, Vectors

CHUNK = 16 * BATCH
"""Passages encoded between two checks of the time."""
REPORT_S = 5.0
"""Time between two lines of progress."""
BLOCK = 1 << 18
"""Vectors on the GPU that are compared with the queries at the same time."""


class VectorIndex(Protocol):
    """The part of a FAISS index that a search uses."""

    def search(self, queries: Vectors, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and numbers of the ``k`` best passages, a row each query; -1 if there are fewer."""
        ...


def build_index(encoder: Encoder, documents: Sequence[Document], report: Callable[[str], None]) -> Any:
    """Return a flat inner-product index of all documents; ``report`` gets lines of progress."""
    index = faiss.IndexFlatIP(encoder.dimension)
    total, begun = len(documents), time.monotonic()
    reported = begun
    for start in range(0, total, CHUNK):
        rows = documents[start : start + CHUNK]
        index.add(encoder.encode([row["contents"] for row in rows], "passage"))
        current_time = time.monotonic()
        if current_time - reported > REPORT_S:
            reported, rate = current_time, index.ntotal / (current_time - begun)
            minutes_left = (total - index.ntotal) / rate / 60
            report(
                f"encoded {index.ntotal:,} of {total:,} passages, {rate:,.0f} a second, {minutes_left:,.0f} minutes left"
            )
    return index


def save_index(index: Any, path: Path) -> None:
    """Write an index whole or not at all; the file's folder is made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(path.name + ".part")
    faiss.write_index(index, str(unfinished))
    unfinished.replace(path)


def load_index(path: Path, encoder: Encoder, passages: int, key: str) -> Any:
    """Return the index in a file, of any of FAISS's kinds.

    Raises:
        ConfigError: it cannot be read, or does not match the model (dimension), the corpus (number of passages) or the
            score (inner product).
    """
    try:
        index = faiss.read_index(str(path))
    except RuntimeError as error:
        # FAISS adds source lines to its messages.
        raise ConfigError(f"{key}: {path} is not a FAISS index: {str(error).splitlines()[0]}") from None
    if index.d != encoder.dimension:
        raise ConfigError(
            f"{key}: {path} holds vectors of {index.d} numbers, and {encoder.name} makes vectors of {encoder.dimension}: "
            "it was built with another model (--model, tools.search.options.model)"
        )
    if index.ntotal != passages:
        raise ConfigError(
            f"{key}: {path} holds {index.ntotal:,} passages, and the corpus has {passages:,}: "
            "it was built of another corpus (--corpus, tools.search.options.corpus)"
        )
    if index.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise ConfigError(f"{key}: {path} does not rank by inner product, and E5 does; build the index again")
    return index


class FlatOnDevice:
    """The vectors of a flat index on torch's device: one matrix product a query batch and block.

    They are kept in half precision and compared in single precision: scores of E5 lie so close together that half
    precision would confuse them.
    """

    def __init__(self, index: Any, device: torch.device, dtype: torch.dtype = torch.float16) -> None:
        """Copy the vectors block by block."""
        rows = faiss.rev_swig_ptr(index.get_xb(), index.ntotal * index.d).reshape(index.ntotal, index.d)
        self._blocks = [
            torch.from_numpy(rows[start : start + BLOCK]).to(device, dtype, copy=True)
            for start in range(0, len(rows), BLOCK)
        ]

    @torch.inference_mode()
    def search(self, queries: Vectors, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return scores and numbers of the ``k`` best passages, a row each query."""
        queries_Q_D = torch.from_numpy(queries).to(self._blocks[0].device)
        scores, numbers, start = [], [], 0
        for block in self._blocks:
            best = (queries_Q_D @ block.float().T).topk(min(k, len(block)))
            scores.append(best.values)
            numbers.append(best.indices + start)
            start += len(block)
        best = torch.cat(scores, 1).topk(min(k, start))
        best_numbers = torch.cat(numbers, 1).gather(1, best.indices)
        return best.values.cpu().numpy(), best_numbers.cpu().numpy()


def on_device(index: Any, device: torch.device) -> VectorIndex:
    """Return the fastest search of ``index``: a flat index's vectors on the GPU, other kinds in FAISS."""
    searchable: VectorIndex = FlatOnDevice(index, device) if device.type == "cuda" and is_flat(index) else index
    return searchable


def is_flat(index: Any) -> bool:
    """Return whether the index holds plain vectors."""
    return isinstance(index, faiss.IndexFlat)
