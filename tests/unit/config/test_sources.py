"""Sources of a mixed run: what each has of the run, and what is refused."""

import pickle
from pathlib import Path

import pytest

from agentrl.algo.registry import describe_algorithm, needs_critic, needs_whole_sequences
from agentrl.config.layers import Layer, load_layers
from agentrl.config.load import dump, load_config
from agentrl.config.recorded import check_fixed, recorded_keys
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, UserError

RUN = (
    "env.options.topk=2",
    "tasks.name=multihop",
    "tasks.options.seed=3",
    "algo.loss.options.clip_low=0.1",
    "reward=f1",
)
"""Settings of the run that sources have too, or drop."""


def mixed(*overrides: str) -> Config:
    return load_config(None, [*RUN, *overrides])


def source(*overrides: str) -> Config:
    """Return the configuration of the source ``a``."""
    return mixed("sources.b={}", *(f"sources.a.{override}" for override in overrides or ["weight=1"])).by_source()["a"]


def test_without_sources_the_run_is_its_only_source() -> None:
    plain = mixed()
    assert plain.by_source() == {"": plain}
    assert plain.algo.by_source == {"": plain.algo}


def test_a_source_has_what_it_does_not_set() -> None:
    run, source_config = mixed(), source()
    assert source_config.model_dump() == run.model_dump()
    limited = source("rollout.max_turns=2", "rollout.max_seconds=5")
    assert (limited.rollout.max_turns, limited.rollout.max_seconds) == (2, 5.0)
    assert limited.rollout.max_tokens == run.rollout.max_tokens
    assert source("rollout.generate=a:b").rollout.generate == "a:b"


def test_options_belong_to_a_name() -> None:
    assert source("env.name=python_math").env.options == {}
    assert source("env.name=search_r1", "env.options.topk=3").env.options == {"topk": 3}
    assert source("env.options.max_searches=1").env.options == {"topk": 2, "max_searches": 1}
    assert source("tasks.name=math_problems").tasks.options == {}
    assert source("algo.loss.name=cispo").algo.loss.options == {}
    assert source("algo.loss.name=ppo_clip").algo.loss.options == {"clip_low": 0.1}


def test_tasks_are_from_a_taskset_or_from_files() -> None:
    source_config = source("data.path=x.jsonl")
    assert (source_config.tasks.name, source_config.tasks.options, source_config.data.path) == (
        None,
        {},
        Path("x.jsonl"),
    )
    files = load_config(None, ["data.path=x.jsonl", "data.label_key=y", "sources.a.tasks.name=multihop"]).by_source()[
        "a"
    ]
    assert (files.tasks.name, files.data.path, files.data.label_key) == ("multihop", None, None)
    with pytest.raises(ConfigError, match=r"^sources\.a: data\.path=x\.jsonl and tasks\.name=multihop both say"):
        source("data.path=x.jsonl", "tasks.name=multihop")


def test_a_reward_is_a_word_or_none() -> None:
    assert source("reward=math").reward.function == "math"
    assert source("reward=null").reward.function is None
    assert source().reward.function == "f1"


def test_the_algorithm_of_each_source_reaches_learner_ranks() -> None:
    algo = mixed("sources.a.algo.advantage.name=gae", "sources.b.algo.loss.name=gspo").algo
    sent = pickle.loads(pickle.dumps(algo.model_copy(update={"reference": "x"})))
    assert [source.loss.name for source in sent.by_source.values()] == ["ppo_clip", "gspo"]
    assert needs_critic(sent)
    assert needs_whole_sequences(sent)
    assert not needs_critic(sent.by_source["b"])
    assert "a: gae advantages, ppo_clip loss" in describe_algorithm(sent)


def test_only_what_sources_set_is_written() -> None:
    config = mixed("sources.a={weight: 3, algo: {loss: {name: gspo}}}", "sources.b.env.name=python_math")
    text = dump(config)
    assert "sources:\n  a:\n    weight: 3.0\n    algo:\n      loss:\n        name: gspo\n  b:\n    env:\n" in text
    again = load_layers([Layer("file", config.model_dump(mode="json"))])
    assert again == config
    assert again.by_source() == config.by_source()


def test_layers_of_a_source_drop_options_of_another_name() -> None:
    below = {
        "sources": {"a": {"algo": {"loss": {"name": "gspo", "options": {"clip_low": 0.1}}}, "reward": {"key": "x"}}}
    }
    above = {"sources": {"a": {"algo": {"loss": {"name": "cispo"}}, "reward": {"function": "f1"}}}}
    config = load_layers([Layer("below", below), Layer("above", above)])
    assert config.by_source()["a"].algo.loss.options == {}
    assert config.by_source()["a"].reward.key == "x"


def test_the_longest_episode_is_that_of_any_source() -> None:
    assert mixed("sources.a.rollout.max_tokens=5000", "sources.b={}").max_tokens == 5000
    assert mixed("sources.a={}", "sources.b={}").label == "a+b"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["sources.a.env.nmae=x"], r"unknown key 'sources\.a\.env\.nmae'\. Did you mean 'sources\.NAME\.env\.name'"),
        (["sources.a.weight=0"], r"sources\.a\.weight=0: .*greater than 0"),
        (["sources={a/b: {}}"], r"sources=.*'a/b' becomes part of task ids|sources: the name 'a/b' becomes part"),
        (["sources.a.learner.ranks=2"], r"unknown key 'sources\.a\.learner'"),
        (["sources.a.algo.kl_coef=1"], r"unknown key 'sources\.a\.algo\.kl_coef'"),
        (["sources.a.reward={function: null, key: x}"], r"^sources\.a: reward\.key=x is set, but no reward\.function"),
        (["sources.a={}", "eval.source=b"], r"eval\.source=b is none of the run's sources \(a\)"),
        (["eval.source=b"], r"eval\.source=b is none of the run's sources \(none\)"),
        (["sources.a={}", "eval.path=x.jsonl"], r"eval: a set of a run with several sources .* set eval\.source to one of a"),
        (["sources.a={}", "eval.sets.x.split=y"], r"eval\.sets\.x: .* set eval\.sets\.x\.source to one of a"),
        (["sources.a={}", "eval.sets.x.source=c"], r"eval\.sets\.x\.source=c is none of"),
    ],
)  # fmt: skip
def test_what_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        mixed(*overrides)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("sources.a.weight=2", r"sources\.a\.weight=2\.0: the run in r has null; leave out sources\.a\.weight"),
        ("sources.a.env.name=python_math", r"sources\.a\.env\.name=python_math"),
        ("sources.c={}", r"sources=a, b, c: the run in r has a, b; leave out sources"),
    ],
)
def test_a_resumed_run_has_its_sources(change: str, message: str) -> None:
    state_before = recorded_keys(mixed("sources.a={}", "sources.b={}"))
    check_fixed(state_before, recorded_keys(mixed("sources.a.algo.loss.name=cispo", "sources.b={}")), Path("r"))
    with pytest.raises(ConfigError, match=message):
        check_fixed(state_before, recorded_keys(mixed("sources.a={}", "sources.b={}", change)), Path("r"))
