"""The weight of every token, from ragged rollouts to the packed batch, against a count by hand in fractions."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction

import numpy as np
import pytest

from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RunEstimators
from agentrl.batch.packing import RowSignals, pack
from agentrl.config.load import validate
from agentrl.train.step_settings import pack_options
from tests.batches import training_step
from tests.unit.algo.ragged import SampledTokens, make_ragged

CONSTANT = 37


def by_hand(sequences: list[SampledTokens], counted: list[SampledTokens], aggregation: str) -> list[Fraction]:
    """Return the weight of a token of each sequence; ``counted`` are those in the denominator."""
    tokens = sum(len(one.places) for one in counted)
    of_rollout = Counter()
    for one in counted:
        of_rollout[one.rollout_id] += len(one.places)
    return [
        {
            "token_mean": Fraction(1, tokens),
            "sequence_mean": Fraction(1, len(counted) * len(one.places)),
            "rollout_mean": Fraction(1, len(of_rollout) * of_rollout[one.rollout_id]),
            "constant": Fraction(1, len(of_rollout) * CONSTANT),
        }[aggregation]
        for one in sequences
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
        for part, groups in zip(parts, np.array_split(data.groups.prompt_ids_G, steps), strict=True):
            packed = pack(
                training.rows(part.counted), pack_options(config, 0), RowSignals(advantages), trained=part.trained
            )
            found = {
                (key, place): float(micro.weight_L[at])
                for share in packed.micro
                for micro in share
                for number, key in enumerate(micro.keys)
                for place, at in enumerate((micro.row_L == number).nonzero()[:, 0].tolist())
                if micro.mask_L[at]
            }
            own = [one for one in data.sequences if one.group in groups]
            trained = [one for one in own if one.of(advantages).any()]
            assert 0 < len(trained) < len(own)
            wanted = by_hand(trained, trained if denominator == "live" else own, aggregation)
            assert len(found) == sum(len(one.places) for one in trained)
            for one, weight in zip(trained, wanted, strict=True):
                assert [found[place] for place in one.places] == pytest.approx(
                    [float(weight)] * len(one.places), rel=1e-6
                )
            if denominator == "live" and aggregation != "constant":
                assert sum(found.values()) == pytest.approx(1, rel=1e-5)
            seen |= {one.group for one in own}
        assert seen == {one.group for one in data.sequences}
