"""Rules of ``algo.distillation``."""

from __future__ import annotations

import pytest

from agentrl.algo.registry import describe_algorithm
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError

KEY = "algo.distillation"
SERVED = f"{KEY}.teachers.a.url=http://a"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ([f"{KEY}.reward_coef=0"], r"reward_coef=0 without teachers"),
        ([f"{KEY}.task_key=source"], r"task_key=source without teachers"),
        ([SERVED, f"{KEY}.default=a"], r"default=a must be .*task_key"),
        ([SERVED, f"{KEY}.task_key=source", f"{KEY}.default=b"], r"default=b must be one of .*\(a\)"),
        ([f"{KEY}.teachers.a.weight=2"], r"teachers.a has none of url, path and policy"),
        ([SERVED, f"{KEY}.teachers.a.path=x"], r"teachers.a has url=http://a and path=x"),
        ([f"{KEY}.teachers.a.policy=main"], r"policy=main without .*context"),
        ([SERVED, "sampler.temperature=0.7"], r"teachers.a: servers score at temperature 1.*temperature=0.7"),
        ([f"{KEY}.teachers.a.path=x", "placement.mode=disaggregate"], r"path=x with placement.mode=disaggregate"),
        ([SERVED, f"{KEY}.teachers.a.context='a hint'"], r"neither \{message\} nor \{answer\}"),
        ([SERVED, f"{KEY}.teachers.a.context='{{answer'"], r"is no template"),
        ([SERVED, f"{KEY}.teachers.a.context='{{solution}}'"], r"has \{solution\}"),
        ([SERVED, f"{KEY}.teachers.a.context='{{message.role}}'"], r"has \{message.role\}"),
    ],
)
def test_what_does_not_fit_is_refused(changes: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(None, changes)


def test_self_distillation_loads_the_reference_and_has_no_kl_term() -> None:
    algo = load_config(None, [f"{KEY}.teachers.a.policy=reference", "sampler.temperature=0.7"]).algo
    assert (algo.needs_reference, algo.has_kl, algo.trains_everything) == (True, False, False)
    assert not load_config(None, [SERVED]).algo.needs_reference


def test_a_run_says_what_it_learns_from() -> None:
    both = load_config(None, [SERVED, f"{KEY}.teachers.b.url=http://b"]).algo
    alone = load_config(None, [SERVED, f"{KEY}.reward_coef=0"]).algo
    assert describe_algorithm(both) == "grpo advantages, distillation from a, b, ppo_clip loss"
    assert describe_algorithm(alone) == "distillation from a, ppo_clip loss"
