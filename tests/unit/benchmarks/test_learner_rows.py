from __future__ import annotations

import numpy as np
import pytest

from agentrl.batch.provenance import check_provenance
from benchmarks.learner_rows import FORK, OWN, PROMPT, SAMPLES, TURN, WORKLOADS, RowOptions
from tests.batches import pack_rows

OPTIONS = RowOptions(rows=9, median_tokens=500, longest=1000, vocabulary=500)


@pytest.mark.parametrize("name", WORKLOADS)
def test_rows_can_be_trained_and_are_the_same_again(name):
    rows, again = WORKLOADS[name](OPTIONS), WORKLOADS[name](OPTIONS)
    assert len(rows) >= 9
    assert all(np.array_equal(first.token_ids, second.token_ids) for first, second in zip(rows, again, strict=True))
    advantages = {row.key: 1.0 for row in rows}
    assert len(advantages) == len(rows)
    batch = pack_rows(rows, advantages, data_parallel_size=1, tokens_per_micro=8192, pad_id=0)
    check_provenance(batch)
    assert batch.metrics["batch/rows"] == len(rows)


@pytest.mark.parametrize(("name", "unique"), [("groups", PROMPT + SAMPLES * OWN), ("forks", SAMPLES * (TURN + FORK))])
def test_groups_and_forks_share(name, unique):
    rows = WORKLOADS[name](OPTIONS)
    batch = pack_rows(
        rows, {row.key: 1.0 for row in rows}, data_parallel_size=1, tokens_per_micro=8192, pad_id=0, share_prefixes=True
    )
    total = batch.metrics["batch/tokens"]
    assert batch.metrics["batch/shared_share"] == pytest.approx(1 - 2 * unique / total)
