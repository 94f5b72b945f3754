import math

import numpy as np
import orjson
import pytest

from agentrl.core.errors import ConfigError
from agentrl.core.types import Failure, FailureKind, FinishReason, Rollout, SeatRecord, StopReason, Turn
from agentrl.obs.parquet import write_parquet
from agentrl.obs.rollout_format import portable_json, rollout_checksum, rollout_to_dict
from agentrl.obs.rollouts import (
    RolloutFile,
    RolloutRecorder,
    read_advantages,
    read_rollouts,
    rollout_files,
    write_advantages,
)
from benchmarks.episode_runner import synthetic_rows


def recorded_ids(folder):
    return [
        actual_rollout.rollout_id for path in rollout_files(folder).values() for actual_rollout in read_rollouts(path)
    ]


def rollout(number=0, **changes):
    fields = {
        "prompt_id": "p",
        "rollout_id": f"r{number}",
        "rows": synthetic_rows(1, 2, 3),
        "reward": 0.1,
        "stop_reason": StopReason.TERMINATED,
        "metrics": {"exact_match": 1.0},
        "turns": [Turn("say", "hear\n☃", FinishReason.STOP, 0.1)],
        "prompt": "What?\n",
        "metadata": {"hops": np.int64(2)},
        "sampled_tokens": 6,
    }
    return Rollout(**(fields | changes))


ARRAYS = ("token_ids", "provenance", "mask", "mask_reason", "logprobs", "versions", "requests")
PLAIN = (
    "prompt_id", "rollout_id", "reward", "stop_reason", "metrics", "turns", "prompt", "label", "failure", "dropped",
    "filtered", "seconds", "sampled_tokens", "agent", "role", "seat", "opponent", "episode",
    "seat_rewards", "seats",
)  # fmt: skip


def assert_same(actual, other):
    for name in PLAIN:
        assert getattr(actual, name) == getattr(other, name), name
    assert len(actual.rows) == len(other.rows)
    for row, expected in zip(actual.rows, other.rows, strict=True):
        assert row.request_ids == expected.request_ids
        assert (row.key.agent_id, row.key.row) == (expected.key.agent_id, expected.key.row)
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))
            assert getattr(row, name).dtype == getattr(expected, name).dtype


def several():
    failure = Failure(FailureKind.TOOL, "ToolFailure", "gone")
    first = rollout(0, rows=synthetic_rows(3, 2, 3), label=["Paris", {"also": 1.5}])
    first.rows[0].logprobs[4] = np.float32(-0.1)
    second = rollout(1, rows=[], turns=[], metrics={}, failure=failure, dropped=True, stop_reason=StopReason.FAILED)
    player = {"agent": "player_1", "role": "second", "seat": 1, "opponent": "fixed:random", "episode": "e3"}
    player["seat_rewards"] = (-1.0, 0.1)
    fixed = SeatRecord("player_0", "first", "random", trained=False, steps=(0, 2), moves=("bet", "☃"))
    player["seats"] = (fixed, SeatRecord("player_1", "second", "policy", trained=True, steps=(1,)))
    return [first, second, rollout(2, label=None, dropped=True, filtered="all_solved"), rollout(3, **player)]


@pytest.mark.parametrize("form", ["jsonl", "parquet", "rollouts"])
def test_rollouts_come_back_bit_for_bit(tmp_path, form):
    path = tmp_path / f"samples.{form}"
    file = RolloutFile(path)
    first, *other_rollouts = several()
    file.write(first)
    assert len(read_rollouts(file.lines)) == 1  # there before the next one comes
    file.write(other_rollouts)
    assert file.finish() == path
    assert [each.name for each in tmp_path.iterdir()] == [path.name]
    rollouts = read_rollouts(path)
    for rollout, other in zip(rollouts, [first, *other_rollouts], strict=True):
        assert_same(rollout, other)
    assert rollouts[0].metadata == {"hops": 2}


def test_parquet_of_no_rollouts(tmp_path):
    write_parquet(tmp_path / "none.parquet", [])
    assert read_rollouts(tmp_path / "none.parquet") == []


@pytest.mark.parametrize("form", ["jsonl", "parquet", "rollouts"])
def test_what_json_cannot_hold_is_written_all_the_same(tmp_path, form):
    class Answer:
        def __str__(self):
            return "an answer"

    turn = Turn("half a pair \ud83d", "", FinishReason.STOP)
    odd = rollout(label=[10**30, Answer()], turns=[turn], reward=math.nan, metrics={"ratio": math.inf})
    file = RolloutFile(tmp_path / f"odd.{form}")
    file.write(odd)
    [rollouts] = read_rollouts(file.finish())
    assert rollouts.label == [str(10**30), "an answer"]
    assert rollouts.turns[0].action == "half a pair ?"
    assert math.isnan(rollouts.reward)
    np.testing.assert_array_equal(rollouts.rows[0].token_ids, odd.rows[0].token_ids)


def test_files_that_hold_no_rollouts_are_refused(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "hello"}\n')
    with pytest.raises(ConfigError, match="line 1"):
        read_rollouts(tmp_path / "bad.jsonl")
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(ConfigError, match=r"bad\.parquet"):
        read_rollouts(tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match=r"none\.jsonl"):
        read_rollouts(tmp_path / "none.jsonl")


