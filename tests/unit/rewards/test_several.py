"""Several rewards: their weighted sum, their metrics, and what is normalised apart."""

import asyncio
from pathlib import Path

import numpy as np
import pytest

from agentrl.algo.advantages.gdpo import Gdpo
from agentrl.algo.advantages.grpo import Grpo
from agentrl.algo.base import AdvantageInput
from agentrl.batch.groups import group_rollouts
from agentrl.config.load import load_config
from agentrl.config.rewards import RewardConfig
from agentrl.core.errors import ConfigError, RunStopped
from agentrl.core.types import RewardTerm
from agentrl.evaluation.metrics import compute_metrics
from agentrl.obs.records import decode_record, encode_record
from agentrl.rewards.grader import RewardGrader, check_reward
from agentrl.train.step_metrics import rollout_metrics

BODY = """
def short(sample): return {"score": 1 / (1 + len(sample.final)), "length": len(sample.final)}
def rank(samples): return [float(index) for index, _ in enumerate(samples)]
def fails(sample): return 1 / (len(sample.final) - 2)
"""


@pytest.fixture
def functions(tmp_path: Path):
    (tmp_path / "several.py").write_text(BODY)

    def make(**functions) -> RewardGrader:
        named = {name: {**options, "function": options["function"].replace("FILE", str(tmp_path / "several.py"))}
                 for name, options in functions.items()}  # fmt: skip
        return RewardGrader(RewardConfig.model_validate({"functions": named}))

    return make


def grade(grader, *rollouts):
    asyncio.run(grader.grade(list(rollouts)))
    return [rollout.reward for rollout in rollouts]


def test_the_reward_is_the_weighted_sum(functions, rollout):
    samples = [rollout("4"), rollout("5", name="1")]
    grader = functions(
        right={"function": "exact_match"},
        short={"function": "FILE:short", "weight": -0.5},
        env={"function": "environment", "weight": 2},
        rank={"function": "FILE:rank", "weight": 10},
    )
    assert grader.group
    assert grade(grader, *samples) == [1 - 0.25 + 0.5, -0.25 + 0.5 + 10]
    assert samples[0].rewards == {
        "right": RewardTerm(1.0, 1.0), "short": RewardTerm(0.5, -0.5), "env": RewardTerm(0.25, 2.0),
        "rank": RewardTerm(0.0, 10.0),
    }  # fmt: skip
    assert samples[0].metrics == {"turns": 1.0, "short/length": 1.0}
    assert decode_record(encode_record(samples[0])).rewards == samples[0].rewards


def test_their_metrics(functions, rollout):
    samples = [rollout("44"), rollout("4", name="1"), rollout("444", name="2")]
    grade(functions(right={"function": "exact_match"}, odd={"function": "FILE:fails", "on_error": "drop"}), *samples)
    assert [sample.dropped for sample in samples] == [True, False, False]
    assert samples[0].rewards["odd"].value is None
    assert samples[0].failure is not None
    assert samples[0].failure.message.startswith("odd: ZeroDivisionError")
    metrics = rollout_metrics(samples, group_rollouts(samples), None)
    assert {key: value for key, value in metrics.items() if key.startswith("reward/")} == pytest.approx({
        "reward/right/mean": 1 / 3, "reward/right/std": np.sqrt(2) / 3, "reward/right/failed": 0.0,
        "reward/odd/mean": 0.0, "reward/odd/std": 1.0, "reward/odd/failed": 1 / 3,
    })  # fmt: skip
    means = compute_metrics(samples).means
    assert (means["reward/right"].value, means["reward/odd"].value) == (0.5, 0.0)


def test_a_function_that_stops_the_run_says_which(functions, rollout):
    with pytest.raises(RunStopped, match=r"several\.py:fails failed: ZeroDivisionError"):
        grade(functions(right={"function": "exact_match"}, odd={"function": "FILE:fails"}), rollout("44"))


def rewarded(rollout, *terms: tuple[float, float], weights=(1.0, 1.0), prompt="p"):
    samples = []
    for number, values in enumerate(terms):
        sample = rollout("x", name=f"{prompt}-{number}")
        sample.prompt_id = prompt
        sample.rewards = {
            name: RewardTerm(value, weight) for name, value, weight in zip("ab", values, weights, strict=True)
        }
        sample.reward = sum(term.weighted for term in sample.rewards.values())
        samples.append(sample)
    return samples


