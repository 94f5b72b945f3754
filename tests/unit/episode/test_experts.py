"""Experts of tokens stay with their tokens: through turns, forks, branches, packing and prefix trees."""

from __future__ import annotations

import json
import zlib

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core.types import FinishReason, Generation
from agentrl.episode.trajectory import Trajectory
from agentrl.learner.tree_attention import tree_input
from tests.batches import pack_rows

STEPS = st.lists(
    st.tuples(
        st.sampled_from(["turn", "turn", "fork", "branch", "aborted"]),
        st.integers(0, 3),
        st.integers(1, 3),
    ),
    min_size=1,
    max_size=10,
)


def expected(ids: list[int]) -> list[list[list[int]]]:
    """Experts ``[T, 2, 1]``, a function of a token and those before it."""
    sums = [zlib.crc32(np.array(ids[: end + 1], np.int32).tobytes()) for end in range(len(ids))]
    return [[[value % 200], [value // 200 % 200]] for value in sums]


def play(steps: list[tuple[str, int, int]]) -> Trajectory:
    """Sample turns as an engine that returns experts would; an aborted one returns none."""
    first = Trajectory()
    conversations, prompts = [first], [[1, 2, 3]]
    for number, (kind, observed, sampled) in enumerate(steps):
        at = number % len(conversations)
        if kind == "branch":
            conversations.append(conversations[at].branch())
            prompts.append(list(prompts[at]))
        trajectory, prompt = conversations[at], prompts[at]
        if kind == "fork":
            prompt = [*prompt[: len(prompt) // 2], 9]
        prompt = [*prompt, *(5 + index for index in range(observed))]
        trajectory.extend_to(prompt)
        start = trajectory.routed_tokens
        ids = [20 + (number + index) % 7 for index in range(sampled)]
        row_tokens = [*prompt, *ids]
        experts = None if kind == "aborted" else np.array(expected(row_tokens)[start:-1], np.uint8).reshape(-1, 2, 1)
        trajectory.append_sampled(
            Generation(
                tuple(ids),
                (-0.5,) * sampled,
                FinishReason.STOP,
                ((0, 0),),
                0,
                f"q{number}",
                experts=experts,
                experts_from=start,
            )
        )
        prompts[at] = row_tokens
    return first


@given(STEPS)
def test_experts_are_those_of_their_tokens(steps) -> None:
    trajectory = play(steps)
    again = Trajectory.from_state(json.loads(json.dumps(trajectory.to_state())))
    for row, copy in zip(trajectory.rows("p", "r"), again.rows("p", "r"), strict=True):
        expected_values = np.array(expected(row.token_ids.tolist()), np.uint8)
        if row.experts is None:
            assert all(kind == "aborted" for kind, *_ in steps)
            continue
        is_known = row.experts[:, 0, 0] != 255
        assert (row.experts[is_known] == expected_values[is_known]).all()
        assert copy.experts is not None
        assert (copy.experts == row.experts).all()
        if not any(kind == "aborted" for kind, *_ in steps):
            assert is_known[:-1].all()
            assert not is_known[-1]


@given(STEPS, st.integers(1, 2), st.sampled_from([40, 400]))
def test_experts_stay_with_packed_tokens(steps, shares: int, tokens: int) -> None:
    rows = {row.key: row for row in play(steps).rows("p", "r")}
    batch = pack_rows(
        [*rows.values()], {"r": 1.0}, data_parallel_size=shares, tokens_per_micro=tokens, pad_id=0, share_prefixes=True
    )
    for micro in (part for share in batch.micro for part in share):
        for number, key in enumerate(micro.keys):
            actual, expected_experts = micro.experts_L, rows[key].experts
            of_row = micro.row_L == number
            if expected_experts is not None:
                assert actual is not None
                assert (actual[of_row].numpy() == expected_experts).all()
            elif actual is not None:
                assert (actual[of_row] == 255).all()
        if micro.shares_prefixes and micro.experts_L is not None:
            tree = tree_input(micro, micro.mask_L.nonzero()[:, 0], torch.device("cpu"), ())
            assert tree.experts_L is not None
            is_known = tree.experts_L[:, 0, 0] != 255
            of_rows = {tuple(part) for part in micro.experts_L.flatten(1).tolist()}
            assert {tuple(part) for part in tree.experts_L[is_known].flatten(1).tolist()} == of_rows - {(255, 255)}
