"""Every estimator against its formula, written from the paper with plain sums in float64, one token at a time.

Compared are the advantages at the places of sampled tokens, after `RunEstimators`, which has them in float32.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from time import process_time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from agentrl.algo.advantages.gae import Gae
from agentrl.algo.advantages.rae import RoleBaseline
from agentrl.algo.base import AdvantageInput
from agentrl.algo.estimate import RunEstimators
from agentrl.algo.reward_processing import overlong_penalty
from agentrl.config.algo import AlgoConfig, OverlongConfig
from agentrl.core.errors import ConfigError
from agentrl.core.types import RowKey
from tests.algo_config import make_algo
from tests.unit.algo.ragged import Ragged, SampledTokens, make_ragged

Values = Mapping[RowKey, NDArray[np.float32]]
Rewards = dict[str, float]
"""Of each rollout, with all that is taken off."""


def rewards_of(data: Ragged, kl: Values) -> Rewards:
    rewards = {rollout.rollout_id: rollout.reward for rollout in data.sequences}
    for rollout in data.sequences if kl else ():
        rewards[rollout.rollout_id] -= math.fsum(rollout.of(kl))
    return rewards


def group_of(data: Ragged, rewards: Rewards, sequence: SampledTokens) -> list[float]:
    names = {rollout.rollout_id for rollout in data.sequences if rollout.group == sequence.group}
    return [rewards[name] for name in sorted(names)]


def others_of(data: Ragged, rewards: Rewards, sequence: SampledTokens) -> list[float]:
    names = {rollout.rollout_id for rollout in data.sequences if rollout.group == sequence.group} - {
        sequence.rollout_id
    }
    return [rewards[name] for name in sorted(names)]


def each_rollout(value: Callable[[float, list[float], list[float]], float]) -> Callable[[Ragged, Values, Values], list]:
    """Return a reference of one number a rollout, from its reward, its group's, and those of the group's others."""

    def reference(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
        rewards = rewards_of(data, kl)
        return [
            np.full(
                len(sequence.places),
                value(
                    rewards[sequence.rollout_id], group_of(data, rewards, sequence), others_of(data, rewards, sequence)
                ),
            )
            for sequence in data.sequences
        ]

    return reference


def grpo(reward: float, group: list[float], peers: list[float]) -> float:
    return (reward - statistics.fmean(group)) / (statistics.stdev(group) + 1e-6) if peers else 0.0


def centred(reward: float, group: list[float], peers: list[float]) -> float:
    return reward - statistics.fmean(group)


def rloo(reward: float, group: list[float], peers: list[float]) -> float:
    return reward - statistics.fmean(peers) if peers else 0.0


def maxrl(reward: float, group: list[float], peers: list[float]) -> float:
    mean = statistics.fmean(group)
    return (reward - mean) / (mean + 1e-6)


def whitened(parts: list[list[float]]) -> list[np.ndarray]:
    every = [value for values in parts for value in values]
    mean, variance = statistics.fmean(every), statistics.variance(every)
    return [np.array([(value - mean) / math.sqrt(variance + 1e-8) for value in values]) for values in parts]


def token_rewards(sampled_tokens: SampledTokens, kl: Values) -> list[float]:
    rewards = [-value for value in sampled_tokens.of(kl)] if kl else [0.0] * len(sampled_tokens.places)
    rewards[-1] += sampled_tokens.reward
    return rewards


def reinforce_plus_plus(gamma: float) -> Callable[[Ragged, Values, Values], list[np.ndarray]]:
    def reference(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
        parts = []
        for sequence in data.sequences:
            rewards = token_rewards(sequence, kl)
            parts.append(
                [sum(gamma ** (j - t) * rewards[j] for j in range(t, len(rewards))) for t in range(len(rewards))]
            )
        return whitened(parts)

    return reference


def baseline(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
    rewards = rewards_of(data, kl)
    parts = []
    for sequence in data.sequences:
        group = group_of(data, rewards, sequence)
        value = rewards[sequence.rollout_id] - (statistics.fmean(group) if len(group) > 1 else 0.0)
        parts.append([value] * len(sequence.places))
    return whitened(parts)


def gae(gamma: float, lam: float, step: str, normalise: bool) -> Callable[[Ragged, Values, Values], list[np.ndarray]]:
    def reference(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
        parts = []
        for sequence in data.sequences:
            steps = list(range(len(sequence.places))) if step == "token" else list(sequence.turns)
            count = max(steps) + 1
            rewards, value = [0.0] * count, [0.0] * (count + 1)
            for at, reward in zip(steps, token_rewards(sequence, kl), strict=True):
                rewards[at] += reward
            for at, token in reversed(list(zip(steps, sequence.of(values), strict=True))):
                value[at] = token  # the step's first token is the last to be written
            error = [rewards[k] + gamma * value[k + 1] - value[k] for k in range(count)]
            of_step = [sum((gamma * lam) ** (j - k) * error[j] for j in range(k, count)) for k in range(count)]
            parts.append([of_step[at] for at in steps])
        return whitened(parts) if normalise else [np.array(part) for part in parts]

    return reference


def turn_level(gamma: float) -> Callable[[Ragged, Values, Values], list[np.ndarray]]:
    def returns(sampled_tokens: SampledTokens, kl: Values) -> list[float]:
        rewards = list(sampled_tokens.turn_rewards)
        for turn, value in zip(sampled_tokens.turns, sampled_tokens.of(kl) if kl else (), strict=bool(kl)):
            rewards[turn] -= value
        return [sum(gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in range(len(rewards))]

    def reference(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
        parts = []
        for sequence in data.sequences:
            peers = [
                returns(peer, kl) for peer in data.sequences if peer.group == sequence.group and peer is not sequence
            ]
            advantages = []
            for turn, value in enumerate(returns(sequence, kl)):
                reached = [at for at in range(turn + 1) if any(len(peer) > at for peer in peers)]
                compared = [peer[reached[-1]] for peer in peers if len(peer) > reached[-1]] if reached else [value]
                advantages.append(value - statistics.fmean(compared))
            parts.append(np.array([advantages[turn] for turn in sequence.turns]))
        return parts

    return reference


def alike(data: Ragged, sampled_tokens: SampledTokens, *names: str) -> list[SampledTokens]:
    """Those of the same task that are equal in some fields."""
    expected = [getattr(sampled_tokens, name) for name in ("group", *names)]
    return [
        sequence for sequence in data.sequences if [getattr(sequence, name) for name in ("group", *names)] == expected
    ]


def rae(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
    rewards = rewards_of(data, kl)
    baselines = {
        f"{role}/{opponents}": sequence.total / sequence.weight for (role, opponents), sequence in BASELINES.items()
    }
    return [
        np.full(
            len(sequence.places),
            rewards[sequence.rollout_id] - baselines.get(f"{sequence.role}/{sequence.opponent}", 0.0),
        )
        for sequence in data.sequences
    ]


def seat_grpo(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
    rewards = rewards_of(data, kl)

    def centred(sequence: SampledTokens) -> float:
        return rewards[sequence.rollout_id] - statistics.fmean(
            rewards[rollout.rollout_id] for rollout in alike(data, sequence, "seat")
        )

    advantages = []
    for sequence in data.sequences:
        task = alike(data, sequence)
        free = len(task) - len({each.seat for each in task})
        spread = math.sqrt(math.fsum(centred(each) ** 2 for each in task) / free) if free else 0.0
        advantages.append(np.full(len(sequence.places), centred(sequence) / (spread + 1e-6)))
    return advantages


def hierarchical(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
    rewards, found = rewards_of(data, kl), []
    for sequence in data.sequences:
        names = ("role", "episode") if sequence.role == "solver" else ("role",)
        group = [rewards[rollout.rollout_id] for rollout in alike(data, sequence, *names)]
        found.append(np.full(len(sequence.places), grpo(rewards[sequence.rollout_id], group, group[1:])))
    return found


def by_turns(gamma: float, compared: Callable[[Ragged, SampledTokens, int], list[tuple[SampledTokens, int]]]):
    """Return a reference that normalises the return of each turn over the turns it is compared with."""

    def reference(data: Ragged, kl: Values, values: Values) -> list[np.ndarray]:
        def value(sequence: SampledTokens, turn: int) -> float:
            rewards = list(sequence.turn_rewards)
            for at, penalty in zip(sequence.turns, sequence.of(kl) if kl else (), strict=bool(kl)):
                rewards[at] -= penalty
            return math.fsum(gamma ** (j - turn) * rewards[j] for j in range(turn, len(rewards)))

        found = []
        for sequence in data.sequences:
            advantages = []
            for turn in range(len(sequence.turn_rewards)):
                other_values = [value(*compared_turn) for compared_turn in compared(data, sequence, turn)]
                advantages.append(grpo(value(sequence, turn), other_values, other_values[1:]))
            found.append(np.array([advantages[turn] for turn in sequence.turns]))
        return found

    return reference


def same_turn(data: Ragged, sampled_tokens: SampledTokens, turn: int) -> list[tuple[SampledTokens, int]]:
    return [
        (sequence, turn) for sequence in alike(data, sampled_tokens, "agent_id") if len(sequence.turn_rewards) > turn
    ]


def turns_of_role(data: Ragged, sampled_tokens: SampledTokens, turn: int) -> list[tuple[SampledTokens, int]]:
    return [
        (sequence, at)
        for sequence in data.sequences
        if (sequence.role, sequence.agent_id) == (sampled_tokens.role, sampled_tokens.agent_id)
        for at in range(len(sequence.turn_rewards))
    ]


BASELINES = {
    ("first", "mirror"): RoleBaseline(0.3, 0.5),
    ("solver", "past"): RoleBaseline(-0.4, 0.99),
    ("solver", "fixed:random"): RoleBaseline(0.25, 1.0),
}
SELF_PLAY = ("rae", "seat_grpo", "hierarchical_grpo", "at_grpo", "agent_norm")
SIZES = {"hierarchical_grpo": (9, 1, 7), "seat_grpo": (9, 1, 2, 5)}
"""Groups of which parts are compared are larger."""
REFERENCES: dict[str, tuple[str, dict[str, object], Callable[[Ragged, Values, Values], list[np.ndarray]]]] = {
    "grpo": ("grpo", {}, each_rollout(grpo)),
    "grpo without std": ("grpo", {"std_normalise": False}, each_rollout(centred)),
    "rloo": ("rloo", {}, each_rollout(rloo)),
    "maxrl": ("maxrl", {}, each_rollout(maxrl)),
    "reinforce++": ("reinforce_plus_plus", {"gamma": 0.9}, reinforce_plus_plus(0.9)),
    "reinforce++ undiscounted": ("reinforce_plus_plus", {}, reinforce_plus_plus(1.0)),
    "reinforce++ baseline": ("reinforce_plus_plus_baseline", {}, baseline),
    "gae": ("gae", {"gamma": 0.95, "lam": 0.8, "normalise": False}, gae(0.95, 0.8, "token", False)),
    "gae normalised": ("gae", {"lam": 0.5}, gae(1.0, 0.5, "token", True)),
    "gae of turns": ("gae", {"gamma": 0.9, "lam": 0.7, "step": "turn"}, gae(0.9, 0.7, "turn", True)),
    "turn level": ("turn_level", {"gamma": 0.9}, turn_level(0.9)),
    "rae": ("rae", {}, rae),
    "seat grpo": ("seat_grpo", {}, seat_grpo),
    "hierarchical grpo": ("hierarchical_grpo", {}, hierarchical),
    "at grpo": ("at_grpo", {"gamma": 0.9}, by_turns(0.9, same_turn)),
    "agent norm": ("agent_norm", {"gamma": 0.9}, by_turns(0.9, turns_of_role)),
}


def advantage_config(name: str, options: dict[str, object]) -> AlgoConfig:
    return make_algo(advantage={"name": name, "options": options})


@pytest.mark.parametrize("with_kl", [False, True], ids=["", "kl in the reward"])
@pytest.mark.parametrize("case", REFERENCES)
def test_advantages_are_the_papers(case, with_kl):
    name, options, reference = REFERENCES[case]
    # Rewards of maxrl must stay above 0, whatever the KL is.
    rewards, agents = (
        (5.0, 6.0, 6.0, 9.0) if name == "maxrl" else (-1.0, 0.0, 0.5, 2.0),
        1 if name == "turn_level" else 3,
    )
    for seed in range(2):
        rng = np.random.default_rng([seed, 1])
        data = make_ragged(
            seed, agents=agents, rewards=rewards, players=name in SELF_PLAY, sizes=SIZES.get(name, (4, 1, 2, 3))
        )
        baselines = {"/".join(key): sequence for key, sequence in BASELINES.items()}
        kl = data.random_values(rng, 0.01) if with_kl else {}
        values = data.random_values(rng)
        estimators = RunEstimators(advantage_config(name, options).by_source)
        estimators.load_state({"": {"name": "rae", "state": baselines}})
        actual = estimators.advantages("", AdvantageInput(data.groups, kl, values))
        expected = reference(data, kl, values)
        assert sum(np.count_nonzero(value) for value in expected) > 20
        for sequence, value in zip(data.sequences, expected, strict=True):
            assert sequence.of(actual) == pytest.approx(value, rel=1e-6, abs=1e-6), sequence.rollout_id
        trained = {(key, position) for sequence in data.sequences for key, position in sequence.places}
        for row in data.rows:
            assert not any(value and (row.key, at) not in trained for at, value in enumerate(actual[row.key]))


@pytest.mark.parametrize("step", ["token", "turn"])
def test_returns_for_the_critic_are_advantages_before_normalisation_plus_values(step):
    options = Gae.Options(gamma=0.95, lam=0.8, step=step)
    data = make_ragged(7)
    values = data.random_values(np.random.default_rng(0))
    actual = Gae(options).returns(AdvantageInput(data.groups, values=values))
    expected = gae(0.95, 0.8, step, False)(data, {}, values)
    for sequence, advantages in zip(data.sequences, expected, strict=True):
        own_values = sequence.of(values)
        if step == "turn":
            own_values = np.array([own_values[sequence.turns.index(turn)] for turn in sequence.turns])
        assert sequence.of(actual) == pytest.approx(advantages + own_values, rel=1e-6, abs=1e-6)


def test_gspo_gives_a_sequence_the_mean_advantage_of_its_tokens():
    data = make_ragged(3)
    values = data.random_values(np.random.default_rng(0))
    options = {"name": "gae", "options": {"lam": 0.5}}
    algo = make_algo(advantage=options, loss={"name": "gspo"})
    actual = RunEstimators(algo.by_source).advantages("", AdvantageInput(data.groups, values=values))
    expected = gae(1.0, 0.5, "token", True)(data, {}, values)
    for sequence, advantages in zip(data.sequences, expected, strict=True):
        assert sequence.of(actual) == pytest.approx(np.full(len(advantages), advantages.mean()), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("name", ["grpo", "rloo", "maxrl", "turn_level", "seat_grpo", "hierarchical_grpo"])
@pytest.mark.parametrize("reward", [0.0, 0.1, 1 / 3])
def test_equal_rewards_are_exactly_no_advantage(name, reward):
    data = make_ragged(1, sizes=(3, 7, 6), agents=1, rewards=(reward,), players=name in SELF_PLAY)
    same = [
        rollout for rollout in data.groups.rollouts_N if len(rollout.turns) == 1 or name != "turn_level"
    ]  # with several turns, returns differ
    assert same
    advantages = RunEstimators(advantage_config(name, {}).by_source).advantages("", AdvantageInput(data.groups))
    if name == "turn_level":
        assert all(np.isfinite(values).all() for values in advantages.values())
    else:
        assert not any(values.any() for values in advantages.values())


@given(st.integers(0, 10**6), st.sampled_from(["grpo", "rloo", "turn_level"]), st.integers(-5, 5))
def test_a_constant_added_to_every_reward_of_a_group_changes_nothing(seed, name, shift):
    data = make_ragged(seed, sizes=(2, 3), agents=1)
    moved = make_ragged(seed, sizes=(2, 3), agents=1, rewards=tuple(reward + shift for reward in (-1.0, 0.0, 0.5, 2.0)))
    if name == "turn_level":  # the last turn has the difference, so that a return from any turn has it
        assert [one.turn_rewards[:-1] for one in data.sequences] == [one.turn_rewards[:-1] for one in moved.sequences]
    config = advantage_config(name, {})
    state_before, state_after = (
        RunEstimators(config.by_source).advantages("", AdvantageInput(one.groups)) for one in (data, moved)
    )
    for key, values in state_before.items():
        assert state_after[key] == pytest.approx(values, abs=1e-4)


@given(st.integers(1, 3000), st.integers(1, 1000), st.integers(0, 2000), st.floats(0.1, 5))
def test_the_overlong_penalty_is_equation_13(tokens, buffer, more, penalty):
    limit = buffer + more
    config = OverlongConfig(max_tokens=limit, buffer_tokens=buffer, penalty=penalty)
    if tokens <= limit - buffer:
        expected = 0.0
    elif tokens <= limit:
        expected = penalty * (tokens - (limit - buffer)) / buffer
    else:
        expected = penalty
    assert overlong_penalty(tokens, config) == pytest.approx(expected, rel=1e-9)


def test_penalties_are_taken_off_before_advantages():
    data = make_ragged(5, agents=2)
    config = make_algo(advantage={"name": "rloo"}, overlong={"max_tokens": 12, "buffer_tokens": 8, "penalty": 0.7})
    estimators = RunEstimators(config.by_source)
    actual = estimators.advantages("", AdvantageInput(estimators.shape_rewards("", data.groups)))
    rewards = {sequence.rollout_id: sequence.reward for sequence in data.sequences}
    sizes = {
        name: sum(len(sequence.places) for sequence in data.sequences if sequence.rollout_id == name)
        for name in rewards
    }
    penalties = {name: min(max(size - 4, 0) / 8, 1) * 0.7 for name, size in sizes.items()}
    assert len(set(penalties.values())) > 3
    lower = {name: reward - penalties[name] for name, reward in rewards.items()}
    for sequence in data.sequences:
        expected = rloo(lower[sequence.rollout_id], [], others_of(data, lower, sequence))
        assert sequence.of(actual) == pytest.approx(np.full(len(sequence.places), expected), rel=1e-6, abs=1e-6)
    assert all(rollout.reward == rewards[rollout.rollout_id] for rollout in data.groups.rollouts_N)


def test_maxrl_refuses_negative_rewards():
    with pytest.raises(ConfigError, match=r"algo\.advantage\.name=maxrl"):
        RunEstimators(advantage_config("maxrl", {}).by_source).advantages("", AdvantageInput(make_ragged(0).groups))


def test_twice_the_rollouts_of_a_group_take_about_twice_the_time():
    def seconds(size: int) -> float:
        groups = make_ragged(0, sizes=(size,), agents=1, dropped=0).groups
        estimators = RunEstimators(advantage_config("turn_level", {}).by_source)
        start = process_time()
        estimators.advantages("", AdvantageInput(groups))
        return process_time() - start

    assert seconds(800) < 24 * seconds(100), "8 times the rollouts"
