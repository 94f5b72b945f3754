"""The mean gradient of estimators, summed exactly over all outcomes of a group, against the gradient of the expected reward.

The policy decides when to stop: in turn k it goes on with probability σ(θ_k), or stops. There are four episodes, ``S``,
``GS``, ``GGS``, ``GGG``, so a group of three has 64 outcomes. With ``pytest -s`` the biases are printed, as the norm of the
difference over the norm of the gradient.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from agentrl.algo.base import AdvantageInput, LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.algo.estimate import RowAdvantages, RunEstimators
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.config.load import validate
from agentrl.core.types import FinishReason, MaskReason, Provenance, Rollout, Row, RowKey, StopReason, Turn
from agentrl.train.step_scores import StepScores
from tests.algo_config import make_algo

EPISODES = ((0,), (1, 0), (1, 1, 0), (1, 1, 1))
"""By turn, whether it went on."""
GO_REWARDS = (0.4, 0.7, 1.0)
STOP_REWARDS = (1.5, 0.2, 2.0)
POLICY = torch.tensor([0.3, -0.4, 0.6], dtype=torch.float64)
OLDER = torch.tensor([-0.5, 0.5, 0.1], dtype=torch.float64)
"""Of an engine that has other weights."""

Estimate = Callable[[RolloutGroups], RowAdvantages]


def turn_rewards(episode: Sequence[int]) -> list[float]:
    return [(GO_REWARDS if went_on else STOP_REWARDS)[turn] for turn, went_on in enumerate(episode)]


def logprobs(logits: torch.Tensor, episode: Sequence[int]) -> torch.Tensor:
    signs = torch.tensor([1.0 if went_on else -1.0 for went_on in episode], dtype=torch.float64)
    return torch.nn.functional.logsigmoid(signs * logits[: len(episode)])


def probability(logits: torch.Tensor, episode: Sequence[int]) -> float:
    return float(logprobs(logits, episode).sum().exp())


def exact() -> torch.Tensor:
    """Return the gradient of the expected reward."""
    logits = POLICY.clone().requires_grad_()
    expected = sum(logprobs(logits, episode).sum().exp() * sum(turn_rewards(episode)) for episode in EPISODES)
    expected.backward()
    return logits.grad


def rollout(name: str, episode: Sequence[int], prompt: str = "p", *, dropped: bool = False) -> Rollout:
    """Return an episode with one sampled token a turn, after a token that it read."""
    sampled = np.tile([False, True], len(episode))
    row = Row(
        key=RowKey(prompt, name),
        token_ids=np.ones(len(sampled), np.int32),
        provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=sampled.astype(np.uint8),
        mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.zeros(len(sampled), np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        requests=np.where(sampled, np.arange(len(sampled)) // 2, -1).astype(np.int32),
        request_ids=tuple(f"{name}/{turn}" for turn in range(len(episode))),
    )
    rewards = turn_rewards(episode)
    turns = [Turn("", "", FinishReason.STOP, reward) for reward in rewards]
    return Rollout(prompt, name, [row], sum(rewards), StopReason.TERMINATED, turns=turns, dropped=dropped)


def estimator(name: str, **options: object) -> Estimate:
    config = make_algo(advantage={"name": name, "options": options})
    return lambda groups: RunEstimators(config.by_source).advantages("", AdvantageInput(groups))


def naive_turn_level(groups: RolloutGroups) -> RowAdvantages:
    """The natural construction: centre each turn's reward among the rollouts that reached it, then sum from the turn on."""
    rewards = [[turn.reward for turn in first.turns] for first in groups.rollouts_N]
    values = {}
    for first, own_reward in zip(groups.rollouts_N, rewards, strict=True):
        centred = [
            reward - np.mean([other_reward[turn] for other_reward in rewards if len(other_reward) > turn])
            for turn, reward in enumerate(own_reward)
        ]
        values[first.rows[0].key] = np.repeat(np.cumsum(centred[::-1])[::-1], 2).astype(np.float32)
    return values


def only_where_others_are(groups: RolloutGroups) -> RowAdvantages:
    """Turn-level advantages that are 0 in turns that no other rollout reached."""
    advantages = estimator("turn_level")(groups)
    lengths = sorted(len(rollout.turns) for rollout in groups.rollouts_N)
    for rollout in groups.rollouts_N:
        if len(rollout.turns) == lengths[-1]:
            advantages[rollout.rows[0].key][2 * lengths[-2] :] = 0.0
    return advantages


