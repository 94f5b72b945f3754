"""Division of rows among micro-batches of about the same cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

ATTENTION_TOKENS = 16_384
"""Length of a row at which its attention costs as much as its matrix products: 8k at 0.6B, 25k at 4B, 47k at 8B."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Rows that stay together in a micro-batch."""

    rows: tuple[int, ...]
    """Their numbers."""
    tokens: int
    """Tokens that are computed."""
    cost: float
    """In tokens of short rows."""


def row_cost(length: int) -> float:
    """Return the cost of a row, in tokens of short rows."""
    return length * (1 + length / ATTENTION_TOKENS)


def balance_units(units: Sequence[Unit], data_parallel_size: int, tokens: int) -> list[list[Unit]]:
    """Divide units, largest first, among a multiple of ``data_parallel_size`` micro-batches of about the same cost.

    There are as few as first-fit-decreasing needs. Each unit, largest first, goes to the cheapest one with space for it;
    where one finds none, the division of first-fit-decreasing stays. Micro-batch ``i`` belongs to data-parallel rank
    ``i % data_parallel_size``, and adjacent ones have similar costs, so that ranks wait little for each other. Some are empty
    if there are too few units.
    """
    first_fit = _first_fit(units, tokens)
    count = -(-max(1, len(first_fit)) // data_parallel_size) * data_parallel_size
    groups = _spread(units, count, tokens) or first_fit + [[] for _ in range(count - len(first_fit))]
    return sorted(groups, key=lambda group: -sum(unit.cost for unit in group))


def _first_fit(units: Sequence[Unit], tokens: int) -> list[list[Unit]]:
    """Put units, largest first, each into the first group with enough space."""
    groups: list[list[Unit]] = []
    space = np.zeros(len(units), np.int64)
    for unit in units:
        fits = space[: len(groups)] >= unit.tokens
        first = int(fits.argmax()) if len(groups) else 0
        if not groups or not fits[first]:
            first = len(groups)
            groups.append([])
            space[first] = max(tokens, unit.tokens)
        groups[first].append(unit)
        space[first] -= unit.tokens
    return groups


def _spread(units: Sequence[Unit], count: int, tokens: int) -> list[list[Unit]] | None:
    """Put units, largest first, each into the cheapest of ``count`` groups with enough space; None if one has none."""
    groups: list[list[Unit]] = [[] for _ in range(count)]
    costs, used = np.zeros(count), np.zeros(count, np.int64)
    for unit in units:
        fits = (used == 0) | (used + unit.tokens <= tokens)
        if not fits.any():
            return None
        cheapest = int(np.where(fits, costs, np.inf).argmin())
        groups[cheapest].append(unit)
        costs[cheapest] += unit.cost
        used[cheapest] += unit.tokens
    return groups
