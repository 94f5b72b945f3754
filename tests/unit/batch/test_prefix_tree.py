"""Trees of rows: every row is read back, attention is to exactly the tokens before, and nothing is there twice."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch.prefix_tree import by_prefix, prefix_tree

ROWS = st.lists(st.lists(st.sampled_from([1, 2, 256, 65_536]), max_size=6), max_size=9)
"""Few tokens, so that prefixes are common; some have the same low bytes."""


def arrays(rows: list[list[int]]) -> list[np.ndarray]:
    return [np.array(row, np.int32) for row in rows]


@given(ROWS)
def test_rows_are_read_back_and_prefixes_are_there_once(rows):
    tree = prefix_tree(arrays(rows))
    prefixes = {tuple(row[:stop]) for row in rows for stop in range(1, len(row) + 1)}
    assert len(tree.token_ids_U) == len(tree.depth_U) == len(tree.subtree_end_U) == len(prefixes)
    start = 0
    for row, shared in zip(rows, tree.shared, strict=True):
        index = tree.index_N[start : start + len(row)]
        start += len(row)
        assert tree.token_ids_U[index].tolist() == row
        assert tree.depth_U[index].tolist() == list(range(len(row)))
        assert (np.diff(index[shared:]) == 1).all()
    assert start == len(tree.index_N)
    assert len(tree.index_N) - sum(tree.shared) == len(prefixes)


@given(ROWS)
def test_a_token_attends_to_exactly_the_tokens_of_its_row_before_it(rows):
    tree = prefix_tree(arrays(rows))
    ids = np.arange(len(tree.token_ids_U))
    sees = (ids <= ids[:, None]) & (ids[:, None] < tree.subtree_end_U)
    start = 0
    for row in rows:
        index = tree.index_N[start : start + len(row)]
        start += len(row)
        for position, query in enumerate(index):
            assert np.flatnonzero(sees[query]).tolist() == index[: position + 1].tolist()


@given(ROWS)
def test_neighbours_have_the_longest_common_prefix(rows):
    order, common = by_prefix(arrays(rows))
    assert sorted(order) == list(range(len(rows)))
    for index, number in enumerate(order):
        row = rows[number]
        lengths = [
            next(
                (i for i, (a, b) in enumerate(zip(row, rows[earlier_row], strict=False)) if a != b),
                min(map(len, (row, rows[earlier_row]))),
            )
            for earlier_row in order[:index]
        ]
        assert common[index] == max(lengths, default=0)


def test_the_tree_of_the_docstring():
    tree = prefix_tree(arrays([[1, 2, 3], [1, 2, 4, 5], [6]]))
    assert tree.token_ids_U.tolist() == [1, 2, 3, 4, 5, 6]
    assert tree.depth_U.tolist() == [0, 1, 2, 2, 3, 0]
    assert tree.subtree_end_U.tolist() == [5, 5, 3, 5, 5, 6]
    assert tree.index_N.tolist() == [0, 1, 2, 0, 1, 3, 4, 5]
    assert tree.shared == (0, 2, 0)