@pytest.mark.parametrize("cut", [1, 200])
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path, cut):
    RolloutRecorder(tmp_path).write(1, [rollout(0), rollout(1)])
    path = tmp_path / "step_000001.jsonl"
    path.write_bytes(path.read_bytes()[:-cut])
    assert [actual_rollout.rollout_id for actual_rollout in read_rollouts(path)] == ["r0"]


def test_a_rollout_of_an_earlier_version_is_read_and_its_checksum_verified(tmp_path):
    path = tmp_path / "old.jsonl"
    record = {name: value for name, value in rollout_to_dict(rollout(), 0).items() if name != "tool_uses"}
    record["checksum"] = rollout_checksum(rollout(), 0, record.keys())  # as a version without this field wrote it
    path.write_bytes(portable_json(record, orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    assert [read.rollout_id for read in read_rollouts(path)] == ["r0"]
    path.write_bytes(portable_json(record | {"prompt": "Who?"}, orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    with pytest.raises(ConfigError, match="is not as it was written"):
        read_rollouts(path)
    record = {name: value for name, value in rollout_to_dict(rollout(), 0).items() if name != "tool_uses"}
    path.write_bytes(portable_json(record, orjson.OPT_SERIALIZE_NUMPY) + b"\n")
    with pytest.raises(ConfigError, match="is not as it was written"):
        read_rollouts(path)


def test_a_repeated_step_overwrites_its_file(tmp_path):
    RolloutRecorder(tmp_path).write(1, rollout(0))
    RolloutRecorder(tmp_path).write(1, rollout(1))
    assert [actual_rollout.rollout_id for actual_rollout in read_rollouts(tmp_path / "step_000001.jsonl")] == ["r1"]


def test_a_step_becomes_parquet_once_it_is_whole(tmp_path):
    recorder = RolloutRecorder(tmp_path / "rollouts", form="parquet")
    recorder.write(1, rollout(0))
    recorder.finish(1, {"r0": 0.5})
    recorder.write(2, [rollout(1), rollout(2)])  # killed here
    assert {step: path.name for step, path in rollout_files(tmp_path).items()} == {
        1: "step_000001.parquet",
        2: "step_000002.jsonl",
    }
    assert [(step, len(read_rollouts(path))) for step, path in rollout_files(tmp_path).items()] == [(1, 1), (2, 2)]
    assert read_advantages(tmp_path / "rollouts", 1) == {"r0": 0.5}
    assert read_advantages(tmp_path / "rollouts", 2) == {}
    again = RolloutRecorder(tmp_path / "rollouts")
    again.delete_after(1)
    assert list(rollout_files(tmp_path)) == [1]
    again.write(2, rollout(3))
    assert recorded_ids(tmp_path) == ["r0", "r3"]


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_a_resume_removes_the_evaluations_of_later_steps(tmp_path, form):
    recorder = RolloutRecorder(tmp_path, form=form)
    for step in (1, 2):
        file = recorder.evaluation(step)
        file.write(rollout(step))
        file.finish()
    recorder.evaluation(3).write(rollout(3))  # killed here
    RolloutRecorder(tmp_path, form=form).delete_after(1)
    assert [path.name for path in tmp_path.iterdir()] == [f"eval_000001.{form}"]


@pytest.mark.parametrize(("keep", "expected"), [("all", ["r0", "r1", "r2"]), ("first", ["r1"]), ("none", [])])
def test_which_rollouts_are_kept(tmp_path, keep, expected):
    recorder = RolloutRecorder(tmp_path, keep=keep)
    recorder.begin(1, "wanted")
    for number, prompt in enumerate(["other", "wanted", "other"]):
        recorder.write(1, rollout(number, prompt_id=prompt))
    recorder.finish(1, {"r0": 1.0, "r1": 0.0, "r2": -1.0})
    assert recorded_ids(tmp_path) == expected
    assert read_advantages(tmp_path, 1) == ({"r0": 1.0, "r1": 0.0, "r2": -1.0} if expected else {})


def test_advantages_come_back(tmp_path):
    path = write_advantages(tmp_path, 12, {"1/0/0": -0.25})
    assert path.name == "step_000012.advantages.json"
    assert read_advantages(tmp_path, 12) == {"1/0/0": -0.25}


@pytest.mark.parametrize("form", ["jsonl", "parquet"])
def test_an_evaluations_rollouts_are_no_step(tmp_path, form):
    recorder = RolloutRecorder(tmp_path, form=form)
    recorder.write(3, rollout(0))
    recorder.finish(3, {})
    file = recorder.evaluation(3)
    file.write(rollout(1))
    path = file.finish()
    assert path.name == f"eval_000003.{form}"
    assert [actual_rollout.rollout_id for actual_rollout in read_rollouts(path)] == ["r1"]
    assert recorded_ids(tmp_path) == ["r0"]


def test_a_failure_is_written_without_the_password_of_an_address():
    message = "the engine at http://bob:hunter2pass@host:1 does not answer"
    written = rollout_to_dict(rollout(failure=Failure(FailureKind.SAMPLER, "SamplerError", message)))
    assert "hunter2pass" not in orjson.dumps(written["failure"]).decode()
    assert written["failure"]["message"].endswith("@host:1 does not answer")
