"""The weight of every token, from ragged rollouts to the packed batch, against a count by hand in fractions."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RunEstimators
from agentrl.batch.loss_weights import row_weights
from agentrl.batch.packing import RowSignals, pack
from agentrl.config.load import validate
from agentrl.core.types import MaskReason
from agentrl.train.step_scores import pack_options
from tests.batches import training_step
from tests.unit.algo.ragged import SampledTokens, make_ragged

CONSTANT = 37


def by_hand(sequences: list[SampledTokens], counted: list[SampledTokens], aggregation: str) -> list[Fraction]:
    """Return the weight of a token of each sequence; ``counted`` are those in the denominator."""
    tokens = sum(len(rollout.places) for rollout in counted)
    of_rollout = Counter()
    for rollout in counted:
        of_rollout[rollout.rollout_id] += len(rollout.places)
    return [
        {
            "token_mean": Fraction(1, tokens),
            "sequence_mean": Fraction(1, len(counted) * len(rollout.places)),
            "rollout_mean": Fraction(1, len(of_rollout) * of_rollout[rollout.rollout_id]),
            "constant": Fraction(1, len(of_rollout) * CONSTANT),
        }[aggregation]
        for rollout in sequences
    ]


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("denominator", ["live", "all"])
@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "rollout_mean", "constant"])
def test_tokens_weigh_what_the_aggregation_says(aggregation, denominator, steps):
    for seed in range(2):
        data = make_ragged(seed, sizes=(4, 1, 3, 2, 2, 3), agents=3, rewards=(0.0, 1.0))
        batch = {"aggregation": aggregation, "denominator": denominator, "constant_tokens": CONSTANT}
        sizes = {"tokens_per_micro": 48}
        config = validate(
            {
                "batch": batch | sizes,
                "train": {"steps_per_rollout": steps},
                "rollout": {"batch_size": 6},
                "learner": {"ranks": 2},
            }
        )
        advantages = RunEstimators(config.algo.by_source).advantages("", AdvantageInput(data.groups))
        seen: set[str] = set()
        training = training_step(config, data.groups)
        parts = training.optimizer_steps()
        assert len(parts) == steps
        for step_part, groups in zip(parts, np.array_split(data.groups.prompt_ids_G, steps), strict=True):
            packed = pack(
                training.rows(step_part.counted),
                pack_options(config, 0),
                RowSignals(advantages),
                trained=step_part.trained,
            )
            actual = {
                (key, index): float(micro.weight_L[at])
                for share in packed.micro
                for micro in share
                for number, key in enumerate(micro.keys)
                for index, at in enumerate((micro.row_L == number).nonzero()[:, 0].tolist())
                if micro.mask_L[at]
            }
            own = [sequence for sequence in data.sequences if sequence.group in groups]
            trained = [sequence for sequence in own if sequence.of(advantages).any()]
            assert 0 < len(trained) < len(own)
            expected = by_hand(trained, trained if denominator == "live" else own, aggregation)
            assert len(actual) == sum(len(sequence.places) for sequence in trained)
            for sequence, weight in zip(trained, expected, strict=True):
                assert [actual[index] for index in sequence.places] == pytest.approx(
                    [float(weight)] * len(sequence.places), rel=1e-6
                )
            if denominator == "live" and aggregation != "constant":
                assert sum(actual.values()) == pytest.approx(1, rel=1e-5)
            seen |= {sequence.group for sequence in own}
        assert seen == {sequence.group for sequence in data.sequences}


def test_rows_without_observed_tokens_have_no_weight_of_context():
    row = make_ragged(0, sizes=(1,), dropped=0).rows[0]
    demonstrated = replace(row, mask_reason=np.full_like(row.mask_reason, MaskReason.NONE))
    [weights_T] = row_weights([demonstrated], "token_mean", context_weight=0.3)
    assert weights_T.sum() == pytest.approx(1)