def estimate(estimator, samples):
    return [*estimator.advantages(AdvantageInput(group_rollouts(samples))).values()]


def test_rewards_are_normalised_apart(rollout):
    """The sums 1 + 0 and 0 + 1 are equal, and as scarce as the rewards are, they are worth different advantages."""
    samples = rewarded(rollout, (1, 0), (1, 0), (1, 0), (0, 1))
    assert estimate(Grpo(), samples) == [0.0] * 4
    apart = estimate(Gdpo(Gdpo.Options(batch_norm=False)), samples)
    a = (np.array([1, 1, 1, 0]) - 0.75) / (0.5 + 1e-6)
    b = (np.array([0, 0, 0, 1]) - 0.25) / (0.5 + 1e-6)
    assert apart == pytest.approx(a + b)
    weighted = estimate(
        Gdpo(Gdpo.Options(batch_norm=False)), rewarded(rollout, (1, 0), (1, 0), (1, 0), (0, 1), weights=(1, 3))
    )
    assert weighted == pytest.approx(a + 3 * b)


def test_the_scale_of_a_reward_does_not_matter(rollout):
    small = rewarded(rollout, (1, 0.001), (0, 0.002), (1, 0.003))
    large = rewarded(rollout, (1, 1), (0, 2), (1, 3))
    options = Gdpo.Options(std_eps=1e-12)
    assert estimate(Gdpo(options), small) == pytest.approx(estimate(Gdpo(options), large))


def test_sums_are_normalised_over_the_step(rollout):
    samples = rewarded(rollout, (1, 0), (0, 0)) + rewarded(rollout, (1, 5), (0, 1), prompt="q")
    values = estimate(Gdpo(), samples)
    assert np.std(values, ddof=1) == pytest.approx(1, abs=1e-5)
    assert sum(values) == pytest.approx(0)
    assert estimate(Gdpo(), rewarded(rollout, (1, 2), (1, 2))) == [0.0, 0.0]


def test_penalties_on_the_sum_are_a_reward_more(rollout):
    samples = rewarded(rollout, (1, 0), (1, 0))
    samples[0].reward -= 0.5
    assert estimate(Gdpo(), samples)[0] < 0 < estimate(Gdpo(), samples)[1]


def test_without_several_rewards_it_is_grpo(rollout):
    samples = [rollout("x", name=str(number)) for number in range(3)]
    for number, sample in enumerate(samples):
        sample.reward = float(number**2)
    assert estimate(Gdpo(Gdpo.Options(batch_norm=False)), samples) == estimate(Grpo(), samples)


def test_checks_before_a_run(tmp_path):
    several = ["env.name=single_turn", "reward.functions={env: {function: environment}, x: {function: exact_match}}"]
    check_reward(load_config(None, several), needs_reward=True)
    only_env = ["env.name=single_turn", "reward.functions={env: {function: environment}}"]
    with pytest.raises(ConfigError, match="sets no reward"):
        check_reward(load_config(None, only_env), needs_reward=True)
    with pytest.raises(ConfigError, match=r"reward\.function=exact_match compares .*data\.label_key"):
        check_reward(load_config(None, [*several, "data.path=x.jsonl"]), needs_reward=True)
    judge = [
        "reward=judge",
        "reward.judge={mode: reference, endpoint: {url: 'http://x', model: m}}",
        "data.path=x.jsonl",
    ]
    with pytest.raises(ConfigError, match=r"reward\.function=judge compares"):
        check_reward(load_config(None, judge), needs_reward=True)


def test_a_source_replaces_the_rewards_of_the_run():
    run = ["env.name=single_turn", "reward.functions={a: {function: f1}}"]
    sources = "sources={x: {reward: {function: math}}, y: {reward: {functions: {b: {function: f1}}}}, z: {}}"
    config = load_config(None, [*run, sources])
    names = {name: list(source.reward.by_name) for name, source in config.by_source().items()}
    assert names == {"x": ["math"], "y": ["b"], "z": ["a"]}
