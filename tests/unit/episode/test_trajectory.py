"""Token layout in the tests: ``p`` prompt, ``a b c`` sampled, ``o`` observed; one number a token."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason, Generation, MaskReason, Provenance
from agentrl.episode.trajectory import Trajectory

OBS, S, D = Provenance.OBSERVED, Provenance.SAMPLED, Provenance.DEMONSTRATED


def said(ids, request="r", version=0, logprob=-0.5):
    return Generation(tuple(ids), (logprob,) * len(ids), FinishReason.STOP, ((0, version),), 0, request)


def rows(trajectory):
    return trajectory.rows("task", "rollout")


def test_two_turns():
    """
    token  1 2 3 | 10 11 | 4 5 | 12
    who    p p p |  a  a | o o |  b
    mask   0 0 0 |  1  1 | 0 0 |  1
    """
    trajectory = Trajectory()
    trajectory.extend_to([1, 2, 3])
    trajectory.append_sampled(said([10, 11], "r0", version=3, logprob=-0.25))
    assert trajectory.extend_to([1, 2, 3, 10, 11, 4, 5]) == 5
    trajectory.append_sampled(said([12], "r1", version=4))
    (row,) = rows(trajectory)
    assert row.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 5, 12]
    assert row.provenance.tolist() == [OBS, OBS, OBS, S, S, OBS, OBS, S]
    assert row.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 1]
    assert row.mask_reason.tolist() == [1, 1, 1, 0, 0, 1, 1, 0]
    assert row.logprobs.tolist() == [0, 0, 0, -0.25, -0.25, 0, 0, -0.5]
    assert row.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, 4]
    assert row.requests.tolist() == [-1, -1, -1, 0, 0, -1, -1, 1]
    assert row.request_ids == ("r0", "r1")
    assert [array.dtype for array in (row.token_ids, row.mask, row.logprobs, row.versions)] == [
        np.int32, np.uint8, np.float32, np.int32,
    ]  # fmt: skip


def test_an_end_token_that_the_engine_did_not_sample_is_observed():
    """``p | a | E o`` : E = 9 is the template's."""
    trajectory = Trajectory()
    trajectory.extend_to([1])
    trajectory.append_sampled(said([10]))
    trajectory.extend_to([1, 10, 9, 4])
    trajectory.append_sampled(said([11], "r1"))
    (row,) = rows(trajectory)
    assert row.provenance.tolist() == [OBS, S, OBS, OBS, S]
    assert row.logprobs[2] == 0


def test_a_fork_inside_a_sampled_node_trains_the_shared_part_once():
    """
    first leaf   1 2 | 10 11 12 |
    second leaf  1 2 | 10 11    | 5 | 20
                       shared
    """
    trajectory = Trajectory()
    trajectory.extend_to([1, 2])
    trajectory.append_sampled(said([10, 11, 12], "r0"))
    assert trajectory.extend_to([1, 2, 10, 11, 5]) == 4
    trajectory.append_sampled(said([20], "r1"))
    first, second = rows(trajectory)
    assert first.token_ids.tolist() == [1, 2, 10, 11, 12]
    assert second.token_ids.tolist() == [1, 2, 10, 11, 5, 20]
    assert first.mask.tolist() == [0, 0, 1, 1, 1]
    assert second.mask.tolist() == [0, 0, 0, 0, 0, 1]
    assert second.mask_reason.tolist()[2:] == [MaskReason.SHARED, MaskReason.SHARED, MaskReason.OBSERVED, 0]
    assert second.provenance.tolist() == [OBS, OBS, S, S, OBS, S]
    assert [row.key.row for row in (first, second)] == [0, 1]


def test_a_prompt_that_shares_nothing_starts_a_new_root():
    trajectory = Trajectory()
    trajectory.extend_to([1, 2])
    trajectory.append_sampled(said([10]))
    assert trajectory.extend_to([7, 8]) == 0
    trajectory.append_sampled(said([11], "r1"))
    assert [row.token_ids.tolist() for row in rows(trajectory)] == [[1, 2, 10], [7, 8, 11]]


def test_a_prompt_that_is_a_prefix_of_an_earlier_one():
    trajectory = Trajectory()
    trajectory.extend_to([1, 2, 3])
    trajectory.append_sampled(said([10]))
    assert trajectory.extend_to([1, 2]) == 2
    trajectory.append_sampled(said([11], "r1"))
    assert [row.token_ids.tolist() for row in rows(trajectory)] == [[1, 2, 3, 10], [1, 2, 11]]


