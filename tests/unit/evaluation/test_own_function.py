"""`eval.function`: it plays its own episodes, runs the sets if it wants, and its metrics count like theirs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from agentrl import PolicyEvaluation
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.evaluation.own_function import load_evaluation
from agentrl.evaluation.sets import check_goals
from agentrl.obs.metrics import read_metrics
from tests.unit.train.async_world import make_config, train


async def own(policy: PolicyEvaluation) -> Mapping[str, float]:
    """The mean reward of two samples of the first task, without the sets."""
    rollouts = await policy.rollouts(policy.tasks["eval"][:1], n_samples=2, temperature=0.5)
    assert [rollout.prompt_id for rollout in rollouts] == ["t0", "t0"]
    assert policy.config["train"]["steps"] == 2
    assert policy.step is not None
    return {"own": sum(rollout.reward for rollout in rollouts) / 2, "of_step": policy.step}


async def both(policy: PolicyEvaluation) -> Mapping[str, float]:
    """The sets, and a metric that is made of theirs."""
    metrics = await policy.run_sets()
    return {"half_reward": metrics["eval/reward"] / 2}


async def taken(policy: PolicyEvaluation) -> Mapping[str, float]:
    """A metric that the sets have."""
    metrics = await policy.run_sets()
    return {"reward": metrics["eval/reward"] + 1}


async def twice(policy: PolicyEvaluation) -> Mapping[str, float]:
    """Run the sets two times."""
    await policy.run_sets()
    return await policy.run_sets()


async def same_tasks(policy: PolicyEvaluation) -> Mapping[str, float]:
    """Play a task twice without n_samples."""
    await policy.rollouts([*policy.tasks["eval"][:1]] * 2)
    return {}


async def broken(policy: PolicyEvaluation) -> Mapping[str, float]:
    """Raise."""
    raise KeyError("hops")


async def no_metrics(policy: PolicyEvaluation) -> list[float]:
    """Return a list."""
    return [1.0]


async def infinite(policy: PolicyEvaluation) -> Mapping[str, float]:
    """Return no finite number."""
    return {"own": float("inf")}


async def too_large(policy: PolicyEvaluation) -> Mapping[str, float]:
    """Return a number that no float holds."""
    return {"own": 10**400}


def plain(policy: PolicyEvaluation) -> Mapping[str, float]:
    """No coroutine function."""
    return {}


def evaluate_in_training(folder: Path, name: str, *settings: str) -> list[dict[str, float]]:
    """The rows of evaluations of a run."""
    config = make_config("train.steps=2", "train.eval_first=true", f"eval.function={__name__}:{name}", *settings)
    train(folder, config)
    return [row for row in read_metrics(folder / "metrics.jsonl") if "time/eval_s" in row]


@pytest.mark.parametrize("settings", [[], ["async.max_staleness=1", "eval.background=true"]])
def test_a_function_evaluates_in_place_of_the_sets(tmp_path: Path, settings: list[str]) -> None:
    rows = evaluate_in_training(tmp_path, "own", *settings, "eval.save_rollouts=true")
    assert [(row["step"], row["eval/of_step"]) for row in rows] == [(0, 0), (2, 2)]
    assert all("eval/own" in row and "eval/reward" not in row for row in rows)
    assert [path.name for path in sorted((tmp_path / "rollouts").glob("eval_*"))] == [
        "eval_000000.jsonl",
        "eval_000002.jsonl",
    ]


def test_a_function_runs_the_sets_too_and_its_metrics_are_goals(tmp_path: Path) -> None:
    rows = evaluate_in_training(tmp_path, "both", "train.stop_at={half_reward: -5}", "train.eval_every=1")
    assert all(row["eval/half_reward"] == pytest.approx(row["eval/reward"] / 2, abs=1e-4) for row in rows)
    assert [row["step"] for row in rows] == [0, 1], "the goal is reached after step 1"


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("taken", "returned the metric 'reward', which the sets have already"),
        ("twice", "run_sets was called before"),
        ("same_tasks", r"rollouts\(\) got several with the id 't0'"),
        ("broken", r"raised KeyError: 'hops' \(test_own_function.py:"),
        ("no_metrics", r"returned \[1.0\]; it must return a mapping of metrics"),
        ("infinite", "returned the metric 'own'=inf, which is no finite number"),
        ("too_large", "returned the metric 'own'=1000.*, which is no finite number"),
    ],
)
def test_a_broken_function_ends_the_run_with_its_name(tmp_path: Path, name: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        evaluate_in_training(tmp_path, name)


def test_a_function_is_checked_before_the_start() -> None:
    for name, fault in (("plain", "is no coroutine; write async def plain"), ("missing", "has no 'missing'")):
        with pytest.raises(ConfigError, match=fault):
            load_evaluation(load_config(None, [f"eval.function={__name__}:{name}"]).eval)
    goals = load_config(None, ["train.stop_at={own: 1}"]).train
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        check_goals(goals, [])
    check_goals(goals, [], f"{__name__}:own")
