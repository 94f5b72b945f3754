"""Prefix trees: rows that begin with the same tokens share them, so that each is computed once.

Unique tokens are in depth-first preorder, so the tokens below a token follow it without a gap. A query attends to its
ancestors and itself: query ``q`` sees key ``k`` if ``k <= q < subtree_end_U[k]``. Rows without a common prefix are a
forest of chains, for which this is causal attention within rows.

Rows ``a b c``, ``a b d e`` and ``f``::

    token        a b c d e f
    depth        0 1 2 2 3 0
    subtree end  5 5 3 5 5 6
    index        0 1 2 | 0 1 3 4 | 5

Legend: ``U`` unique tokens, ``N`` tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agentrl.core.images import ImageSpan

TokenIds = NDArray[np.integer[Any]]
"""``[T]`` token ids of a row."""

_IMAGE = 1 << 32
"""Keys of tokens that stand for images are above all token ids."""


def token_keys(token_ids: TokenIds, spans: Iterable[ImageSpan], digests: Sequence[str]) -> NDArray[np.int64]:
    """Return keys that are equal for equal tokens: ids, and for tokens of images ids with the image's number.

    The tokens of different images have the same ids, but other embeddings.

    Args:
        token_ids: of a row, or of rows one after the other.
        spans: of its images.
        digests: of all images of the rows that are compared.
    """
    keys = token_ids.astype(np.int64)
    for span in spans:
        keys[span.start : span.end] += _IMAGE * (1 + digests.index(span.digest))
    return keys


def key_ids(keys: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the token ids of `token_keys`."""
    return keys % _IMAGE


@dataclass(frozen=True, slots=True)
class PrefixTree:
    """Tokens of rows, those of a shared prefix once."""

    token_ids_U: NDArray[np.int64]
    """Token ids, in preorder."""
    depth_U: NDArray[np.int64]
    """Position in the row: the number of ancestors."""
    subtree_end_U: NDArray[np.int64]
    """Index after the last token below, the token itself included."""
    index_N: NDArray[np.int64]
    """Unique token of each token of the rows, which are concatenated in the given order."""
    shared: tuple[int, ...]
    """Leading tokens of each row that the tree has from a row before it in preorder."""


def by_prefix(rows: Sequence[TokenIds]) -> tuple[list[int], list[int]]:
    """Return an order in which rows with a common prefix are adjacent, and the length of the prefix with the row before.

    A row that is a prefix of others comes before them.

    Args:
        rows: token ids, all of one dtype.
    """
    keys = [row.tobytes() for row in rows]  # any order of single tokens will do, also that of their bytes
    order = sorted(range(len(rows)), key=keys.__getitem__)
    common = [_common(rows[previous], rows[current]) for previous, current in pairwise(order)]
    return order, [0, *common][: len(order)]


def _common(first: TokenIds, second: TokenIds) -> int:
    """Return the length of the common prefix."""
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def prefix_tree(rows: Sequence[TokenIds]) -> PrefixTree:
    """Return the tree of ``rows``, token ids of one dtype; linear in their tokens, after sorting the rows."""
    order, common = by_prefix(rows)
    starts = np.cumsum([0, *map(len, rows)])
    unique = int(starts[-1]) - sum(common)
    token_ids, depth, subtree_end = (np.empty(unique, np.int64) for _ in range(3))
    index = np.empty(starts[-1], np.int64)
    path = np.empty(max(map(len, rows), default=0), np.int64)  # unique tokens of the current row
    shared = [0] * len(rows)
    count = length = 0
    for row, prefix in zip(order, common, strict=True):
        subtree_end[path[prefix:length]] = count
        length = len(rows[row])
        stop = count + length - prefix
        token_ids[count:stop] = rows[row][prefix:]
        depth[count:stop] = np.arange(prefix, length)
        path[prefix:length] = np.arange(count, stop)
        index[starts[row] : starts[row + 1]] = path[:length]
        shared[row], count = prefix, stop
    subtree_end[path[:length]] = count
    return PrefixTree(token_ids, depth, subtree_end, index, tuple(shared))
