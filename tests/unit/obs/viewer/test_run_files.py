import json

import numpy as np
import pytest

from agentrl.core.errors import UserError
from agentrl.core.types import Failure, FailureKind, StopReason
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.obs.viewer.run_files import Filters, RunFiles, evenly, open_run, select


@pytest.fixture
def run(tmp_path, make_rollout, pieces):
    """Steps 1 to 6, each of 3 groups of 2."""
    recorder = RolloutRecorder(tmp_path / "rollouts")
    for step in range(1, 7):
        rollouts = [make_rollout(pieces, f"{step}-{n}", f"p{n // 2}", reward=float(n)) for n in range(6)]
        rollouts[0].failure = Failure(FailureKind.TOOL, "ToolFailure", "gone") if step == 2 else None
        rollouts[5].stop_reason = StopReason.MAX_TURNS
        recorder.write(step, rollouts)
        recorder.finish(step, {rollout.rollout_id: rollout.reward - 2.5 for rollout in rollouts[1:]})
    return open_run(tmp_path)


def shown(run, filters, most=0):
    chosen = select(run, filters, most)
    return [(entry.step, entry.rollout.rollout_id) for entry in chosen.entries(run, filters)], chosen


def test_rollouts_come_with_steps_and_advantages(run):
    entries = list(select(run, Filters(), 0).entries(run, Filters()))
    assert len(entries) == 36
    assert [entry.step for entry in entries[::6]] == [1, 2, 3, 4, 5, 6]
    assert [entry.advantage for entry in entries[:3]] == [None, -1.5, -0.5]


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        (Filters(steps=(2, 3)), 12),
        (Filters(reward_min=1.0, reward_max=2.0), 12),
        (Filters(stop_reason=StopReason.MAX_TURNS), 6),
        (Filters(failed=True), 1),
        (Filters(group="p1"), 12),
        (Filters(steps=(6, 6), group="p0", reward_min=0.5), 1),
    ],
)
def test_filters(run, filters, expected):
    actual, chosen = shown(run, filters)
    assert len(actual) == expected
    assert chosen.notes == (f"Only {', '.join(filters.words())}.",)


def test_nan_rewards_fit_no_bound(make_rollout, pieces):
    broken = make_rollout(pieces, reward=float("nan"))
    assert Filters().admits(broken)
    assert not Filters(reward_min=-1e9).admits(broken)
    assert not Filters(reward_max=1e9).admits(broken)


@pytest.mark.parametrize("most", [1, 2, 7, 12, 20, 35])
def test_sampling_keeps_whole_groups_and_reports_what_is_left_out(run, most):
    actual, chosen = shown(run, Filters(), most)
    assert 0 < len(actual) <= max(2, most)
    groups = {(step, number.split("-")[0], int(number.split("-")[1]) // 2) for step, number in actual}
    assert len(actual) == 2 * len(groups)
    assert len(actual) > most - 3
    assert f"{len(actual)} of 36 rollouts" in chosen.notes[0]
    assert f"{36 - len(actual)} are left out" in chosen.notes[0]


def test_sampling_spreads_over_the_steps(run):
    actual, _ = shown(run, Filters(), 12)
    assert len({step for step, _ in actual}) >= 5


def test_no_note_if_nothing_is_left_out(run):
    assert shown(run, Filters(), 36)[1].notes == ()


def test_one_group_is_shown_however_large():
    assert evenly({(1, "a"): 50, (2, "b"): 50}, 10) == {(2, "b")}
    with_small = evenly({(1, "a"): 50, (2, "b"): 1}, 10)
    assert with_small == {(2, "b")}


def test_files_of_rollouts_alone(run, tmp_path):
    lone = open_run(tmp_path / "rollouts" / "step_000003.jsonl")
    assert len(shown(lone, Filters())[0]) == 6
    assert len(open_run(tmp_path / "rollouts").steps) == 6


def test_mistakes(run, tmp_path):
    with pytest.raises(UserError, match="steps 1 to 6"):
        select(run, Filters(steps=(7, 9)), 0)
    with pytest.raises(UserError, match="--reward-min 99"):
        select(run, Filters(reward_min=99.0), 0)
    with pytest.raises(UserError, match="no such folder"):
        open_run(tmp_path / "nowhere")
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="is not a run"):
        open_run(empty)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(UserError, match="no rollouts yet"):
        open_run(empty)
    (empty / "config.yaml").write_text(json.dumps({"obs": {"rollouts": "none"}}))
    with pytest.raises(UserError, match=r"obs\.rollouts=none"):
        open_run(empty)


def test_a_long_run_is_thinned_before_it_is_read(tmp_path, make_rollout, pieces):
    recorder = RolloutRecorder(tmp_path / "rollouts")
    for step in range(1, 101):
        recorder.write(step, [make_rollout(pieces, step)])
    read = []

    class Watched(RunFiles):
        def read(self, step, filters):
            read.append(step)
            return super().read(step, filters)

    run = open_run(tmp_path)
    actual, _ = shown(Watched(run.folder, run.rollouts, run.steps), Filters(), 5)
    assert len(actual) == 5
    assert len(read) <= 25
    assert np.diff([step for step, _ in actual]).max() <= 40
