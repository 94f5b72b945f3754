"""Rows that begin with the same tokens come into one micro-batch where that is faster."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch.prefix_groups import OVERHEAD, Division, divide_rows, row_cost
from agentrl.batch.prefix_tree import prefix_tree
from tests.batches import pack_rows
from tests.unit.batch.test_packing import PAD, row

FORKS = st.lists(st.tuples(st.integers(0, 8), st.integers(0, 60), st.integers(1, 40)), min_size=1, max_size=12)
"""Rows as (row to fork from, tokens taken from it, new tokens)."""


def forked(forks: list[tuple[int, int, int]]) -> list[np.ndarray]:
    rows: list[np.ndarray] = []
    for number, (source, kept_tokens, new) in enumerate(forks):
        begin = rows[source % len(rows)][:kept_tokens] if rows else np.zeros(0, np.int32)
        rows.append(np.concatenate([begin, np.arange(new, dtype=np.int32) + 1000 * (number + 1)]))
    return sorted(rows, key=len, reverse=True)


def group(prompt: int, own_tokens: int, size: int, number: int = 0) -> list[np.ndarray]:
    """Rows with a common prompt."""
    first = 100_000 * number
    begin = np.arange(prompt, dtype=np.int32) + first
    return [
        np.concatenate([begin, np.arange(own_tokens, dtype=np.int32) + first + 10_000 * (n + 1)]) for n in range(size)
    ]


def unique(rows: list[np.ndarray], division: Division) -> int:
    return len(prefix_tree([rows[number] for number in division.rows]).token_ids_U)


def time(divisions: list[Division], shares: int) -> float:
    """Return the time of all micro-batches, of which as many begin together as there are shares."""
    costs = [division.cost for division in divisions]
    return sum(max(costs[first : first + shares]) for first in range(0, len(costs), shares))


@given(FORKS, st.integers(1, 4), st.integers(1, 200))
def test_every_row_is_there_once_within_the_limits_and_no_slower(forks, shares, tokens):
    rows = forked(forks)
    plain = divide_rows(rows, shares, tokens, share_prefixes=False)
    actual = divide_rows(rows, shares, tokens, share_prefixes=True)
    for divisions in (plain, actual):
        assert sorted(number for division in divisions for number in division.rows) == list(range(len(rows)))
        assert len(divisions) % shares == 0
        for division in divisions:
            assert len(division.rows) == 1 or division.computed_tokens <= tokens
            lengths = [len(rows[number]) for number in division.rows]
            if not division.shares_prefixes:
                assert division.computed_tokens == sum(lengths)
                assert division.cost == pytest.approx(sum(map(row_cost, lengths)))
            else:
                assert division.computed_tokens == unique(rows, division) < sum(lengths)
    assert not any(division.shares_prefixes for division in plain)
    assert time(actual, shares) <= time(plain, shares)


def test_the_cost_of_a_tree_is_that_of_its_tokens_and_the_tokens_that_they_see():
    rows = group(300, 100, 4)
    [tree] = divide_rows(rows, 1, 1000, share_prefixes=True)
    assert tree.cost == pytest.approx((row_cost(400) + 3 * (row_cost(400) - row_cost(300))) / (1 - OVERHEAD))


def test_a_group_is_computed_at_once():
    rows = group(2048, 512, 8, 1) + group(2048, 512, 8, 2)
    divisions = divide_rows(rows, 1, 8192, share_prefixes=True)
    assert [sorted(division.rows) for division in divisions] in (
        [[*range(8)], [*range(8, 16)]],
        [[*range(8, 16)], [*range(8)]],
    )
    assert {division.computed_tokens for division in divisions} == {2048 + 8 * 512}


def test_a_group_that_is_too_large_is_divided_into_parts_that_share():
    divisions = divide_rows(group(1000, 100, 20), 1, 1600, share_prefixes=True)
    assert sorted(len(division.rows) for division in divisions) == [2, 6, 6, 6]
    assert sum(division.computed_tokens for division in divisions) == 4 * 1000 + 20 * 100


def test_no_rank_waits_for_another_to_compute_a_whole_group():
    divisions = divide_rows(group(500, 500, 8), 8, 8192, share_prefixes=True)
    assert [len(division.rows) for division in divisions] == [1] * 8


def test_short_prefixes_are_not_shared():
    rows = group(5, 100, 8)
    assert divide_rows(rows, 1, 4096, share_prefixes=True) == divide_rows(rows, 1, 4096, share_prefixes=False)


def test_a_batch_says_what_it_shares():
    made = [row(number, [0, 0, 0, 0, 1, 1]) for number in range(3)]
    for each in made:
        each.token_ids[:4] = range(4)
    batch = pack_rows(
        made,
        {each.key: 1.0 for each in made},
        data_parallel_size=1,
        tokens_per_micro=32,
        pad_id=PAD,
        share_prefixes=True,
    )
    assert [micro.shares_prefixes for micro in batch.micro[0]] == [True]
    assert batch.metrics["batch/shared_share"] == pytest.approx(8 / 18)
    assert batch.metrics["batch/tokens"] == 18
    apart = pack_rows(made, {each.key: 1.0 for each in made}, data_parallel_size=1, tokens_per_micro=32, pad_id=PAD)
    assert not apart.micro[0][0].shares_prefixes
    assert apart.metrics["batch/shared_share"] == 0
