"""Which tasks an evaluation takes, from configuration to sets."""

from collections.abc import Sequence

import pytest

from agentrl import Message, Task
from agentrl.config.evaluation import EvalConfig, EvalSet
from agentrl.config.load import dump, load_config, validate
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, UserError, unknown_name
from agentrl.core.task import TaskSet
from agentrl.evaluation.sets import check_goals, check_goals_are_measured, load_eval_tasks, reaches_goals


def task(name: str, **metadata: object) -> Task:
    return Task(name, (Message("user", "?"),), metadata=metadata)


class Splits(TaskSet):
    """``eval`` has five tasks with hops, ``hard`` three without, ``none`` none."""

    def split(self, name: str) -> Sequence[Task]:
        splits = {
            "eval": [task(f"e{number}", hops=number) for number in range(5)],
            "hard": [task(f"h{number}") for number in range(3)],
            "none": [],
        }
        if name not in splits:
            raise unknown_name("split", name, splits, "tasks.eval_split")
        return splits[name]


def config(*overrides: str) -> Config:
    return load_config(None, overrides)


def test_without_sets_there_is_one_without_a_name() -> None:
    [choice] = load_eval_tasks(config("eval.size=2", "eval.temperature=0"), {"": Splits()})
    assert (choice.prefix, choice.label, choice.decoding) == ("eval/", "eval", "greedy")
    assert [task.id for task in choice.tasks] == ["e0", "e1"]


def test_what_a_set_leaves_out_is_taken_from_eval() -> None:
    made = config(
        "eval.size=2", "eval.temperature=0.5", "eval.n_samples=4", "eval.group_by=hops",
        "eval.sets.a.n_samples=1", "eval.sets.b={split: hard, temperature: 1.0, top_p: 0.9, top_k: 20, size: null}",
    )  # fmt: skip
    a, b = load_eval_tasks(made, {"": Splits()})
    assert (a.plan.n_samples, a.plan.temperature, len(a.tasks), a.plan.group_by) == (1, 0.5, 2, "hops")
    assert (b.plan.n_samples, b.plan.temperature, len(b.tasks), b.plan.group_by) == (4, 1.0, 3, None)
    assert (a.prefix, b.prefix) == ("eval/a/", "eval/b/")
    assert b.decoding == "temperature 1, top-p 0.9, top-k 20"
    assert "3 tasks of the split 'hard' x 4" in b.description


def test_an_explicit_default_is_not_taken_from_eval() -> None:
    assert config("eval.temperature=0", "eval.sets.a.temperature=1.0").eval.named_sets()["a"].temperature == 1.0


def test_a_set_has_its_own_source_or_that_of_eval() -> None:
    sets = config("eval.split=hard", "eval.sets={a: {path: x.jsonl}, b: {split: eval}, c: {}}").eval.named_sets()
    assert [(eval_set.split, str(eval_set.path)) for eval_set in sets.values()] == [
        (None, "x.jsonl"), ("eval", "None"), ("hard", "None"),
    ]  # fmt: skip


