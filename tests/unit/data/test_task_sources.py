"""Tasks of a mixed run: their ids, their order, and the tasksets that sources share."""

import json
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import Message, Task
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.task import MadeTasks, TaskSet, task_source_name
from agentrl.data.jobs import TaskJobs
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import (
    MixedOrder,
    check_not_empty,
    errors_name_source,
    make_order,
    open_tasks,
    read_splits,
    with_source_ids,
)
from agentrl.runtime.tool_servers import JoinedCorpora

WEIGHTS = st.lists(st.sampled_from([0.1, 0.25, 1.0, 2.0, 3.0, 7.5]), min_size=1, max_size=4)


def tasks(count: int) -> list[Task]:
    return [Task(f"t{number}", (Message("user", "?"),)) for number in range(count)]


def mixed_order(weights: Sequence[float], seed: int = 0) -> MixedOrder:
    """An order over sources ``s0``, ``s1``, …, which have 3, 4, … tasks."""
    names = {f"s{number}": weight for number, weight in enumerate(weights)}
    orders = {name: TaskOrder(with_source_ids(name, tasks(3 + number)), seed) for number, name in enumerate(names)}
    return MixedOrder(orders, names)


@given(weights=WEIGHTS, position=st.integers(0, 300), count=st.integers(1, 64), seed=st.integers(0, 3))
def test_the_order_depends_on_position_and_seed_alone(
    weights: list[float], position: int, count: int, seed: int
) -> None:
    order = mixed_order(weights, seed)
    order.get_samples(position)
    state = json.loads(json.dumps(order.state()))
    full_tasks = order.get_samples(count + 5)
    resumed = mixed_order(weights, seed)
    resumed.load_state(state)
    assert resumed.get_samples(count) + resumed.get_samples(5) == full_tasks, "a resumed run goes on with the same"


@given(weights=WEIGHTS, position=st.integers(0, 10_000), count=st.integers(1, 200))
def test_every_step_has_its_share_of_every_source(weights: list[float], position: int, count: int) -> None:
    order = mixed_order(weights)
    counter = Counter(order.source_at(position + offset)[0] for offset in range(count))
    total = sum(Fraction(str(weight)) for weight in weights)
    shares = {f"s{number}": count * Fraction(str(weight)) / total for number, weight in enumerate(weights)}
    for name, share in shares.items():
        assert abs(counter[name] - share) < 2
        assert len(weights) > 2 or abs(counter[name] - share) < 1
    if all(share.denominator == 1 for share in shares.values()):
        assert counter == {name: int(share) for name, share in shares.items() if share}


@given(weights=WEIGHTS)
def test_a_source_takes_its_tasks_one_after_the_other(weights: list[float]) -> None:
    order = mixed_order(weights)
    taken: dict[str, int] = {}
    for position in range(300):
        name, index = order.source_at(position)
        assert index == taken.get(name, 0)
        taken[name] = index + 1


def test_sources_alternate_within_a_step() -> None:
    assert [task.id.partition("/")[0] for task in mixed_order([3, 1]).get_samples(8)] == ["s1", "s0", "s0", "s0"] * 2


def test_ids_begin_with_the_source() -> None:
    class Made(MadeTasks):
        def make(self, index: int) -> Task:
            made.append(index)
            return Task(f"m/{index}", ())

    made: list[int] = []
    actual = with_source_ids("math", Made("train", 10**9))
    assert (actual[7].id, made) == ("math/m/7", [7]), "tasks are made on access still"
    assert task_source_name("math/m/7") == "math"
    plain = tasks(3)
    assert with_source_ids("", plain) is plain


def test_each_source_resets_by_its_own_rule() -> None:
    config = load_config(
        None, ["rollout.n_samples_per_prompt=2", "sources.s0={}", "sources.s1.rollout.reset_seed=episode"]
    )
    jobs = TaskJobs(config, mixed_order([1, 1])).groups(range(4))
    resets = {task_source_name(job.task.id): job.reset_seed for job in jobs}
    assert resets["s0"] is not None
    assert resets["s1"] is None
    assert len({job.seed for job in jobs}) == len({job.rollout_id for job in jobs}) == 8


def test_sources_with_the_same_tasks_share_them() -> None:
    config = load_config(
        None,
        [
            "tasks.name=multihop",
            "sources.a.algo.loss.name=gspo",
            "sources.b.weight=3",
            "sources.c={env: {name: python_math}, tasks: {name: math_problems}}",
        ],
    )
    opened = open_tasks(config)
    assert opened["a"] is opened["b"]
    assert opened["a"] is not opened["c"]
    order = make_order(config, read_splits(config, opened))
    assert Counter(task_source_name(task.id) for task in order.get_samples(10)) == {"a": 2, "b": 6, "c": 2}


def test_errors_name_the_source() -> None:
    config = load_config(None, ["sources.a={}", "sources.b.tasks.name=multihop"])
    with pytest.raises(ConfigError, match=r"^sources\.a: env\.name=search_r1 has no tasks.*--config search_r1/cpu, "):
        open_tasks(config)
    config = load_config(None, ["tasks.name=multihop", "sources.a.tasks.train_split=trian"])
    with pytest.raises(Exception, match=r"^sources\.a: .*'trian'"):
        read_splits(config, open_tasks(config))
    with pytest.raises(MissingError, match=r"^sources\.a: x\nsources\.a: y$"), errors_name_source("a"):
        raise MissingError("x\ny")


def test_an_empty_split_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty_env.py").write_text(
        "from agentrl import Env\nclass Empty(Env):\n    @staticmethod\n    def tasks(split, seed):\n        return ()\n"
    )
    name = f"{tmp_path}/empty_env.py:Empty"
    config = load_config(None, [f"env.name={name}"])
    with pytest.raises(ConfigError, match=rf"env\.name={name}: the split is empty; tasks\.train_split and "):
        check_not_empty(config, read_splits(config, open_tasks(config)))


class Corpora(TaskSet):
    """Has documents, and no tasks."""

    def __init__(self, *names: str) -> None:
        self._names = names

    def split(self, name: str) -> Sequence[Task]:
        return ()

    def corpora(self) -> dict[str, list[dict[str, str]]]:
        return {name: [{"id": name, "contents": "x"}] for name in self._names}


def test_a_shared_server_has_the_corpora_of_all_its_sources() -> None:
    corpora = Corpora("train", "eval")
    assert [*JoinedCorpora("search", {"a": corpora, "b": corpora, "c": Corpora("wiki")}).corpora()] == [
        "train",
        "eval",
        "wiki",
    ]
    with pytest.raises(ConfigError, match=r"sources\.a and sources\.b share .*'search'.* both have a corpus 'train'"):
        JoinedCorpora("search", {"a": corpora, "b": Corpora("train")}).corpora()
