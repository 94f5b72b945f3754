"""Metrics of a set, flat for metrics and metrics_to_dict for JSON, and what people see of them."""

import json
from io import StringIO

import pytest
from rich.console import Console

from agentrl import Message, Task
from agentrl.config.evaluation import EvalSet
from agentrl.core.types import Failure, FailureKind, FinishReason, Rollout, StopReason, Turn
from agentrl.evaluation.evaluate import SetResult, flat_metrics, report
from agentrl.evaluation.metrics import compute_metrics, flat, metrics_to_dict
from agentrl.evaluation.sets import EvalTasks
from agentrl.evaluation.table import results_lines, results_table


def rollout(prompt: str, sample: int, reward: float, hops: object = 1, **more: object) -> Rollout:
    return Rollout(
        prompt,
        f"{prompt}/{sample}",
        [],
        reward,
        StopReason.TERMINATED,
        {"exact_match": float(reward >= 1), "searches": 1.0},
        turns=[Turn("a", "", FinishReason.STOP)] * 2,
        sampled_tokens=10,
        metadata={"hops": hops},
        **more,  # type: ignore[arg-type]
    )


ONE = [rollout("a", 0, 1.0, 1), rollout("b", 0, 0.0, 2), rollout("c", 0, 1.0, 2)]
PASSED = {"a": 0, "b": 1, "c": 4}
SEVERAL = [rollout(name, sample, float(sample < passed)) for name, passed in PASSED.items() for sample in range(4)]


def test_metrics_of_one_sample_a_prompt_by_metadata() -> None:
    metrics = flat(compute_metrics(ONE, group_by="hops"), "eval/")
    assert metrics["eval/exact_match"] == pytest.approx(2 / 3)
    assert metrics["eval/exact_match/hops=1"] == 1.0
    assert metrics["eval/reward/hops=2"] == 0.5
    assert metrics["eval/episodes"] == 3
    assert metrics["eval/pass@1"] == pytest.approx(2 / 3)
    assert metrics["eval/tokens"] == 10
    assert metrics["eval/turns"] == 2
    assert 0.3 < metrics["eval/exact_match/ci95"] < 0.6
    assert not [key for key in metrics if "hops" in key and "ci95" in key]


def test_pass_at_k_of_several_samples() -> None:
    metrics = compute_metrics(SEVERAL, pass_reward=1.0)
    assert {key: mean.value for key, mean in metrics.means.items() if key.startswith("pass")} == {
        "pass@1": pytest.approx(5 / 12),
        "pass@2": pytest.approx((0 + 0.5 + 1) / 3),
        "pass@4": pytest.approx(2 / 3),
    }
    assert metrics.means["pass@1"].value == pytest.approx(metrics.means["exact_match"].value)
    assert metrics.means["pass@1"].ci95 == pytest.approx(metrics.means["exact_match"].ci95), "both by prompt"
    assert compute_metrics(SEVERAL, pass_reward=2.0).means["pass@4"].value == 0.0
    assert (metrics.prompts, metrics.episodes) == (3, 12)


def test_prompts_may_have_more_samples_than_others() -> None:
    metrics = compute_metrics([*SEVERAL, rollout("c", 4, 0.0)])
    assert "pass@5" not in metrics.means
    assert metrics.means["pass@4"].value == pytest.approx((0 + 1 + 1) / 3)


def test_failed_rollouts_count_with_what_they_had() -> None:
    failure = Failure(FailureKind.TOOL, "ToolFailure", "gone")
    metrics = compute_metrics([*ONE, rollout("d", 0, 0.0, failure=failure)])
    assert metrics.failed == 0.25
    assert metrics.means["reward"].value == 0.5


def test_values_stand_in_the_order_of_numbers() -> None:
    rollouts = [rollout(f"p{hops}", 0, 1.0, hops) for hops in (10, 2, "x", 1)]
    assert list(compute_metrics(rollouts, group_by="hops").groups) == ["hops=1", "hops=2", "hops=10", "hops=x"]


def choice(name: str) -> EvalTasks:
    tasks = [Task(task_id, (Message("user", "?"),)) for task_id in ("a", "b", "c")]
    return EvalTasks(name, EvalSet(n_samples=4, temperature=0.7, group_by="hops"), tasks, "the split 'eval'")


def test_reports_are_whole_and_json() -> None:
    results = [
        SetResult(choice("x"), compute_metrics(SEVERAL, group_by="hops"), SEVERAL),
        SetResult(choice("y"), compute_metrics(ONE, group_by="hops"), ONE),
    ]
    data = json.loads(json.dumps(report(results), allow_nan=False))
    assert data["x"]["sampling"] == {
        "n_samples": 4, "temperature": 0.7, "top_p": 1.0, "top_k": -1, "max_new_tokens": None, "pass_reward": 1.0,
        "group_by": "hops",
    }  # fmt: skip
    mean = data["x"]["means"]["pass@2"]
    assert mean["low"] < mean["value"] < mean["high"]
    assert data["y"]["by"]["hops=2"]["means"]["reward"]["value"] == 0.5
    assert data["y"]["by"]["hops=1"]["means"]["reward"]["ci95"] is None, "one prompt"
    assert data["y"]["stops"] == {"terminated": 1.0}
    metrics = flat_metrics(results)
    assert metrics["eval/x/pass@4"] == pytest.approx(2 / 3)
    assert metrics["eval/y/exact_match/hops=1"] == 1.0
    assert all(key.startswith(("eval/x/", "eval/y/")) for key in metrics)


def test_the_table_has_a_column_a_set_and_intervals() -> None:
    results = [
        SetResult(choice("many"), compute_metrics(SEVERAL), SEVERAL),
        SetResult(choice("[one]"), compute_metrics(ONE, group_by="hops"), ONE),
    ]
    text = StringIO()
    Console(file=text, width=120).print(results_table(results, "search_r1: model"))
    lines = text.getvalue().splitlines()
    [head] = [line for line in lines if "metric" in line]
    assert "many" in head
    assert "[one]" in head
    [row] = [line for line in lines if "pass@4" in line]
    assert "0.667 [0.208, 0.939]" in row
    assert "–" in row, "the other set has one sample a prompt"
    assert any("hops=2" in line and "0.500 ±" in line for line in lines)
    assert any("tasks x samples" in line and "3 x 4" in line for line in lines)
    assert any("temperature 0.7" in line for line in lines)


def test_a_line_a_set_for_the_log() -> None:
    named = SetResult(choice("x"), compute_metrics(ONE), ONE)
    plain = SetResult(choice(""), compute_metrics(ONE), ONE)
    assert results_lines([named])[0].startswith("x  reward 0.667 [0.208, 0.939]")
    assert results_lines([plain])[0].startswith("reward 0.667 [0.208, 0.939]")
    assert metrics_to_dict(named.metrics)["prompts"] == 3
