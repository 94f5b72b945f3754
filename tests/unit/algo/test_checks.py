"""Configurations against what estimators and losses declare: names, options, critic, streaming, penalties."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from agentrl.algo.registry import algorithm_faults, compares_groups, make_estimator, needs_critic
from agentrl.config.load import load_config

OWN = """
from agentrl.algo.base import AdvantageEstimator, PolicyLoss

class Half(AdvantageEstimator):
    streams = True
    needs_critic = False

    class Options(AdvantageEstimator.Options):
        factor: float = 0.5

    def advantages(self, inputs):
        return {rollout.rollout_id: self.options.factor for rollout in inputs.groups.rollouts_N}

class Valued(Half):
    needs_critic = True

class Unfinished(AdvantageEstimator):
    pass

def function(inputs):
    return {}
"""
STREAMING = "async.streaming=true"
SERVED = "algo.distillation.teachers.a.url=http://a"


@pytest.fixture
def own(tmp_path: Path) -> str:
    """Return the file of a user's estimators."""
    file = tmp_path / "own.py"
    file.write_text(OWN)
    return str(file)


def faults(*settings: str) -> list[str]:
    """Return the lines of what is refused."""
    return algorithm_faults(load_config(None, settings))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["algo.advantage.name=gpro"], "unknown advantage 'gpro' (algo.advantage.name). Did you mean 'grpo'"),
        (["algo.loss.name=gpso"], "unknown loss 'gpso' (algo.loss.name). Did you mean 'gspo'"),
        (
            ["algo.loss.options.clip_hihg=1"],
            "unknown key 'algo.loss.options.clip_hihg'. Did you mean 'algo.loss.options.clip_high'",
        ),
        (["algo.loss.options.clip_low=2"], "algo.loss.options.clip_low=2: "),
        (["algo.advantage={name: rloo, options: {x: 1}}"], "unknown key 'algo.advantage.options.x'. Known: none"),
        (["sources.a.algo.loss.name=gpso"], "sources.a: unknown loss 'gpso' (algo.loss.name). Did you mean 'gspo'"),
        (["sources.a.algo.loss.options.x=1"], "sources.a: unknown key 'algo.loss.options.x'"),
        (
            ["sources.a.algo={advantage: {name: maxrl}, overlong: {max_tokens: 600}}"],
            "sources.a: algo.advantage.name=maxrl with algo.overlong.max_tokens",
        ),
        (
            ["algo={advantage: {name: maxrl}, kl_coef: 1, kl_in: reward}"],
            "algo.advantage.name=maxrl with algo.kl_in=reward",
        ),
        (
            ["algo.critic.warmup_steps=1"],
            "algo.critic.warmup_steps is set, and algo.advantage.name=grpo has no critic; set algo.advantage.name=gae, or "
            "algo.critic.warmup_steps=0",
        ),
        (
            ["algo.advantage.name=gae", "algo.critic.warmup_steps=9", "train.steps=9"],
            "algo.critic.warmup_steps=9 with train.steps=9",
        ),
        (
            [SERVED, "algo.distillation.reward_coef=0", "algo.advantage.name=gae"],
            "reward_coef=0 with algo.advantage.name=gae",
        ),
        (
            ["async={max_staleness: 2, mask_older_than: 1}", "algo.advantage.name=gae"],
            "async.mask_older_than=1 with algo.advantage.name=gae",
        ),
        (
            [STREAMING, "algo.advantage.name=reinforce_plus_plus"],
            "async.streaming=true with algo.advantage.name=reinforce_plus_plus:",
        ),
        ([STREAMING, "algo.advantage.name=gae"], "async.streaming=true with algo.advantage.name=gae:"),
        (
            [STREAMING, "sources={a: {algo: {advantage: {name: gae}}}, b: {algo: {advantage: {name: agent_norm}}}}"],
            "async.streaming=true with algo.advantage.name=agent_norm, gae:",
        ),
    ],
)
def test_what_does_not_fit_is_refused(settings: list[str], message: str) -> None:
    [fault] = faults(*settings)
    assert message in fault


@pytest.mark.parametrize("settings", [[STREAMING], [STREAMING, "algo.advantage.name=rae"], ["algo.advantage.name=gae"]])
def test_what_fits_passes(settings: list[str]) -> None:
    assert faults(*settings) == []


def test_a_fault_of_the_run_is_not_said_of_every_source() -> None:
    assert len(faults("sources.a={}", "sources.b={}", "algo.loss.name=gpso")) == 1


def test_a_users_estimator_is_checked_like_a_built_in_one(own: str) -> None:
    key = f"algo.advantage.name={own}"
    assert faults(f"{key}:Half", STREAMING, "algo.advantage.options.factor=2") == []
    config = load_config(None, [f"{key}:Half", "algo.advantage.options.factor=2"])
    assert make_estimator(config.algo.advantage).options.model_dump() == {"factor": 2.0}
    assert not compares_groups(config.algo)
    assert needs_critic(load_config(None, [f"{key}:Valued"]).algo)
    assert faults(f"{key}:Valued", "algo.critic.warmup_steps=1") == []
    assert faults(f"{key}:Valued", STREAMING) == [
        f"async.streaming=true with {key}:Valued: it needs all groups of a step; leave it out, or async.streaming"
    ]
    assert faults(f"{key}:Half", "algo.advantage.options.fcator=2") == [
        "unknown key 'algo.advantage.options.fcator'. Did you mean 'algo.advantage.options.factor'?"
    ]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("function", "is <function function at .*, and no class derived from agentrl.algo.base.AdvantageEstimator"),
        ("Unfinished", "does not define advantages"),
        ("Hafl", "has no 'Hafl'. Did you mean 'Half'"),
    ],
)
def test_what_is_no_estimator_is_refused(own: str, name: str, message: str) -> None:
    [fault] = faults(f"algo.advantage.name={own}:{name}")
    assert re.search(message, fault), fault


def test_an_estimator_is_no_loss(own: str) -> None:
    [fault] = faults(f"algo.loss.name={own}:Half")
    assert fault.endswith("and no class derived from agentrl.algo.base.PolicyLoss")