def outcomes(size: int, logits: torch.Tensor = POLICY) -> Iterator[tuple[float, list[Rollout]]]:
    """Yield every group of ``size`` episodes with its probability."""
    for outcome in itertools.product(range(len(EPISODES)), repeat=size):
        chance = math.prod(probability(logits, EPISODES[index]) for index in outcome)
        yield chance, [rollout(f"r{number}", EPISODES[index]) for number, index in enumerate(outcome)]


def mean_gradient(estimate: Estimate, size: int = 3) -> torch.Tensor:
    total = torch.zeros(3, dtype=torch.float64)
    for chance, rollouts in outcomes(size):
        groups = group_rollouts(rollouts)
        total += chance * gradient(estimate(groups), groups)
    return total


def mean_gradient_of_the_rest(estimate: Estimate, size: int) -> torch.Tensor:
    """Return the mean over all outcomes and all losses that leave at least two rollouts; each is lost with one half."""
    total, weight = torch.zeros(3, dtype=torch.float64), 0.0
    for chance, rollouts in outcomes(size):
        for lost in itertools.product((False, True), repeat=size):
            if size - sum(lost) < 2:
                continue
            remaining_rollouts = [replace(rollout, dropped=gone) for rollout, gone in zip(rollouts, lost, strict=True)]
            groups = group_rollouts(remaining_rollouts)
            total += chance * gradient(estimate(groups), groups)
            weight += chance
    return total / weight


def gradient(advantages: RowAdvantages, groups: RolloutGroups) -> torch.Tensor:
    """Return the mean over rollouts of ``Σ A · ∇log π``."""
    logits = POLICY.clone().requires_grad_()
    value = torch.zeros((), dtype=torch.float64)
    for rollout in groups.rollouts_N:
        episode = EPISODES[_number(rollout)]
        weights = torch.from_numpy(advantages[rollout.rows[0].key][1::2].astype(np.float64))
        value = value + (weights * logprobs(logits, episode)).sum() / len(groups.rollouts_N)
    value.backward()
    return logits.grad


def bias(estimates: torch.Tensor, name: str) -> float:
    expected = exact()
    value = float((estimates - expected).norm() / expected.norm())
    print(
        f"bias of {name}: {value:.2g}  {[round(estimate, 4) for estimate in estimates.tolist()]}, exact {expected.tolist()}"
    )
    return value


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", ["turn_level", "rloo"])
def test_estimators_have_no_bias_where_the_policy_decides_when_to_stop(name, size):
    assert bias(mean_gradient(estimator(name), size), f"{name}, groups of {size}") < 1e-6


def test_grpo_without_std_has_the_gradient_but_for_its_length():
    actual_gradient = mean_gradient(estimator("grpo", std_normalise=False))
    assert bias(actual_gradient * 3 / 2, "grpo without std, times n / (n - 1)") < 1e-6


def test_the_comparison_sees_the_bonus_for_further_turns_of_centred_rewards():
    assert bias(mean_gradient(naive_turn_level), "centred rewards, summed from the turn on") > 0.2


def test_the_comparison_sees_turns_that_are_left_out_where_no_other_rollout_came():
    assert bias(mean_gradient(only_where_others_are), "0 in turns that no other rollout reached") > 0.05


@pytest.mark.parametrize("name", ["turn_level", "rloo"])
def test_groups_that_lost_rollouts_have_an_unbiased_baseline(name):
    assert bias(mean_gradient_of_the_rest(estimator(name), 3), f"{name}, rollouts lost") < 1e-6


def test_the_comparison_sees_a_baseline_of_the_rollouts_that_were_started():
    def started(groups: RolloutGroups) -> RowAdvantages:
        advantages = estimator("grpo", std_normalise=False)(groups)
        return {key: values * np.float32(3 / 2) for key, values in advantages.items()}

    assert bias(mean_gradient_of_the_rest(started, 3), "rloo by the number of started rollouts") > 0.1


