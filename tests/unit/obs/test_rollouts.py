import numpy as np
import pytest

from agentrl.episode.bench import synthetic_rows
from agentrl.obs.rollouts import RolloutRecorder, read_rollouts
from agentrl.types import Failure, FailureKind, FinishReason, Rollout, StopReason, Turn


def rollout(number=0, **changes):
    given = {
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
    return Rollout(**(given | changes))


def test_rollouts_come_back_bit_for_bit(tmp_path):
    failure = Failure(FailureKind.TOOL, "ToolFailure", "gone")
    first, second = rollout(0), rollout(1, rows=[], failure=failure, dropped=True, stop_reason=StopReason.FAILED)
    first.rows[0].logprobs[4] = np.float32(-0.1)
    recorder = RolloutRecorder(tmp_path / "rollouts")
    path = recorder.write(12, first)
    assert path == tmp_path / "rollouts" / "step_000012.jsonl"
    assert len(read_rollouts(path)) == 1  # there before the next one comes
    assert recorder.write(12, [second]) == path
    one, two = read_rollouts(path)
    assert two.failure == failure
    assert two.dropped
    assert two.stop_reason is StopReason.FAILED
    assert (one.reward, one.metrics, one.turns, one.prompt) == (first.reward, first.metrics, first.turns, first.prompt)
    assert one.metadata == {"hops": 2}
    row, expected = one.rows[0], first.rows[0]
    assert row.request_ids == expected.request_ids
    for name in ("token_ids", "provenance", "mask", "mask_reason", "logprobs", "versions", "requests"):
        np.testing.assert_array_equal(getattr(row, name), getattr(expected, name))
        assert getattr(row, name).dtype == getattr(expected, name).dtype


@pytest.mark.parametrize("cut", [1, 200])
def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path, cut):
    path = RolloutRecorder(tmp_path).write(1, [rollout(0), rollout(1)])
    path.write_bytes(path.read_bytes()[:-cut])
    assert [found.rollout_id for found in read_rollouts(path)] == ["r0"]


def test_a_step_done_again_starts_anew(tmp_path):
    RolloutRecorder(tmp_path).write(1, rollout(0))
    path = RolloutRecorder(tmp_path).write(1, rollout(1))
    assert [found.rollout_id for found in read_rollouts(path)] == ["r1"]
