"""Several policies in a run: advantages, denominators and optimizer steps of each are those of a run with it alone."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from agentrl.batch.groups import group_rollouts
from agentrl.config.load import validate
from agentrl.testing import FakeLearner
from agentrl.train.step_metrics import policy_metrics
from agentrl.train.step_scores import score_rollouts
from tests.batches import step_settings, training_step
from tests.unit.algo.ragged import make_ragged


def rollouts():
    """Return rollouts of two policies, alternately, in groups of both."""
    made_rollouts = list(make_ragged(5, sizes=(6, 4), rewards=(0.0, 1.0, 3.0)).groups.rollouts_N)
    for number, message in enumerate(made_rollouts):
        message.policy = message.role = ("first", "second")[number % 2]
    return made_rollouts


def baselines_after(config, groups):
    """Return the state of a new estimator after a step with the rollouts."""
    step = training_step(config, groups)
    step.estimators.update(step.advantage_inputs())
    return step.estimators.state().get("", {}).get("state", {})


@pytest.mark.parametrize("name", ["grpo", "rae", "reinforce_plus_plus"])
@pytest.mark.parametrize("denominator", ["all", "live"])
def test_each_policy_is_trained_as_if_it_were_alone(name, denominator):
    config = validate(
        {
            "algo": {"advantage": {"name": name}},
            "batch": {"denominator": denominator},
            "rollout": {"batch_size": 2},
            "train": {"steps_per_rollout": 2},
        }
    )
    together = group_rollouts(rollouts())
    advantages = training_step(config, together).advantages
    steps = training_step(config, together).optimizer_steps()
    baselines = baselines_after(config, together)
    assert {step.policy for step in steps} == {"first", "second"}
    for policy in ("first", "second"):
        alone = group_rollouts([rollout for rollout in rollouts() if rollout.policy == policy])
        expected = training_step(config, alone).advantages
        assert all(np.array_equal(advantages[key], value) for key, value in expected.items())
        mine = [step for step in steps if step.policy == policy]
        other_optimizer_steps = training_step(config, alone).optimizer_steps()
        assert [(rollout.index, rollout.trained) for rollout in mine] == [
            (rollout.index, rollout.trained) for rollout in other_optimizer_steps
        ]
        assert [rollout.counted for rollout in mine] == [rollout.counted for rollout in other_optimizer_steps]
        for key, value in baselines_after(config, alone).items():
            assert baselines[key] == value


def test_scores_take_a_batch_of_each_policy():
    config = validate(
        {"algo": {"old_logprobs": "learner"}, "train": {"steps_per_rollout": 2}, "rollout": {"batch_size": 2}}
    )
    groups, requests = group_rollouts(rollouts()), []

    class Learner(FakeLearner):
        def logprobs(self, batch, policy="main"):
            requests.append(
                (batch.policy, {key.rollout_id for micros in batch.micro for m in micros for key in m.keys})
            )
            return super().logprobs(batch, policy)

    actual_rollouts = score_rollouts(step_settings(config), groups, Learner({"w": torch.ones(1)}))
    assert [policy for policy, _ in requests] == ["first", "second"]
    for policy, ids in requests:
        assert ids == {rollout.rollout_id for rollout in groups.rollouts_N if rollout.policy == policy}
    assert actual_rollouts.learner.keys() == {row.key for row in groups.rows if row.mask[1:].any()}


def test_metrics_are_by_policy():
    steps = [{"train/loss": 1.0, "batch/rows": 2.0}, {"train/loss": 3.0, "batch/rows": 2.0}]
    assert policy_metrics(["main", "main"], steps) == {}
    assert policy_metrics(["first", "second"], steps) == {
        "train/optimizer_steps/policy=first": 1,
        "train/loss/policy=first": 1,
        "train/optimizer_steps/policy=second": 1,
        "train/loss/policy=second": 3,
    }