def test_maxrl_climbs_the_logarithm_of_the_success_rate_by_one_term_less_than_the_group_has():
    """``log p = -Σ (1 - p)^k / k``, whose first terms have the gradient ``Σ_{k < n} (1 - p)^(k - 1) ∇p``. The last term of
    n is in groups without success, which have no advantage.
    """
    success = {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}
    logits = POLICY.clone().requires_grad_()
    p = sum(value * logprobs(logits, EPISODES[index]).sum().exp() for index, value in success.items())
    p.backward()
    for size in (2, 3):
        total = torch.zeros(3, dtype=torch.float64)
        for chance, rollouts in outcomes(size):
            scored = [replace(rollout, reward=success[_number(rollout)]) for rollout in rollouts]
            groups = group_rollouts(scored)
            total += chance * gradient(estimator("maxrl", eps=1e-12)(groups), groups)
        expected = logits.grad * sum((1 - p.item()) ** (k - 1) for k in range(1, size))
        assert torch.allclose(total, expected, rtol=1e-6, atol=1e-8)


STALE = {
    "no correction": ({"rollout_is": "none"}, "reinforce"),
    "tokens": ({"rollout_is": "token", "rollout_is_threshold": 1e6}, "reinforce"),
    "tokens, by the ratio of cispo": ({"rollout_is": "none"}, "cispo"),
    "tokens, by the ratio of ppo": ({"rollout_is": "none"}, "ppo_clip"),
    "sequences": ({"rollout_is": "sequence", "rollout_is_threshold": 1e6}, "reinforce"),
    "sequences, truncated at 2": ({"rollout_is": "sequence"}, "reinforce"),
}
WIDE = {"cispo": {"clip_high": 1e6}, "ppo_clip": {"clip_low": 0.999999, "clip_high": 1e6}, "reinforce": {}}


def stale_gradient(correction: dict[str, object], loss: str) -> torch.Tensor:
    """Return the mean gradient of the objective on groups of two that an engine with `OLDER` weights sampled."""
    old = "learner" if loss == "reinforce" else "sampler"
    algo = {"advantage": {"name": "rloo"}, "loss": {"name": loss, "options": WIDE[loss]}, "old_logprobs": old}
    config = validate({"algo": algo | {"correction": correction}})
    objective, total = make_objective(config.algo), torch.zeros(3, dtype=torch.float64)
    for chance, rollouts in outcomes(2, OLDER):
        sampled = [_with_logprobs(rollout, OLDER) for rollout in rollouts]
        groups = group_rollouts(sampled)
        advantages = RunEstimators(config.algo.by_source).advantages("", AdvantageInput(groups))
        learner = {
            row.key: _with_logprobs(rollout, POLICY).rows[0].logprobs for rollout in sampled for row in rollout.rows
        }
        weights = StepScores(learner).correction(config.algo.correction, groups)
        logits = POLICY.clone().requires_grad_()
        for rollout in sampled:
            key, at = rollout.rows[0].key, rollout.rows[0].mask.astype(bool)
            loss_input = LossInput(
                weight_N=torch.full((len(rollout.turns),), 1 / len(sampled), dtype=torch.float64),
                advantages_N=torch.from_numpy(advantages[key][at]).double(),
                logprobs_N=logprobs(OLDER, EPISODES[_number(rollout)]),
                learner_logprobs_N=logprobs(POLICY, EPISODES[_number(rollout)]),
                correction_N=None if weights is None else torch.from_numpy(weights[key][at]).double(),
            )
            value, _ = objective(logprobs(logits, EPISODES[_number(rollout)]), loss_input)
            (-chance * value).backward()
        total += logits.grad
    return total


def _number(rollout: Rollout) -> int:
    return [turn_rewards(episode) for episode in EPISODES].index([turn.reward for turn in rollout.turns])


def _with_logprobs(rollout: Rollout, logits: torch.Tensor) -> Rollout:
    values = np.zeros(len(rollout.rows[0].mask), np.float32)
    values[rollout.rows[0].mask.astype(bool)] = logprobs(logits, EPISODES[_number(rollout)]).numpy()
    return replace(rollout, rows=[replace(rollout.rows[0], logprobs=values)])


def test_stale_rollouts_are_unbiased_with_weights_of_sequences_alone():
    """Weights of tokens correct neither the probability of what came before a token nor of what followed: here, with weights
    that are far apart, they are no better than none.
    """
    far = {name: bias(stale_gradient(*case), f"stale rollouts, {name}") for name, case in STALE.items()}
    assert far["sequences"] < 1e-6
    assert far["no correction"] > 0.3
    assert far["tokens"] > 0.3
    assert far["tokens, by the ratio of cispo"] == pytest.approx(far["tokens"], rel=1e-5)
    assert far["tokens, by the ratio of ppo"] == pytest.approx(far["tokens"], rel=1e-5)
    assert 0.01 < far["sequences, truncated at 2"] < far["no correction"] / 2
