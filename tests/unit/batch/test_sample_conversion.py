"""Sample conversions: they take tokens out, weigh and reward, and what was sampled stays bit for bit.

Rows of the rollouts: prompt of 2 tokens, a turn of 3, an observation of 1, a turn of 2.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.provenance import check_rows
from agentrl.batch.sample_conversion import ConvertedSamples, convert_samples
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.core.training_sample import TrainingSample
from agentrl.core.types import MaskReason, Provenance, Rollout
from agentrl.train.training_step import TrainingStep
from tests.batches import step_settings
from tests.unit.obs.viewer.conftest import build

OBSERVED = (Provenance.OBSERVED, MaskReason.OBSERVED)
SAMPLED = (Provenance.SAMPLED, MaskReason.NONE)
PIECES = [(*OBSERVED, [5, 9]), (*SAMPLED, [7, 5, 7]), (*OBSERVED, [3]), (*SAMPLED, [1, 2])]
ARRAYS = ("token_ids", "provenance", "logprobs", "versions", "requests")
Samples = Sequence[TrainingSample]


def rollouts() -> list[Rollout]:
    return [build(PIECES, number, f"p{number // 2}", reward=float(number)) for number in range(4)]


def training_step(convert: Callable[[Samples], Samples] | None, *settings: str) -> TrainingStep:
    """A step after a conversion."""
    config = load_config(None, ["batch.denominator=all", *settings])
    step = TrainingStep(step_settings(config), RunEstimators(config.algo.by_source), 0, rollouts())
    if convert is not None:
        step.converted = convert_samples(convert, "mine", step.rollouts)
    return step


def convert_one(change: Callable[[TrainingSample], None]) -> ConvertedSamples:
    """Convert the rollouts by a change of the first."""

    def convert(samples: Samples) -> Samples:
        change(samples[0])
        return samples

    return convert_samples(convert, "mine", rollouts())


def test_what_was_sampled_stays_and_masked_tokens_have_a_reason() -> None:
    def mask_first_turn(samples: Samples) -> Samples:
        for sample in samples:
            for row in sample.rows:
                assert row.turns_T.tolist() == [-1, -1, 0, 0, 0, -1, 1, 1]
                row.mask_T = row.mask_T & (row.turns_T != 0)
        return samples

    originals = rollouts()
    converted = convert_samples(mask_first_turn, "mine", originals)
    for original, rollout in zip(originals, converted.rollouts, strict=True):
        for before, after in zip(original.rows, rollout.rows, strict=True):
            assert all(np.array_equal(getattr(before, name), getattr(after, name)) for name in ARRAYS)
            assert before.mask.tolist() == [0, 0, 1, 1, 1, 0, 1, 1], "the rollout itself is unchanged"
            assert after.mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
            assert set(after.mask_reason[2:5].tolist()) == {MaskReason.CONVERTED}
    check_rows(row for rollout in converted.rollouts for row in rollout.rows)
    assert converted.metrics == {"batch/convert/dropped": 0.0, "batch/convert/masked_share": pytest.approx(0.6)}
    assert (converted.rewards, converted.weights) == ({}, None)


def test_a_sample_that_is_left_out_is_in_no_baseline_and_one_with_masks_of_zeros_is() -> None:
    def drop(samples: Samples) -> Samples:
        return [sample for sample in samples if sample.rollout.reward != 3]

    def mask(samples: Samples) -> Samples:
        for sample in samples:
            if sample.rollout.reward == 3:
                sample.rows[0].mask_T[:] = False
        return samples

    settings = ("algo.advantage.options.std_normalise=false",)
    means = {}
    for name, function in (("drop", drop), ("mask", mask), ("none", None)):
        step = training_step(function, *settings)
        means[name] = {key.rollout_id: float(values.sum()) for key, values in step.advantages.items()}
        assert sum(rollout.reward for rollout in step.sampled_groups.rollouts_N) == 6, "train/reward stays"
    rollout_ids = [rollout.rollout_id for rollout in rollouts()]
    assert [means["none"][name] for name in rollout_ids] == pytest.approx([-2.5, 2.5, -2.5, 2.5])
    assert means["drop"].keys() == {*rollout_ids[:3]}
    assert means["drop"][rollout_ids[2]] == 0, "it is alone in its group"
    assert [means["mask"][name] for name in rollout_ids] == pytest.approx([-2.5, 2.5, -2.5, 0])


def test_weights_multiply_the_loss_and_leave_the_denominator() -> None:
    def weigh(samples: Samples) -> Samples:
        samples[1].weight = 3.0
        samples[3].rows[0].weight_T[3] = 0.5
        samples[3].rows[0].weight_T[2] = 0.0
        return samples

    def weights(step: TrainingStep) -> dict[str, list[float]]:
        [optimizer_step] = step.optimizer_steps()
        by_rollout: dict[str, list[float]] = {}
        for micro in (micro for rank in step.policy_batch(optimizer_step).micro for micro in rank):
            for number, key in enumerate(micro.keys):
                by_rollout[key.rollout_id] = micro.weight_L[micro.row_L == number].tolist()
        return by_rollout

    plain, weighed = weights(training_step(None)), weights(training_step(weigh))
    first, second, _, last = (rollout.rollout_id for rollout in rollouts())
    assert plain[first] == pytest.approx([0, 0, 0.05, 0.05, 0.05, 0, 0.05, 0.05]), "20 tokens"
    unit = 1 / 19
    assert weighed[first] == pytest.approx([0, 0, unit, unit, unit, 0, unit, unit]), "a weight of 0 is a mask"
    assert weighed[second] == pytest.approx([0, 0, 3 * unit, 3 * unit, 3 * unit, 0, 3 * unit, 3 * unit])
    assert weighed[last] == pytest.approx([0, 0, 0, unit / 2, unit, 0, unit, unit])


def test_rewards_of_tokens_are_at_their_tokens_and_add_up_for_estimators_of_whole_rollouts() -> None:
    def reward_first_turn(samples: Samples) -> Samples:
        for sample in samples:
            sample.reward = 0.0
            sample.rows[0].reward_T[4] = sample.rollout.reward
        return samples

    name = rollouts()[1].rollout_id
    group = training_step(reward_first_turn, "algo.advantage.options.std_normalise=false")
    assert {key.rollout_id: values.max() for key, values in group.advantages.items()}[name] == pytest.approx(0.5)
    plain = training_step(reward_first_turn, "algo.advantage.name=reward")
    assert {key.rollout_id: values.max() for key, values in plain.advantages.items()}[name] == 1
    per_token = training_step(reward_first_turn, "algo.advantage.name=reinforce_plus_plus")
    values = {key.rollout_id: values for key, values in per_token.advantages.items()}
    assert values[name][2] == values[name][4] > values[name][6], "the second turn has no return of it"


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda sample: setattr(sample, "reward", float("nan")), "has the reward nan; it must be a finite number"),
        (lambda sample: setattr(sample, "reward", 10**400), "it must be a finite number"),
        (lambda sample: setattr(sample, "reward", "1"), "has the reward '1'"),
        (
            lambda sample: setattr(sample, "weight", -1.0),
            "has the weight -1.0; it must be a finite number of at least 0",
        ),
        (lambda sample: sample.rows.clear(), "has 0 rows, and 1 were sampled"),
        (lambda sample: setattr(sample.rows[0], "mask_T", [True]), r"mask_T of row 0 has the shape \(1,\), not \(8,\)"),
        (lambda sample: setattr(sample.rows[0], "weight_T", ["a"] * 8), "weight_T of row 0 has the dtype"),
        (lambda sample: setattr(sample.rows[0], "weight_T", -np.ones(8)), "has a negative weight"),
        (lambda sample: setattr(sample.rows[0], "reward_T", np.full(8, np.inf)), "has a value that is not finite"),
    ],
)
def test_what_is_no_conversion_is_named(change: Callable[[TrainingSample], None], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault) as error:
        convert_one(change)
    assert "batch.convert=mine: rollout " in str(error.value)


def test_functions_of_whole_steps_do_not_stream() -> None:
    for key in ("batch.convert", "algo.reward_post_process"):
        with pytest.raises(ConfigError, match=f"{key}=m:f with async.streaming=true"):
            load_config(None, [f"{key}=m:f", "async.streaming=true", "async.max_staleness=1"])