def test_sets_stay_open_to_eval_when_written_and_read_back() -> None:
    made = config("eval.temperature=0.5", "eval.sets.a.n_samples=2")
    again = load_config(
        None, ["eval.temperature=0"], base=validate(made.model_dump(mode="json")).model_dump(mode="json")
    )
    assert again.eval.named_sets()["a"] == EvalSet(temperature=0.0, n_samples=2)
    assert "temperature" not in dump(made).partition("sets:")[2].partition("sft:")[0]
    assert isinstance(made.eval, EvalConfig)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["eval.size=6"], "eval.size=6, but the split 'eval' has 5 tasks"),
        (["eval.sets.a={split: hard, size: 4}"], "eval.sets.a.size=4"),
        (["eval.sets.a.split=none"], "eval.sets.a: the split 'none' has no tasks"),
        (
            ["eval.group_by=depth"],
            "eval.group_by=depth: no task of the split 'eval' has this in its metadata, which has: hops",
        ),
        (["eval.sets.a={split: hard, group_by: hops}"], "eval.sets.a.group_by=hops"),
        (["eval.split=hrad"], "'hard'"),
    ],
)
def test_what_does_not_fit_is_named(overrides: list[str], message: str) -> None:
    with pytest.raises(UserError) as error:
        load_eval_tasks(config(*overrides), {"": Splits()})
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("eval.sets={a/b: {}}", "a/b"),
        ("eval.sets.a={split: x, path: y}", "eval.sets.a.split=x and eval.sets.a.path=y"),
        ("eval.sets.a.n_samples=0", "eval.sets.a.n_samples=0"),
        ("eval.top_k=0", "eval.top_k=0"),
        ("eval.sets.a.n_sample=3", "n_samples"),
    ],
)
def test_sets_that_cannot_be_are_refused_as_they_are_read(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        config(override)
    assert message in str(error.value)


def test_a_size_or_by_of_eval_goes_as_far_as_a_set_does() -> None:
    [choice] = load_eval_tasks(config("eval.size=4", "eval.group_by=hops", "eval.sets.a.split=hard"), {"": Splits()})
    assert (len(choice.tasks), choice.plan.group_by) == (3, None)


def test_nothing_to_evaluate_on() -> None:
    empty = config("tasks.eval_split=none")
    assert load_eval_tasks(empty, {"": Splits()}) == []
    with pytest.raises(ConfigError, match="nothing is evaluated"):
        check_goals(config("tasks.eval_split=none", "train.stop_at.reward=1").train, [])
    check_goals(empty.train, [])


def test_goals_name_a_set_where_there_are_several() -> None:
    made = config("eval.sets={a: {}, b: {}}", "train.stop_at={exact_match: 0.5}")
    with pytest.raises(ConfigError, match="a/exact_match"):
        check_goals(made.train, load_eval_tasks(made, {"": Splits()}))
    made = config("eval.sets={a: {}, b: {}}", "train.stop_at={a/exact_match: 0.5, b/reward/hops=1: 0.5}")
    check_goals(made.train, load_eval_tasks(made, {"": Splits()}))
    plain = config("train.stop_at={exact_match/hops=2: 0.5}")
    check_goals(plain.train, load_eval_tasks(plain, {"": Splits()}))


def test_goals_are_reached_together_or_not_at_all() -> None:
    metrics = {"eval/a/exact_match": 0.6, "eval/b/reward/hops=2": -0.5}
    assert reaches_goals({"a/exact_match": 0.6}, metrics)
    assert reaches_goals({"a/exact_match": 0.6, "b/reward/hops=2": -0.5}, metrics)
    assert not reaches_goals({"a/exact_match": 0.6, "b/reward/hops=2": -0.4}, metrics)
    assert not reaches_goals({"missing": -1.0}, metrics)
    assert not reaches_goals({}, metrics)


def test_keeping_rollouts_is_no_setting_of_a_set() -> None:
    made = config("eval.save_rollouts=true", "eval.sets.a.n_samples=2")
    assert made.eval.save_rollouts
    assert made.eval.named_sets()["a"].n_samples == 2
    assert config("eval.save_rollouts=true").eval.named_sets()[""] == EvalSet()


def test_a_goal_that_no_evaluation_measures_is_refused_with_the_nearest_metric() -> None:
    metrics = {"eval/exact_match": 0.5, "eval/reward": 0.1, "train/loss": 1.0}
    check_goals_are_measured("train.stop_at", {"exact_match": 0.9}, metrics)
    check_goals_are_measured("train.stop_at", {}, {})
    with pytest.raises(ConfigError, match=r"train\.stop_at names 'exact_mach'.*did you mean exact_match\?"):
        check_goals_are_measured("train.stop_at", {"exact_mach": 0.9}, metrics)
    with pytest.raises(ConfigError, match=r"'loss', but .* no such metric; it has exact_match, reward"):
        check_goals_are_measured("train.stop_at", {"loss": 0.9}, metrics)


SOURCES = {"a": Splits(), "b": Splits()}


def test_every_source_of_a_mixed_run_is_evaluated() -> None:
    made = config(
        "sources.a={}", "sources.b={tasks: {eval_split: hard}, rollout: {reset_seed: episode}}", "eval.size=4",
        "eval.group_by=hops",
    )  # fmt: skip
    a, b = load_eval_tasks(made, SOURCES)
    assert (a.prefix, b.prefix) == ("eval/a/", "eval/b/")
    assert [task.id for task in a.tasks] == ["a/e0", "a/e1", "a/e2", "a/e3"]
    assert [task.id for task in b.tasks] == ["b/h0", "b/h1", "b/h2"]
    assert (a.plan.group_by, b.plan.group_by) == ("hops", None)
    assert (a.reset_seed, b.reset_seed) == ("task", "episode")
    check_goals(config("sources.a={}", "sources.b={}", "train.stop_at={b/reward: 1}").train, [a, b])
    none = config("sources.a={}", "sources.b.tasks.eval_split=none")
    assert [task.name for task in load_eval_tasks(none, SOURCES)] == ["a"], "a source may have nothing to evaluate on"


def test_a_set_of_a_mixed_run_belongs_to_a_source() -> None:
    sources = ("sources.a={}", "sources.b.tasks.eval_split=hard")
    hard, own_run_config = load_eval_tasks(
        config(*sources, "eval.sets.hard={source: a, split: hard}", "eval.sets.own={source: b, size: 1}"), SOURCES
    )
    assert [task.id for task in hard.tasks] == ["a/h0", "a/h1", "a/h2"]
    assert [task.id for task in own_run_config.tasks] == ["b/h0"]
    [only] = load_eval_tasks(config(*sources, "eval.source=b"), SOURCES)
    assert (only.prefix, len(only.tasks)) == ("eval/", 3)
    with pytest.raises(ConfigError, match=r"^eval\.sets\.x\.size=9, but the split 'hard' has 3 tasks"):
        load_eval_tasks(config(*sources, "eval.sets.x={source: b, size: 9}"), SOURCES)
    with pytest.raises(UserError, match=r"^sources\.a: .*'missing'"):
        load_eval_tasks(config("sources.a.tasks.eval_split=missing"), SOURCES)
    assert config(*sources, "eval.source=b", "eval.sets.x={}").eval.named_sets(["a", "b"])["x"].source == "b"
