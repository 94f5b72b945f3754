"""Data sources and the data buffer: tasks by position, tasks that come back, resume, and what is said of faults."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl import ConfigError, DataSource, Message, Task, UserError
from agentrl.config.load import load_config
from agentrl.config.tasks import DataSourceConfig
from agentrl.core.types import Failure, FailureKind, Rollout, StopReason
from agentrl.data.buffer import DataBuffer, load_buffer_filter
from agentrl.data.jobs import TaskJobs
from agentrl.data.order import TaskOrder
from agentrl.data.task_sources import make_data_source, make_order

TASKS = [Task(f"t{number}", (Message("user", "?"),), answer=number, metadata={"n": number}) for number in range(7)]


class Newest(DataSource):
    """Takes tasks from the last one backwards, and counts results."""

    def __init__(self, tasks: Sequence[Task], seed: int, step: int = 1) -> None:
        super().__init__(tasks, seed)
        self.taken, self.step, self.results = 0, step, 0

    def get_samples(self, num_samples: int) -> Sequence[Task]:
        numbers = range(self.taken, self.taken + num_samples)
        self.taken += num_samples
        return [self.tasks[(-1 - self.step * number) % len(self.tasks)] for number in numbers]

    def on_trained(self, rewards: Mapping[str, Sequence[float]]) -> None:
        self.results += len(rewards)

    def state(self) -> dict[str, Any]:
        return {"taken": self.taken, "results": self.results}

    def load_state(self, state: Mapping[str, Any]) -> None:
        self.taken, self.results = state["taken"], state["results"]


def newest(buffer: Sequence[Task], num_samples: int) -> Sequence[Task]:
    return buffer[::-1][:num_samples]


def play(actions: Sequence[tuple[str, int]], cut: int) -> tuple[list[str], dict[str, Any]]:
    """The ids that a buffer gives, and its last state; at action ``cut`` another buffer loads its state."""
    buffer, open_positions, given_ids, taken = DataBuffer(TaskOrder(TASKS, 3)), list[int](), list[str](), 0
    for number, (action, count) in enumerate(actions):
        if number == cut:
            state = json.loads(json.dumps(buffer.state()))
            buffer = DataBuffer(TaskOrder(TASKS, 3))
            buffer.load_state(state)
        if action == "take":
            given_ids += [buffer[taken + offset].id for offset in range(count)]
            open_positions += range(taken, taken + count)
            taken += count
        elif action == "back":
            buffer.add_samples(TASKS[:count])
        else:
            done, open_positions = open_positions[-count:], open_positions[:-count]
            ids = {buffer[position].id for position in done}
            buffer.on_trained(
                done, {} if action == "lose" else {name: [1.0] for name in ids}, ids if action == "lose" else ()
            )
    given_ids += [buffer[position].id for position in open_positions]
    return given_ids, buffer.state()


@given(
    actions=st.lists(st.tuples(st.sampled_from(["take", "train", "back", "lose"]), st.integers(1, 5)), max_size=20),
    cut=st.integers(0, 19),
)
def test_a_resumed_buffer_gives_the_same_tasks(actions: list[tuple[str, int]], cut: int) -> None:
    assert play(actions, cut) == play(actions, -1)


def test_tasks_that_come_back_are_taken_first_and_chosen_by_the_filter() -> None:
    for choose, first in (("take_first", ["t0", "t1"]), ("newest", ["t2", "t1"])):
        buffer = DataBuffer(TaskOrder(TASKS, 0), newest if choose == "newest" else lambda tasks, count: tasks[:count])
        buffer.add_samples(TASKS[:3])
        assert buffer.metrics() == {"data/buffer": 3.0}
        assert [buffer[0].id, buffer[1].id] == first
        assert buffer.metrics() == {"data/buffer": 1.0}
    nothing = DataBuffer(TaskOrder(TASKS, 0), lambda tasks, count: ())
    nothing.add_samples(TASKS[:3])
    assert nothing[0] == TaskOrder(TASKS, 0).get_samples(1)[0], "a filter may leave all of them for later"


@pytest.mark.parametrize(
    ("choose", "message"),
    [
        (lambda tasks, count: [TASKS[6]], r"^KEY returned Task\(id='t6'.* which is not in the buffer"),
        (lambda tasks, count: [tasks[0], tasks[0]], "was returned twice"),
        (lambda tasks, count: tasks, "^KEY returned 3 tasks; it may return 2 at most"),
        (lambda tasks, count: tasks[9], r"^KEY raised IndexError: tuple index out of range \(test_buffer\.py:"),
        (lambda tasks, count: None, "^KEY raised TypeError"),
    ],
)  # fmt: skip
def test_what_a_filter_may_not_return(choose: Any, message: str) -> None:
    buffer = DataBuffer(TaskOrder(TASKS, 0), choose, "KEY")
    buffer.add_samples(TASKS[:3])
    with pytest.raises(ConfigError, match=message):
        buffer[1]


def rollout(task: Task, kind: FailureKind | None, reward: float = 1.0) -> Rollout:
    failure = None if kind is None else Failure(kind, "E", "it failed")
    return Rollout(task.id, "r", [], reward, StopReason.FAILED, failure=failure, dropped=kind is not None)


def test_a_task_that_an_outage_lost_comes_back_once() -> None:
    tasks = TaskJobs(load_config(None, ["rollout.n_samples_per_prompt=2"]), Newest(TASKS, 0))
    first, second = (tasks.group(position)[0].task for position in range(2))
    tasks.on_trained([0], [rollout(first, FailureKind.SANDBOX), rollout(first, FailureKind.TOOL)])
    tasks.on_trained([1], [rollout(second, FailureKind.SAMPLER), rollout(second, None)])
    assert tasks.buffer[2] is first
    assert tasks.buffer.data_source.state() == {"taken": 2, "results": 1}, "a lost task has no result"
    tasks.on_trained([2], [rollout(first, FailureKind.TOOL)])
    assert tasks.buffer[3] not in (first, second), "lost again, it waits for its next turn"
    third = tasks.buffer[3]
    tasks.on_trained([3], [rollout(third, FailureKind.REWARD), rollout(third, FailureKind.TOOL)])
    assert tasks.buffer[4] is not third, "a fault of the task is no outage"


def test_a_filtered_group_is_a_result() -> None:
    """A task that is always solved must not look like one without results."""
    tasks = TaskJobs(load_config(None, []), Newest(TASKS, 0))
    solved, broken = (rollout(tasks.buffer[0], kind) for kind in (None, FailureKind.SANDBOX))
    solved.dropped, solved.filtered = True, "all_solved"
    tasks.on_trained([0], [solved, broken])
    assert tasks.buffer.data_source.state()["results"] == 1
    assert tasks.buffer.metrics()["data/buffer"] == 0, "and not given back"


def test_tasks_of_a_checkpoint_are_as_they_were() -> None:
    answers = [("a", ["b", ("c",)]), {"cells": ((1, 2.5), None)}, {(0, 1): {"tuple": [1]}}, np.float64(0.5), (), True]
    tasks = [Task(f"t{number}", (), answer, {"of": (answer,)}) for number, answer in enumerate(answers)]
    buffer, again = (DataBuffer(TaskOrder(tasks, 0)) for _ in range(2))
    taken = [buffer[number] for number in range(len(tasks))]
    again.load_state(json.loads(json.dumps(buffer.state())))
    actual = [again[number] for number in range(len(tasks))]
    assert actual == taken
    assert repr([task.answer for task in actual]).replace("0.5", "np.float64(0.5)") == repr(
        [sample.answer for sample in taken]
    )


def test_a_task_that_a_checkpoint_cannot_hold_is_named() -> None:
    buffer = DataBuffer(TaskOrder([Task("t0", (), {"moves": {1}})], 0))
    assert buffer[0].answer == {"moves": {1}}
    with pytest.raises(
        ConfigError, match=r"^task t0: its answer holds \{1\} of type set, which a checkpoint cannot hold; use"
    ):
        buffer.state()


def test_a_data_source_of_a_file_and_its_options() -> None:
    section = DataSourceConfig(name=f"{__file__}:Newest", options={"step": 2})
    assert [task.id for task in make_data_source(section, TASKS, 0).get_samples(3)] == ["t6", "t4", "t2"]
    config = load_config(None, [f"rollout.buffer_filter={__file__}:newest"])
    assert load_buffer_filter(config.rollout)(TASKS, 2) == [TASKS[6], TASKS[5]]


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "shufled"}, "'shufled'.*shuffled"),
        ({"name": "json:dumps"}, r"tasks\.data_source\.name=json:dumps is <function dumps.*no subclass of agentrl\.DataSource"),
        ({"options": {"size": 3}}, r"tasks\.data_source\.options: .*'size'; TaskOrder takes: nothing"),
        ({"name": f"{__file__}:Newest", "options": {"steps": 3}}, "Newest takes: step"),
    ],
)  # fmt: skip
def test_a_data_source_that_cannot_be_built(section: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make_data_source(DataSourceConfig(**section), TASKS, 0)


class Wrong(Newest):
    """Returns what it is given."""

    found: Any = None

    def get_samples(self, num_samples: int) -> Any:
        return self.found


@pytest.mark.parametrize("actual", [None, [], [None], TASKS[:3], "ta"])
def test_what_a_data_source_may_not_return(actual: Any) -> None:
    source = Wrong(TASKS, 0)
    source.found = actual
    with pytest.raises(
        ConfigError, match=r"tasks\.data_source: Wrong\.get_samples\(2\) must return a sequence of 2 Tasks"
    ):
        DataBuffer(source)[1]


class Faulty(Newest):
    """Raises in every method."""

    def get_samples(self, num_samples: int) -> Any:
        raise KeyError(num_samples)

    on_trained = load_state = get_samples

    def state(self) -> Any:
        raise KeyError("none")

    metrics = state


def test_what_a_data_source_raises_is_said_in_one_line() -> None:
    buffer = DataBuffer(Faulty(TASKS, 0))
    state = {"next": 0, "taken": {}, "buffer": [], "again": [], "source": {}}
    calls = {
        "get_samples": lambda: buffer[0],
        "on_trained": lambda: buffer.on_trained([], {"t0": [1.0]}),
        "state": buffer.state,
        "load_state": lambda: buffer.load_state(state),
        "metrics": buffer.metrics,
    }
    for name, call in calls.items():
        with pytest.raises(
            ConfigError, match=rf"^tasks\.data_source: Faulty\.{name} raised KeyError: .* \(test_buffer\.py:\d+\)$"
        ):
            call()


def test_each_source_of_a_mixed_run_has_its_data_source() -> None:
    names = {name: [Task(f"{name}/{task.id}", task.prompt) for task in TASKS] for name in "ab"}
    config = load_config(None, ["sources.a.weight=1", f"sources.b.tasks.data_source.name={__file__}:Newest"])
    order = make_order(config, names)
    assert [task.id for task in order.get_samples(4) if task.id[0] == "b"] == ["b/t6", "b/t5"]
    order.on_trained({"a/t0": [1.0], "b/t1": [1.0], "b/t2": [0.0]})
    assert order.state()["sources"]["b"] == {"taken": 2, "results": 2}
    names["b"][-3] = TASKS[0]
    with pytest.raises(ConfigError, match="'t0' has no id that begins with 'b/'"):
        order.get_samples(2)
