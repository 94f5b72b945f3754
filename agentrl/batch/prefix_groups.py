"""Division of rows among micro-batches, with rows that begin with the same tokens in the same one.

A micro-batch that shares prefixes is computed as a tree (`agentrl.batch.prefix_tree`): its size is that of the tree. Larger
units of rows share more, and balance the ranks worse, so several sizes are tried. The fastest division is taken, which may be
the one without sharing. It does not depend on the order of rows with different tokens.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from agentrl.batch.prefix_tree import TokenIds, by_prefix

ATTENTION_TOKENS = 16_384
"""Length of a row at which its attention costs as much as its matrix products: 8k at 0.6B, 25k at 4B, 47k at 8B."""


IMAGE_COST = 0.5
"""Cost of an image's token in addition to a text token's: four patches of a tower of 0.3B to 0.7B for a model of 3B to 8B."""


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
    size = 1 << len(units).bit_length()
    space = [math.inf] * (2 * size)
    """A tree of maxima: ``space[size + group]`` is the space in a group, and node ``n`` is above ``2n`` and ``2n + 1``."""
    for unit in units:
        node = 1
        while node < size:
            node = 2 * node if space[2 * node] >= unit.tokens else 2 * node + 1
        if node - size == len(groups):
            groups.append([])
            space[node] = max(tokens, unit.tokens)
        groups[node - size].append(unit)
        space[node] -= unit.tokens
        while node > 1:
            node //= 2
            space[node] = max(space[2 * node], space[2 * node + 1])
    return groups


def _spread(units: Sequence[Unit], count: int, tokens: int) -> list[list[Unit]] | None:
    """Put units, largest first, each into the cheapest of ``count`` groups with enough space; None if one has none."""
    groups: list[list[Unit]] = [[] for _ in range(count)]
    costs, used = [0.0] * count, [0] * count
    with_space = [(0.0, group) for group in range(count)]
    """Heap by cost."""
    too_full: list[tuple[int, int]] = []
    """Heap by tokens: those without space for the units so far. Later ones are smaller."""
    for unit in units:
        while too_full and too_full[0][0] + unit.tokens <= tokens:
            _, group = heapq.heappop(too_full)
            heapq.heappush(with_space, (costs[group], group))
        while with_space and used[with_space[0][1]] and used[with_space[0][1]] + unit.tokens > tokens:
            _, group = heapq.heappop(with_space)
            heapq.heappush(too_full, (used[group], group))
        if not with_space:
            return None
        group = with_space[0][1]
        groups[group].append(unit)
        costs[group] += unit.cost
        used[group] += unit.tokens
        heapq.heapreplace(with_space, (costs[group], group))
    return groups


OVERHEAD = 0.17
"""Share of the tokens that must be saved: a tree takes more time a token than rows, a fifth at 4B on an H100."""
SIZES = 3
"""Maximum sizes of units to try, each half of the one before."""


@dataclass(frozen=True, slots=True)
class Division:
    """The rows of a micro-batch."""

    rows: tuple[int, ...]
    """Their numbers."""
    computed_tokens: int
    """Tokens that are computed: those of shared prefixes once, if they are shared."""
    cost: float
    """In tokens of short rows."""
    shares_prefixes: bool
    """Whether shared prefixes are computed once."""


def divide_rows(
    rows: Sequence[TokenIds],
    data_parallel_size: int,
    tokens: int,
    *,
    share_prefixes: bool,
    image_tokens: Sequence[int] | None = None,
) -> list[Division]:
    """Divide rows, longest first, among micro-batches; see `balance_units`.

    Args:
        rows: token ids, of one dtype.
        data_parallel_size: divides the number of micro-batches.
        tokens: maximum tokens of a micro-batch that are computed; a longer row gets a separate one.
        share_prefixes: whether prefixes may be shared.
        image_tokens: tokens of each row that stand for images, which the vision tower computes; None: of no row.
    """
    image_costs = [IMAGE_COST * count for count in image_tokens or [0] * len(rows)]
    single_rows = [
        Unit((number,), len(row), row_cost(len(row)) + image_cost)
        for number, (row, image_cost) in enumerate(zip(rows, image_costs, strict=True))
    ]
    best = [_plain(group) for group in balance_units(single_rows, data_parallel_size, tokens)]
    if not share_prefixes or not rows:
        return best
    prefixes = _Prefixes(rows, image_costs)
    all_rows = prefixes.unit(range(len(rows)))
    if not _pays(all_rows.tokens, sum(unit.tokens for unit in single_rows)):
        return best
    limit = max(1, min(tokens, -(-all_rows.tokens // data_parallel_size)))
    for size in range(SIZES):
        units = sorted(prefixes.units(limit >> size), key=lambda unit: (-unit.tokens, min(unit.rows)))
        groups = [
            prefixes.division(group, single_rows, tokens) for group in balance_units(units, data_parallel_size, tokens)
        ]
        groups.sort(key=lambda group: -group.cost)
        if _time(groups, data_parallel_size) < _time(best, data_parallel_size):
            best = groups
    return best


def _plain(group: Sequence[Unit]) -> Division:
    """Return a micro-batch of rows that share nothing."""
    rows = tuple(number for unit in group for number in unit.rows)
    return Division(rows, sum(unit.tokens for unit in group), sum(unit.cost for unit in group), shares_prefixes=False)


def _pays(unique: int, tokens: int) -> bool:
    """Return whether a tree of ``unique`` tokens is computed faster than its rows of ``tokens``."""
    return unique < (1 - OVERHEAD) * tokens


def _time(groups: Sequence[Division], data_parallel_size: int) -> float:
    """Return the cost of all ranks, which wait for each other after every micro-batch."""
    return sum(
        max(group.cost for group in groups[first : first + data_parallel_size])
        for first in range(0, len(groups), data_parallel_size)
    )


class _Prefixes:
    """The common prefixes of rows."""

    def __init__(self, rows: Sequence[TokenIds], image_costs: Sequence[float]) -> None:
        self._image_costs = image_costs
        order, common = by_prefix(rows)
        self.order = np.array(order)
        self.common = np.array(common)
        """Tokens that each row of the order has in common with the one before."""
        self.lengths = [len(row) for row in rows]
        self.position_of_row = np.argsort(self.order)
        self._least = [self.common]
        """By level: the least of ``common`` in ``2 ** level`` neighbours from each position on."""
        while len(shorter := self._least[-1]) > (half := 1 << len(self._least) - 1):
            self._least.append(np.minimum(shorter[:-half], shorter[half:]))

    def unit(self, rows: Sequence[int]) -> Unit:
        """Return rows as one tree."""
        positions = np.sort(self.position_of_row[list(rows)])
        # What two rows have in common is the least that all neighbours between them have.
        saved = [self._least_common(*ends) for ends in itertools.pairwise(positions.tolist())]
        lengths = [self.lengths[number] for number in rows]
        cost = sum(map(row_cost, lengths)) - sum(map(row_cost, saved))
        return Unit(tuple(rows), sum(lengths) - sum(saved), cost + self._image_cost(rows))

    def _image_cost(self, rows: Iterable[int]) -> float:
        return sum(self._image_costs[number] for number in rows)

    def _least_common(self, begin: int, end: int) -> int:
        """Return the least of ``common`` at the positions after ``begin`` up to ``end``."""
        level = (end - begin).bit_length() - 1
        least = self._least[level]
        return int(min(least[begin + 1], least[end + 1 - (1 << level)]))

    def units(self, limit: int) -> list[Unit]:
        """Join neighbours, those with the longest common prefixes first, to trees of at most ``limit`` tokens.

        Neighbours are joined only if a row gets a share of its tokens that pays.
        """
        lengths = [self.lengths[number] for number in self.order]
        # Positions where the unit begins that ends here, and where that ends that begins here.
        first, last = list(range(len(lengths))), list(range(len(lengths)))
        tokens, begins = [*lengths], [True] * len(lengths)
        for position in np.argsort(-self.common[1:], kind="stable") + 1:
            common = int(self.common[position])
            start = first[position - 1]
            joined = tokens[start] + tokens[position] - common
            if joined <= limit and _pays(lengths[position] - common, lengths[position]):
                tokens[start], begins[position] = joined, False
                last[start] = last[position]
                first[last[position]] = start
        positions = [range(position, last[position] + 1) for position, begin in enumerate(begins) if begin]
        return [self.unit(self.order[list(unit_positions)].tolist()) for unit_positions in positions]

    def division(self, group: Sequence[Unit], single_rows: Sequence[Unit], limit: int) -> Division:
        """Return a micro-batch of units; it shares prefixes where that pays, or where its rows are too many otherwise."""
        plain = _plain([single_rows[number] for unit in group for number in unit.rows])
        if len(plain.rows) < 2:
            return plain
        tree = self.unit(plain.rows)
        if plain.computed_tokens <= limit and not _pays(tree.tokens, plain.computed_tokens):
            return plain
        image_cost = self._image_cost(plain.rows)
        cost = (tree.cost - image_cost) / (1 - OVERHEAD) + image_cost
        return replace(plain, computed_tokens=tree.tokens, cost=cost, shares_prefixes=True)
