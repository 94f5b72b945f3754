"""Learning rates by the size of the model, and schedules over a run."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from agentrl.batch.lr_schedule import lr_scale
from agentrl.config.learner import OptimizerConfig
from agentrl.config.load import load_config
from agentrl.models.learning_rates import describe_optimizer, resolve_optimizer, usual_rates, with_rates
from agentrl.models.random_models import find_model_shape, write_random_model
from tests.batches import step_settings
from tests.unit.learner.learners import make_model


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        ("constant", [1, 1, 1, 1, 1, 1]),
        ("linear", [1, 1, 1, 0.875, 0.6875, 0.5]),
        (
            "cosine",
            [1, 1, 1, 0.5 + 0.25 * (1 + math.cos(math.pi / 4)), 0.5 + 0.25 * (1 + math.cos(math.pi * 5 / 8)), 0.5],
        ),
    ],
)
def test_a_schedule_begins_after_the_warm_up_and_ends_at_its_share(schedule: str, expected: list[float]) -> None:
    config = OptimizerConfig(schedule=schedule, min_lr_ratio=0.5, warmup_steps=2)
    actual = [lr_scale(config, done / 10, 10, "constant") for done in (0, 1, 2, 4, 7, 10)]
    assert actual == pytest.approx(expected)
    assert lr_scale(OptimizerConfig(warmup_steps=20, schedule="linear"), 0.9, 10, "constant") == 1


def test_auto_is_the_schedule_of_the_caller() -> None:
    config = OptimizerConfig(warmup_steps=0)
    assert lr_scale(config, 0.5, 10, "constant") == 1
    assert lr_scale(config, 0.5, 10, "linear") == pytest.approx(0.55)


def test_optimizer_steps_of_a_run_are_counted_over_its_training_steps() -> None:
    settings = ["train.steps=5", "train.steps_per_rollout=2", "algo.advantage.name=gae", "algo.critic.warmup_steps=1"]
    linear = ["schedule=linear", "warmup_steps=0", "min_lr_ratio=0"]
    both = [f"{key}.optimizer.{field_name}" for key in ("learner", "algo.critic") for field_name in linear]
    config = load_config(None, [*settings, *both])
    policy = [step_settings(config).policy_lr_scale(step, index) for step in range(1, 5) for index in range(2)]
    critic = [step_settings(config).critic_lr_scale(step, index) for step in range(5) for index in range(2)]
    assert policy == pytest.approx([1 - done / 8 for done in range(8)])
    assert critic == pytest.approx([1 - done / 10 for done in range(10)])


def test_rates_go_by_the_number_of_weights_and_given_ones_stay(tmp_path: Path) -> None:
    small, large = make_model(tmp_path / "small"), tmp_path / "large"
    write_random_model(large, find_model_shape("8b"), weights=False)
    auto = OptimizerConfig()
    chosen = [resolve_optimizer(auto, folder, use) for folder in (small, large) for use in ("policy", "critic", "sft")]
    assert [one.lr for one in chosen] == [3e-4, 3e-4, 3e-4, 1e-6, 1e-5, 1e-5]
    assert [one.warmup_steps for one in chosen] == [0, 0, 0, 10, 10, 10]
    adapters = [resolve_optimizer(auto, large, use, lora=True).lr for use in ("policy", "sft")]
    assert adapters == pytest.approx([1e-5, 1e-4])
    optimizer = resolve_optimizer(OptimizerConfig(lr=2e-3), large, "policy")
    assert (optimizer.lr, optimizer.warmup_steps) == (2e-3, 10)
    assert usual_rates(135_000_000).policy == 5e-5
    line = describe_optimizer(OptimizerConfig(warmup_steps=4, schedule="cosine"), large, "policy")
    assert line.startswith("adamw, learning rate 1e-06 (auto: 8,")
    assert line.endswith(" weights), warm-up 4, cosine to 0.1 of it")


def test_a_run_has_numbers_for_its_policy_and_its_critic(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "m")
    config = with_rates(load_config(None, ["algo.advantage.name=gae"]), folder, folder)
    assert (config.learner.optimizer.lr, config.algo.critic.optimizer.warmup_steps) == (3e-4, 0)
    assert with_rates(load_config(None, []), folder, None).algo.critic.optimizer.lr == "auto"