def test_versions_change_within_a_generation():
    trajectory = Trajectory()
    trajectory.extend_to([1])
    trajectory.append_sampled(Generation((5, 6, 7), (-1.0,) * 3, FinishReason.STOP, ((0, 2), (2, 3)), 0, "r"))
    assert rows(trajectory)[0].versions.tolist() == [-1, 2, 2, 3]


def test_demonstrations_have_mask_1_and_no_log_probabilities():
    trajectory = Trajectory()
    trajectory.extend_to([1])
    trajectory.append_demonstrated([5, 6])
    (row,) = rows(trajectory)
    assert row.provenance.tolist() == [OBS, D, D]
    assert row.mask.tolist() == [0, 1, 1]
    assert row.requests.tolist() == [-1, -1, -1]


def test_nothing_sampled_makes_no_row():
    trajectory = Trajectory()
    trajectory.extend_to([1, 2])
    trajectory.append_sampled(said([]))
    assert rows(trajectory) == []


@pytest.mark.parametrize(
    ("generation", "words"),
    [
        (Generation((1, 2), (-0.5,), FinishReason.STOP, ((0, 0),), 0, "r"), "2 token ids and 1 log-prob"),
        (Generation((1,), (-0.5,), FinishReason.STOP, (), 0, "r"), "do not cover the first token"),
        (Generation((1,), (-0.5,), FinishReason.STOP, ((1, 0),), 0, "r"), "do not cover the first token"),
        (Generation((1, 2), (-0.5,) * 2, FinishReason.STOP, ((0, 0), (0, 1)), 0, "r"), "not in order"),
        (Generation((1,), (-0.5,), FinishReason.STOP, ((0, 0),), 0, ""), "without a request id"),
    ],
)
def test_what_does_not_belong_together_is_refused(generation, words):
    with pytest.raises(SamplerError, match=words):
        Trajectory().append_sampled(generation)


tokens = st.lists(st.integers(0, 2), max_size=5)


@st.composite
def episodes(draw):
    """Prompts that mostly go on from the path, and sometimes cut it or start anew; few ids, so that much is shared."""
    trajectory, sampled, prompts = Trajectory(), [], []
    for turn in range(draw(st.integers(1, 7))):
        path = trajectory.token_ids
        keep = draw(st.sampled_from([len(path), len(path), draw(st.integers(0, len(path)))]))
        prompt = path[:keep] + tuple(draw(tokens))
        trajectory.extend_to(prompt)
        generation = said(draw(tokens), f"r{turn}", version=turn, logprob=-float(turn) - 0.5)
        trajectory.append_sampled(generation)
        sampled += generation.token_ids
        prompts.append(prompt + generation.token_ids)
    return trajectory, sampled, prompts


@given(episodes())
def test_every_sampled_token_is_trained_exactly_once(episode):
    trajectory, sampled, _ = episode
    made = rows(trajectory)
    assert sum(int(row.mask.sum()) for row in made) == len(sampled) == trajectory.sampled_tokens
    assert sorted(int(i) for row in made for i in row.token_ids[row.mask == 1]) == sorted(sampled)
    for row in made:
        masked = row.mask == 1
        assert (masked <= (row.provenance == S)).all()
        assert ((row.mask_reason == MaskReason.NONE) == masked).all()
        assert ((row.mask_reason == MaskReason.SHARED) == ((row.provenance == S) & ~masked)).all()
        assert ((row.logprobs < 0) == (row.provenance == S)).all()
        requests = [row.request_ids[i] for i in row.requests[row.provenance == S]]
        assert requests == [f"r{version}" for version in row.versions[row.provenance == S]]


@given(episodes())
def test_rows_hold_exactly_what_was_said_and_every_path_is_in_one(episode):
    trajectory, _, paths = episode
    made = [tuple(row.token_ids.tolist()) for row in rows(trajectory)]
    if made:
        assert all(any(row[: len(path)] == path for row in made) for path in paths)
        assert all(row in paths for row in made)
    if paths and trajectory.token_ids:
        assert trajectory.token_ids == paths[-1]


@given(episodes())
def test_state_goes_through_json(episode):
    trajectory, _, _ = episode
    state = trajectory.to_state()
    back = Trajectory.from_state(json.loads(json.dumps(state)))
    assert back.to_state() == state
    assert back.token_ids == trajectory.token_ids
    for graph in (trajectory, back):
        graph.extend_to([*graph.token_ids[:-1], 9])
        graph.append_sampled(said([1, 2], "last"))
    for mine, theirs in zip(rows(trajectory), rows(back), strict=True):
        assert mine.key == theirs.key
        assert mine.request_ids == theirs.request_ids
        for name in ("token_ids", "provenance", "mask", "mask_reason", "logprobs", "versions", "requests"):
            np.testing.assert_array_equal(getattr(mine, name), getattr(theirs, name))
