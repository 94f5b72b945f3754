"""The journal's file of a group: the lines of ended episodes become the finished group's, in the order of its episodes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError, UngradedError
from agentrl.core.task import Task
from agentrl.core.tool import CallTool
from agentrl.core.types import Message, Rollout, Row, RowKey, SamplingParams, StopReason
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.obs.records import split_records
from agentrl.obs.rollouts import RolloutFile, read_rollouts
from agentrl.testing import ScriptedSampler
from agentrl.train.pipeline.journal import Journal
from agentrl.train.rollout_source import TaskPosition
from tests.unit.train.async_world import RENDERER, run_first_group


class OneTurn(Env):
    """Ends after the first turn."""

    def step(self, action: Message) -> Any:
        return (), -1.0, True, False, {}


class Ranks:
    """Rewards a rollout with its place in the group, which is known only when all have ended."""

    group = True

    async def grade(self, rollouts: Sequence[Rollout], tools: Mapping[str, CallTool] | None = None) -> None:
        for index, rollout in enumerate(rollouts):
            assert rollout.reward == -1.0
            rollout.reward = float(index)
            rollout.metrics = {"place": float(index)}


def ended(name: str, reward: float, version: int = 0) -> Rollout:
    """A rollout of three tokens, the last two sampled."""
    sampled_T = np.array([0, 1, 1], np.uint8)
    row = Row(
        key=RowKey("t", name, "main", 0),
        token_ids=np.array([5, 6, 7], np.int32),
        provenance=sampled_T,
        mask=sampled_T,
        mask_reason=1 - sampled_T,
        logprobs=np.array([0.0, -0.25, -reward], np.float32),
        versions=np.where(sampled_T, version, -1).astype(np.int32),
        requests=sampled_T.astype(np.int32) - 1,
        request_ids=(f"{name}/0",),
    )
    return Rollout("t", name, [row], reward, StopReason.TERMINATED, {"seen": reward}, sampled_tokens=2)


def summary(rollouts: Sequence[Rollout]) -> list[Any]:
    return [
        (
            rollout.rollout_id,
            rollout.reward,
            rollout.metrics,
            [(row.logprobs.tolist(), row.versions.tolist()) for row in rollout.rows],
        )
        for rollout in rollouts
    ]


def read_again(folder: Path) -> list[Rollout]:
    journal = Journal(folder).begin()
    try:
        assert journal.is_finished(0)
        return journal.read_group(0)
    finally:
        journal.close()


def test_a_finished_group_has_the_order_of_its_episodes_not_that_in_which_they_ended(tmp_path: Path) -> None:
    rollouts = [ended(name, float(number)) for number, name in enumerate("abcd")]
    journal = Journal(tmp_path).begin()
    journal.record_admitted(0, 0)
    for number in (2, 0, 3):  # one ends without a record, as episodes of several rollouts do
        journal.record_ended(0, rollouts[number])
    asyncio.run(journal.record_finished(0, rollouts))
    journal.close()
    assert summary(read_again(tmp_path)) == summary(rollouts)


def test_records_of_ended_episodes_are_written_once(tmp_path: Path) -> None:
    rollouts = [ended(name, float(number)) for number, name in enumerate("abcd")]
    journal = Journal(tmp_path).begin()
    journal.record_admitted(0, 0)
    for number in (2, 0, 3, 1):
        journal.record_ended(0, rollouts[number])
    file = tmp_path / "journal/groups/00000000.rollouts"
    inode, content = file.stat().st_ino, file.read_bytes()
    asyncio.run(journal.record_finished(0, rollouts))
    assert (file.stat().st_ino, file.read_bytes()) == (inode, content)
    assert summary(journal.read_group(0)) == summary(rollouts)
    journal.close()
    assert summary(read_again(tmp_path)) == summary(rollouts)


def test_a_resumed_group_has_what_it_held_and_what_it_ran_again(tmp_path: Path) -> None:
    """Of the first process ``a`` is usable, ``b`` has a newer version than the checkpoint, and the last line is cut."""
    journal = Journal(tmp_path).begin()
    journal.record_admitted(0, 0)
    for rollout in (ended("b", 1.0, version=3), ended("a", 2.0), ended("c", 3.0)):
        journal.record_ended(0, rollout)
    journal.close()
    file = tmp_path / "journal/groups/00000000.rollouts"
    file.write_bytes(file.read_bytes()[:-9])
    journal = Journal(tmp_path).begin()
    group_record = journal.read_group(0)
    assert [rollout.rollout_id for rollout in group_record] == ["a"]
    again = [ended("b", 4.0), ended("c", 5.0)]
    for rollout in again[::-1]:
        journal.record_ended(0, rollout)
    rollouts = [*group_record, *again]
    asyncio.run(journal.record_finished(0, rollouts))
    journal.close()
    assert summary(read_again(tmp_path)) == summary(rollouts)


def test_rewards_of_a_grader_of_groups_are_in_the_journal_and_in_the_rollout_file(tmp_path: Path) -> None:
    journal, file = Journal(tmp_path).begin(), RolloutFile(tmp_path / "step.jsonl")
    task = Task("t", (Message("user", "go"),))
    jobs = [Job(task, number, f"1/0/{number}") for number in range(4)]

    async def run() -> list[Rollout]:
        sampler = ScriptedSampler(lambda _: "yes", encode=RENDERER.encode, end_token_id=RENDERER.end_token_id)
        runner = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=OneTurn,
                        renderer=RENDERER,
                        sampler=sampler,
                        tool_clients={},
                        limits=Limits(max_turns=9, max_tokens=1000, max_seconds=1e9, max_new_tokens=50),
                        sampling=SamplingParams(max_new_tokens=50, seed=0),
                    ),
                    grader=Ranks(),
                )
            },
            FailurePolicy(FailureConfig()),
            EpisodeSlots(4),
        )
        return await run_first_group(journal, runner, jobs, file.write)

    rollouts = asyncio.run(run())
    journal.close()
    assert [rollout.reward for rollout in rollouts] == [0.0, 1.0, 2.0, 3.0]
    assert summary(read_again(tmp_path)) == summary(rollouts)
    assert summary(read_rollouts(file.lines)) == summary(rollouts)


class Ungraded:
    """A runner whose grader ends without a result."""

    has_single_rollouts = False

    async def run_many(
        self, jobs: Sequence[Job], *_: Any, on_ended: Callable[[], None], **options: Any
    ) -> list[Rollout]:
        for _job in jobs:
            on_ended()
        return [replace(ended(job.rollout_id, 0.0), graded=job.seed == 0) for job in jobs]


@pytest.mark.parametrize("taken", [True, False], ids=["of a step that is trained again", "that waits for a step"])
@pytest.mark.parametrize("damage", ["emptied", "cut between records", "a record twice", "missing"])
def test_a_file_that_lacks_rollouts_of_a_finished_group_is_refused_before_the_start(
    damage: str, taken: bool, tmp_path: Path
) -> None:
    """Each of its records is whole, so only their number shows the damage."""
    keys = {"rollout.batch_size": "1"}
    journal = Journal(tmp_path, keys=keys).begin()
    rollouts = [ended("a", 1.0), ended("b", 2.0)]
    journal.record_admitted(0, 0)
    asyncio.run(journal.record_finished(0, rollouts))
    if taken:
        asyncio.run(journal.record_taken(1, [0], TaskPosition(1)))
    journal.close()
    Journal(tmp_path, keys=keys).check_rollouts()
    path = tmp_path / "journal" / "groups" / "00000000.rollouts"
    records = split_records(path.read_bytes())
    damaged = {"emptied": [], "cut between records": records[:-1], "a record twice": [*records, records[0]]}
    path.unlink() if damage == "missing" else path.write_bytes(b"".join(damaged[damage]))
    with pytest.raises(ConfigError, match=str(path)) as refusal:
        Journal(tmp_path, keys=keys).check_rollouts()
    assert "--resample" in str(refusal.value)
    if damage != "missing":
        with pytest.raises(
            ConfigError, match=rf"{path} is damaged: it has {len(damaged[damage])} rollouts, and 2 when"
        ):
            Journal(tmp_path, keys=keys).read_group(0)


def test_a_group_with_an_ungraded_rollout_is_not_finished(tmp_path: Path) -> None:
    journal = Journal(tmp_path).begin()
    jobs = [Job(Task("t", ()), number, f"1/0/{number}") for number in range(2)]
    with pytest.raises(UngradedError, match="'1/0/1' of task 't'"):
        asyncio.run(run_first_group(journal, cast("EpisodeRunner", Ungraded()), jobs))
    journal.close()
    journal = Journal(tmp_path).begin()
    assert not journal.is_finished(0)
    assert journal.read_group(0) == []
    journal.close()
