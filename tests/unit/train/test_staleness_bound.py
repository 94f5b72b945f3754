"""The admission rule: its bound under any timing, its order, and what a resumed run goes on with."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.train.pipeline.staleness_bound import Admission
from agentrl.train.rollout_source import TaskPosition


@dataclass
class Simulation:
    """A run whose groups take random times. Engines get a version some time after the step, or not at all for a while."""

    rng: random.Random
    steps: int
    batch_size: int
    max_staleness: int
    concurrency: int
    dropped: int = 0
    """Of ten groups a filter drops so many, by their position."""
    most: int | None = None
    in_order: float = 0
    """Share of the attempts to take groups in which the step waits for the oldest ones."""
    streamed: float = 0
    """Share of the moments in which groups are chosen before the batch is full."""
    position: TaskPosition = field(default_factory=TaskPosition)
    done: int = 0
    trained: list[tuple[int, int, int]] = field(default_factory=list)
    """Step, position, and version at admission of each trained group."""
    filtered: list[int] = field(default_factory=list)
    """Positions of the others."""
    largest: int = 0
    """Most groups that were admitted and not trained."""

    def run(self, end: int) -> None:
        """Train until ``end`` steps are done; then what is in progress is lost."""
        rule = Admission(
            self.position.untrained_positions(),
            step=self.done,
            steps=self.steps,
            batch_size=self.batch_size,
            max_staleness=self.max_staleness,
            most=self.most,
        )
        engines, began, running, admitted, dropped, chosen, left = self.done, {}, [], [], [], [], set[int]()
        while self.done < end:
            while len(running) < self.concurrency and (position := rule.admit(engines)) is not None:
                began[position] = engines
                running.append(position)
                admitted.append(position)
                self.largest = max(self.largest, len(rule.unfinished) + rule.finished)
            if self.rng.random() < self.streamed:
                in_order = self.rng.random() < self.in_order
                places = self.max_staleness - self.done, self.batch_size - len(chosen)
                unchosen = {position: began[position] for position in admitted if position not in {*chosen, *left}}
                expected = self.plain_choice(unchosen, {*running}, *places, in_order=in_order)
                assert rule.commit(in_order=in_order) == expected
                chosen += expected
            batch = rule.take(in_order=self.rng.random() < self.in_order)
            if batch is not None:
                assert {*chosen} <= {*batch}, "what was chosen is trained by this step"
                left, chosen = left | {*batch}, []
                self.trained += [(self.done, position, began[position]) for position in batch]
                self.position, self.done = self.position.after([*batch, *dropped]), self.done + 1
                self.filtered, dropped = self.filtered + dropped, []
            elif engines < self.done and (not running or self.rng.random() < 0.5):
                engines += 1
            else:
                assert running, "a group is in progress"
                ended = running.pop(self.rng.randrange(len(running)))
                if random.Random(ended).randrange(10) < self.dropped:
                    rule.drop(ended)
                    left.add(ended)
                    dropped.append(ended)
                else:
                    rule.finish(ended)
        assert admitted == sorted(admitted), "groups begin in the order of tasks"

    def plain_choice(
        self, versions: dict[int, int], running: set[int], spare_steps: int, free: int, *, in_order: bool
    ) -> list[int]:
        """What `Admission.commit` returns, with the bound of every group checked again for every candidate."""
        chosen: list[int] = []
        for position in versions:
            if len(chosen) == free or (in_order and position in running):
                break
            if position in running:
                continue
            staying = [version for other, version in versions.items() if other not in {*chosen, position}]
            places = free - len(chosen) - 1
            if any(
                index >= (version + spare_steps) * self.batch_size + places for index, version in enumerate(staying)
            ):
                break
            chosen.append(position)
        return chosen


RUNS: dict[str, Any] = {
    "seed": st.integers(0, 2**32),
    "steps": st.integers(1, 12),
    "batch_size": st.integers(1, 5),
    "max_staleness": st.integers(0, 5),
    "concurrency": st.integers(1, 24),
    "killed": st.lists(st.integers(0, 12), max_size=3),
}


@given(**RUNS)
def test_every_group_is_trained_once_and_in_time(
    seed: int, steps: int, batch_size: int, max_staleness: int, concurrency: int, killed: list[int]
) -> None:
    run = Simulation(random.Random(seed), steps, batch_size, max_staleness, concurrency)
    for end in [*sorted(min(moment, steps) for moment in killed), steps]:
        run.run(end)
    assert all(0 <= step - version <= max_staleness for step, _, version in run.trained)
    assert sorted(position for _, position, _ in run.trained) == list(range(steps * batch_size)), (
        "none lost, none twice"
    )
    assert run.position == TaskPosition(steps * batch_size)
    assert [step for step, _, _ in run.trained] == [step for step in range(steps) for _ in range(batch_size)]
    if max_staleness == 0:
        assert [position for _, position, _ in run.trained] == list(range(steps * batch_size)), "the synchronous order"


@given(
    **RUNS,
    dropped=st.integers(0, 9),
    over_sampled=st.floats(0, 1),
    in_order=st.floats(0, 1),
    streamed=st.floats(0, 1),
)
def test_filtered_groups_are_replaced_and_the_bound_holds(
    seed: int,
    steps: int,
    batch_size: int,
    max_staleness: int,
    concurrency: int,
    killed: list[int],
    dropped: int,
    over_sampled: float,
    in_order: float,
    streamed: float,
) -> None:
    most = batch_size + int(over_sampled * max_staleness * batch_size)
    sizes = (steps, batch_size, max_staleness, concurrency, dropped, most, in_order, streamed)
    run = Simulation(random.Random(seed), *sizes)
    for end in [*sorted(min(moment, steps) for moment in killed), steps]:
        run.run(end)
    assert all(0 <= step - version <= max_staleness for step, _, version in run.trained)
    assert [step for step, _, _ in run.trained] == [step for step in range(steps) for _ in range(batch_size)]
    assert run.largest <= most
    consumed = sorted([*run.filtered, *(position for _, position, _ in run.trained)])
    assert len(consumed) == len({*consumed}), "none twice"
    ahead = run.position.ahead
    assert consumed == [*range(run.position.first), *ahead], "the position covers filtered groups and trained ones"
    if not max_staleness:
        assert not ahead
        assert [position for _, position, _ in run.trained] == [
            position for position in consumed if random.Random(position).randrange(10) >= dropped
        ], "the first ones that pass, whenever they end"


def test_a_group_is_chosen_early_only_if_older_ones_keep_their_places() -> None:
    rule = Admission(count(), step=0, steps=9, batch_size=2, max_staleness=1)
    assert [rule.admit(0) for _ in range(4)] == [0, 1, 2, 3]
    assert rule.admit(0) is None
    rule.finish(3)
    assert rule.commit(in_order=True) == []
    assert rule.commit() == [3]
    assert rule.commit() == [], "once"
    rule.finish(2)
    assert rule.commit() == [2]
    assert rule.take() == [2, 3]
    assert [rule.admit(1) for _ in range(3)] == [4, 5, None]
    rule.finish(4)
    assert rule.commit() == [], "groups 0 and 1, of version 0, have both places of this step"
    rule.finish(0)
    assert rule.commit() == [0]
    assert rule.take() is None


def test_a_step_that_takes_groups_in_order_waits_for_stragglers() -> None:
    rule = Admission(count(), step=0, steps=9, batch_size=2, max_staleness=2)
    assert [rule.admit(0) for _ in range(5)] == [0, 1, 2, 3, 4]
    for position in (1, 3, 4):
        rule.finish(position)
    assert rule.take(in_order=True) is None
    assert rule.take() == [1, 3]
    assert rule.passed_over == 2, "groups 0 and 2"
    rule.finish(2)
    assert rule.take(in_order=True) is None
    rule.finish(0)
    assert rule.take(in_order=True) == [0, 2]
    assert rule.passed_over == 0


def test_a_step_waits_for_an_old_group_rather_than_take_a_newer_one() -> None:
    rule = Admission(count(), step=0, steps=9, batch_size=1, max_staleness=2)
    assert [rule.admit(0) for _ in range(4)] == [0, 1, 2, None]
    rule.finish(2)
    assert rule.take() == [2], "steps 1 and 2 have room for groups 0 and 1"
    assert [rule.admit(1) for _ in range(2)] == [3, None]
    rule.finish(3)
    assert rule.take() is None, "step 2 alone would be left for groups 0 and 1"
    assert rule.unfinished == [0, 1]
    rule.finish(1)
    assert rule.take() == [1], "either of the two will do, the oldest finished one first"
    rule.finish(0)
    assert rule.take() == [0]
    assert rule.take() == [3]


def test_the_last_steps_get_no_groups_that_no_step_trains() -> None:
    rule = Admission(count(3), step=3, steps=5, batch_size=1, max_staleness=4)
    assert [rule.admit(3) for _ in range(3)] == [3, 4, None]


def test_a_position_after_some_tasks_were_trained_ahead() -> None:
    position = TaskPosition(4).after([4, 6, 9])
    assert position == TaskPosition(5, (6, 9))
    assert position.after([5, 7]) == TaskPosition(8, (9,))
    assert position.after([5, 7, 8]) == TaskPosition(10)
    untrained = position.untrained_positions()
    assert [next(untrained) for _ in range(4)] == [5, 7, 8, 10]


@pytest.mark.parametrize("again", [3, 6])
def test_no_task_is_trained_twice(again: int) -> None:
    with pytest.raises(AssertionError, match="once"):
        TaskPosition(4, (6,)).after([again])
