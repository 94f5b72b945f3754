"""Masks of tokens that are too old, of any rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch.provenance import check_rows
from agentrl.batch.sequences import group_sequences
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from agentrl.train.pipeline.token_ages import mask_stale

VERSION = 6


@st.composite
def rollouts(draw: st.DrawFn) -> Rollout:
    """A rollout of one row, whose turns were sampled by newer and newer versions."""
    turns = draw(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 4), st.integers(0, 2)), min_size=1, max_size=5))
    first = draw(st.integers(0, 2))
    observed, versions, requests = [True], [-1], [-1]
    for number, (state_before, size, newer) in enumerate(turns):
        first = min(first + newer, VERSION)
        observed += [True] * state_before + [False] * size
        versions += [-1] * state_before + [first] * size
        requests += [-1] * state_before + [number] * size
    seen = np.array(observed)
    row = Row(
        RowKey("task", "rollout"),
        token_ids=np.arange(len(seen), dtype=np.int32),
        provenance=np.where(seen, Provenance.OBSERVED, Provenance.SAMPLED).astype(np.uint8),
        mask=(~seen).astype(np.uint8),
        mask_reason=np.where(seen, MaskReason.OBSERVED, MaskReason.NONE).astype(np.uint8),
        logprobs=np.where(seen, 0, -0.5).astype(np.float32),
        versions=np.array(versions, np.int32),
        requests=np.array(requests, np.int32),
        request_ids=tuple(f"request-{number}" for number in range(len(turns))),
    )
    return Rollout("task", "rollout", [row], 1.0, StopReason.TERMINATED)


def copied(rollout: Rollout) -> Row:
    row = rollout.rows[0]
    return replace(row, mask=row.mask.copy(), mask_reason=row.mask_reason.copy())


@given(rollouts(), st.integers(0, VERSION))
def test_no_token_is_trained_that_is_older_than_the_limit(rollout: Rollout, limit: int) -> None:
    state_before, row = copied(rollout), rollout.rows[0]
    share = mask_stale([rollout], VERSION, limit)
    check_rows([row])
    stale = (state_before.mask == 1) & (VERSION - state_before.versions > limit)
    assert np.array_equal(row.mask == 1, (state_before.mask == 1) & ~stale), "younger tokens stay, and nothing is added"
    assert np.array_equal(row.mask_reason == MaskReason.STALE, stale)
    assert np.array_equal(row.mask_reason[~stale], state_before.mask_reason[~stale])
    assert share == stale.sum() / (state_before.mask == 1).sum()
    assert mask_stale([rollout], VERSION, limit) == 0, "a second time finds nothing"


@given(rollouts(), st.integers(0, VERSION))
def test_the_turns_of_the_other_tokens_keep_their_numbers(rollout: Rollout, limit: int) -> None:
    [full_sequences] = group_sequences([copied(rollout)])
    ages = full_sequences.gather({rollout.rows[0].key: (VERSION - rollout.rows[0].versions).astype(np.float32)})
    expected = full_sequences.turns_S[ages <= limit]
    mask_stale([rollout], VERSION, limit)
    assert group_sequences(rollout.rows)[0].turns_S.tolist() == expected.tolist()
