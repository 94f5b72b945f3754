"""Groups that lost rollouts: each is compared with its own task's, never with the batch's."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.algo.estimate import mean_advantages
from agentrl.batch.groups import group_rollouts
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from tests.batches import pack_rows, training_step

PLAIN = load_config(None)
WITH_KL = load_config(None, ["algo.kl_coef=0.001"])
GROUPS = st.lists(
    st.lists(st.tuples(st.integers(-2, 2), st.booleans()), min_size=1, max_size=5), min_size=1, max_size=5
)


def rollout(prompt: str, sample: int, reward: float, *, dropped: bool = False) -> Rollout:
    mask = np.array([0, 1, 1], np.uint8)
    row = Row(
        key=RowKey(prompt, f"{prompt}/{sample}"),
        token_ids=np.arange(3, dtype=np.int32),
        provenance=(mask * Provenance.SAMPLED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.zeros(3, np.float32),
        versions=mask.astype(np.int32) - 1,
        requests=mask.astype(np.int32) - 1,
        request_ids=("q",),
    )
    return Rollout(prompt, row.key.rollout_id, [row], reward, StopReason.TERMINATED, dropped=dropped)


def advantages(config: Config, rollouts: list[Rollout]) -> dict[str, float]:
    return mean_advantages(training_step(config, group_rollouts(rollouts)).advantages)


def in_batches(config: Config, rollouts: list[Rollout]) -> dict[str, float]:
    """By rollout, the advantage that its trained tokens carry in the packed batches."""
    by_batch: dict[str, float] = {}
    groups = group_rollouts(rollouts)
    step = training_step(config, groups)
    for optimizer_step in step.optimizer_steps():
        batch = pack_rows(
            step.rows(optimizer_step.counted), step.advantages, data_parallel_size=1, tokens_per_micro=64, pad_id=0
        )
        for micro in (micro for rank in batch.micro for micro in rank):
            for number, key in enumerate(micro.keys):
                [value] = set(micro.advantages_L[(micro.row_L == number) & micro.mask_L].tolist())
                by_batch[key.rollout_id] = value
    return by_batch


def test_a_batch_of_uneven_groups_by_hand():
    """slime takes such a batch for one group (THUDM/slime#2302): 10 and 11 would both come out above the mean."""
    rollouts = [
        rollout("hard", 0, 0.0), rollout("easy", 0, 10.0), rollout("hard", 1, 1.0), rollout("lone", 0, 3.0),
        rollout("easy", 1, 11.0), rollout("hard", 2, 99.0, dropped=True), rollout("hard", 3, 0.0),
        rollout("lone", 1, -7.0, dropped=True), rollout("gone", 0, 1.0, dropped=True),
    ]  # fmt: skip
    third, half = 3**-0.5, 0.5**0.5
    expected = {
        "hard/0": -(1 / 3) / third, "hard/1": (2 / 3) / third, "hard/3": -(1 / 3) / third,
        "easy/0": -half, "easy/1": half,
    }  # fmt: skip
    assert advantages(PLAIN, rollouts) == pytest.approx(expected | {"lone/0": 0.0}, rel=1e-4)
    assert advantages(PLAIN, rollouts)["lone/0"] == 0.0
    assert in_batches(PLAIN, rollouts) == pytest.approx(expected, rel=1e-4)


def test_rollouts_without_an_advantage_stay_for_the_kl_term():
    rollouts = [rollout("lone", 0, 3.0), rollout("flat", 0, 1.0), rollout("flat", 1, 1.0)]
    assert in_batches(PLAIN, rollouts) == {}
    assert in_batches(WITH_KL, rollouts) == {"lone/0": 0.0, "flat/0": 0.0, "flat/1": 0.0}


def test_nothing_left_gives_no_batch():
    rollouts = [rollout("gone", sample, 1.0, dropped=True) for sample in range(3)]
    assert in_batches(PLAIN, rollouts) == in_batches(WITH_KL, rollouts) == {}


@given(GROUPS, st.integers(0, 4), st.randoms(use_true_random=False))
def test_what_other_groups_hold_or_lose_changes_nothing(groups, watched, random):
    watched %= len(groups)
    rollouts = [
        rollout(str(number), sample, float(reward), dropped=dropped)
        for number, group in enumerate(groups)
        for sample, (reward, dropped) in enumerate(group)
    ]
    random.shuffle(rollouts)
    together = advantages(PLAIN, rollouts)
    alone = advantages(PLAIN, [one for one in rollouts if one.prompt_id == str(watched)])
    assert alone == {name: value for name, value in together.items() if name.startswith(f"{watched}/")}
    kept_rewards = [reward for reward, dropped in groups[watched] if not dropped]
    if len(set(kept_rewards)) < 2:
        assert set(alone.values()) <= {0.0}
    else:
        assert sum(alone.values()) == pytest.approx(0, abs=1e-5)
        assert min(alone.values()) < 0 < max(alone.values())
