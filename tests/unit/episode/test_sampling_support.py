"""The sampling support of tokens stays with them: through turns, forks, branches, journals, files, packing and prefix trees."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.batch.provenance import check_provenance
from agentrl.core.errors import ProvenanceError, SamplerError
from agentrl.core.sampling_support import SamplingSupport
from agentrl.core.types import FinishReason, Generation, Rollout, Row, StopReason
from agentrl.episode.trajectory import Trajectory
from agentrl.inference.client.segments import Segment, join
from agentrl.learner.tree_attention import tree_input
from agentrl.obs.records import decode_record, encode_record
from agentrl.obs.rollout_format import row_checksum
from agentrl.obs.rollouts import SUFFIXES, RolloutFile, read_rollouts
from tests.batches import pack_rows
from tests.supports import assert_same_support

STEPS = st.lists(
    st.tuples(st.sampled_from(["turn", "turn", "fork", "branch", "unknown"]), st.integers(0, 3), st.integers(1, 3)),
    min_size=1,
    max_size=8,
)


def support_of(request: int, ids: list[int]) -> SamplingSupport:
    """What a request sampled ids from: each with one to three more, by its number and place."""
    kept = [[token, *range(100 + request, 101 + request + place % 3)] for place, token in enumerate(ids)]
    flat = np.array([token for tokens in kept for token in tokens], np.int32)
    return SamplingSupport(np.array([*map(len, kept)], np.int32), flat, -0.1 - flat.astype(np.float32) / 64)


def make_generation(request: int, ids: list[int], *, known: bool = True) -> Generation:
    support = support_of(request, ids) if known else None
    return Generation(tuple(ids), (-0.5,) * len(ids), FinishReason.STOP, ((0, 0),), 0, f"q{request}", support=support)


def play(steps: list[tuple[str, int, int]]) -> Trajectory:
    """Sample turns as an engine would that returns supports, but for some requests."""
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
        ids = [20 + (number + index) % 7 for index in range(sampled)]
        trajectory.append_sampled(make_generation(number, ids, known=kind != "unknown"))
        prompts[at] = [*prompt, *ids]
    return first


def make_rollout(rows: list[Row]) -> Rollout:
    return Rollout("p", "r", rows, 1.0, StopReason.TERMINATED, sampled_tokens=3)


@given(STEPS)
def test_supports_are_those_of_their_requests_and_come_back_from_every_form(steps) -> None:
    trajectory = play(steps)
    rows = trajectory.rows("p", "r")
    again = Trajectory.from_state(json.loads(json.dumps(trajectory.to_state()))).rows("p", "r")
    decoded = decode_record(encode_record(make_rollout(rows))).rows
    for row, *copies in zip(rows, again, decoded, strict=True):
        for copy in copies:
            assert_same_support(copy.support, row.support)
            assert row_checksum(copy) == row_checksum(row)
        if row.support is None:
            assert all(steps[int(name[1:])][0] == "unknown" for name in row.request_ids)
            continue
        for number, name in enumerate(row.request_ids):
            places = np.flatnonzero(row.requests == number)
            request = int(name[1:])
            actual = row.support.select(places)
            if steps[request][0] == "unknown":
                assert not actual.counts.any()
                continue
            # A row that forks inside of a request has its first tokens.
            expected = support_of(request, [20 + (request + index) % 7 for index in range(steps[request][2])])
            assert_same_support(actual, expected.slice(0, len(places)))
        assert not row.support.counts[row.requests < 0].any()


@given(STEPS, st.integers(1, 2), st.sampled_from([40, 400]))
def test_supports_stay_with_packed_tokens(steps, shares: int, tokens: int) -> None:
    rows = {row.key: row for row in play(steps).rows("p", "r")}
    sizes = {"data_parallel_size": shares, "tokens_per_micro": tokens, "pad_id": 0}
    batch = pack_rows([*rows.values()], {"r": 1.0}, **sizes, share_prefixes=True, replays_support=True)
    for micro in (part for share in batch.micro for part in share):
        assert micro.support is not None
        assert len(micro.support) == len(micro.token_ids_L)
        for number, key in enumerate(micro.keys):
            expected, places = rows[key].support, np.flatnonzero(micro.row_L.numpy() == number)
            actual = micro.support.select(places)
            if expected is None:
                assert not actual.counts.any()
            else:
                assert_same_support(actual, expected if actual.logprobs is not None else _without_logprobs(expected))
        at_N = micro.mask_L.nonzero()[:, 0]
        if micro.shares_prefixes:
            tree = tree_input(micro, at_N, torch.device("cpu"), ())
            assert tree.targets_M.tolist() == micro.token_ids_L[at_N].tolist(), (
                "no token is scored for two rows at once"
            )
    is_known = all(row.support is not None and (row.support.counts[row.mask != 0] > 0).all() for row in rows.values())
    if is_known:
        check_provenance(batch)
        assert batch.metrics["batch/support_size"] >= 2
    else:
        with pytest.raises(ProvenanceError, match=r"sampler\.renormalise=engine\) was not recorded"):
            check_provenance(batch)
        warned = pack_rows([*rows.values()], {"r": 1.0}, **sizes, replays_support=True, provenance="warn")
        check_provenance(warned)
        assert warned.metrics["train/provenance_faults"] > 0


def _without_logprobs(support: SamplingSupport) -> SamplingSupport:
    return SamplingSupport(support.counts, support.token_ids)


def test_only_batches_that_replay_supports_have_them() -> None:
    rows = play([("turn", 1, 3)]).rows("p", "r")
    sizes = {"data_parallel_size": 1, "tokens_per_micro": 40, "pad_id": 0}
    assert all(micro.support is None for micro in pack_rows(rows, {"r": 1.0}, **sizes).micro[0])
    supervised = pack_rows(rows, kind="sft", **sizes, replays_support=True)
    assert all(micro.support is None for micro in supervised.micro[0])


@pytest.mark.parametrize("form", ["jsonl", "records", "parquet"])
def test_files_of_rollouts_have_supports(form: str, tmp_path: Path) -> None:
    rows = play([("turn", 1, 3), ("unknown", 1, 2), ("fork", 1, 2)]).rows("p", "r")
    rows.append(play([("unknown", 1, 2)]).rows("p", "r")[0])
    file = RolloutFile(tmp_path / f"step{SUFFIXES[form]}")
    file.write(make_rollout(rows))
    [rollout] = read_rollouts(file.finish())
    for actual, row in zip(rollout.rows, rows, strict=True):
        assert_same_support(actual.support, row.support)
    assert [row.support is None for row in rollout.rows] == [False] * (len(rows) - 1) + [True]


def test_a_turn_of_two_generations_has_the_support_of_both() -> None:
    first, second = make_generation(1, [20, 21]), make_generation(2, [22, 23, 24])
    joined = join(Segment(first, True), Segment(second, True), ()).generation
    assert joined.support is not None
    assert_same_support(joined.support.slice(0, 2), first.support)
    assert_same_support(joined.support.slice(2, 5), second.support)
    half = join(Segment(make_generation(1, [20], known=False), True), Segment(second, True), ()).generation
    assert half.support is not None
    assert half.support.counts[0] == 0


def test_a_support_of_another_length_is_refused() -> None:
    generation = make_generation(0, [20, 21])
    trajectory = Trajectory()
    trajectory.extend_to([1])
    broken = Generation(
        generation.token_ids, generation.logprobs, FinishReason.STOP, ((0, 0),), 0, "q", support=support_of(0, [20])
    )
    with pytest.raises(SamplerError, match="2 token ids and the sampling support of 1"):
        trajectory.append_sampled(broken)
