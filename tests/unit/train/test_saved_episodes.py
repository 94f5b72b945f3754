"""A killed group goes on: ended episodes are kept, those in progress continue after their last saved turn."""

from __future__ import annotations

import asyncio
import dataclasses
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from byte_renderer import byte_renderer

from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import ConfigError
from agentrl.core.task import Task
from agentrl.core.types import Message, Rollout, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.testing import ScriptedSampler
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.saved_episodes import SHARE, SavedEpisodes
from tests.unit.episode.conftest import CHATML
from tests.unit.train.async_world import run_first_group

TASK = Task("t", (Message("user", "count"),))
JOBS = [Job(TASK, seed, f"1/0/{seed}") for seed in range(3)]
RENDERER = byte_renderer(CHATML)


class Killed(BaseException):
    """Ends the process."""


class Stateless(Env):
    """Ends an episode after as many turns as its seed says."""

    turns = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> Any:
        self.last = 2 + (seed or 0)
        return super().reset(seed=seed, options=options)

    def step(self, action: Message) -> Any:
        self.turns += 1
        over = self.turns == self.last
        return (() if over else (Message("user", f"{self.turns}"),)), float(self.turns), over, False, {}


class Resumable(Stateless):
    """Has a state."""

    def get_state(self) -> dict[str, Any]:
        return {**super().get_state(), "turns": self.turns}

    def set_state(self, state: dict[str, Any]) -> None:
        super().set_state(state)
        self.turns = state["turns"]


def opened(folder: Path, version: int = 0) -> Journal:
    """A journal whose episodes are saved after every turn."""
    journal = Journal(folder).begin()
    journal.episodes = SavedEpisodes(journal.episodes.folder, 0.0, version, clock=count().__next__)
    return journal


def run(
    journal: Journal, env: type[Env], *, kill: tuple[str, int] | None = None, turns: dict[str, int] | None = None
) -> tuple[list[Rollout], list[str]]:
    """Run the group at position 0; return its rollouts and the ids of its requests."""

    def answer(request: Any) -> str:
        if kill == (request.session_id, request.turn):
            raise Killed
        return f"answer {request.session_id} {request.turn}"

    sampler = ScriptedSampler(answer, encode=RENDERER.encode, end_token_id=RENDERER.end_token_id)
    sampler._turns.update(turns or {})

    async def main() -> list[Rollout]:
        runner = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=env,
                        renderer=RENDERER,
                        sampler=sampler,
                        tool_clients={},
                        limits=Limits(max_turns=9, max_tokens=1000, max_seconds=1e9, max_new_tokens=50),
                        sampling=SamplingParams(max_new_tokens=50, seed=0),
                    )
                )
            },
            FailurePolicy(FailureConfig()),
            EpisodeSlots(1),
        )
        return await run_first_group(journal, runner, JOBS)

    try:
        return asyncio.run(main()), [request.request_id for request in sampler.requests]
    finally:
        journal.close()


def compared(rollout: Rollout) -> dict[str, Any]:
    """All but the times, and the record that has them."""
    rows = [dataclasses.astuple(row) for row in rollout.rows]
    plain = [[value.tolist() if isinstance(value, np.ndarray) else value for value in row] for row in rows]
    actual = {field.name: getattr(rollout, field.name) for field in dataclasses.fields(rollout)}
    return actual | {"rows": plain, "seconds": 0, "tool_seconds": 0, "tool_uses": {}, "record": b""}


def test_a_killed_group_goes_on_where_it_was(tmp_path: Path) -> None:
    full_rollouts, requests = run(opened(tmp_path / "whole"), Resumable)
    assert len(requests) == 9
    assert not (tmp_path / "whole/journal/episodes/00000000").exists(), "the group has finished"
    with pytest.raises(Killed):
        run(opened(tmp_path / "cut"), Resumable, kill=("1/0/2", 2))
    states = sorted(path.name for path in (tmp_path / "cut/journal/episodes/00000000").iterdir())
    assert states == ["1%2F0%2F2.json"], "of the episode that had not ended"
    rollouts, requests = run(opened(tmp_path / "cut"), Resumable, turns={"1/0/2": 2})
    assert requests == ["1/0/2/2", "1/0/2/3"], "two episodes had ended, two turns of the third were saved"
    assert list(map(compared, rollouts)) == list(map(compared, full_rollouts))
    again = opened(tmp_path / "cut")
    assert list(map(compared, again.read_group(0))) == list(map(compared, full_rollouts))
    again.close()


def test_an_episode_whose_environment_has_no_state_begins_again(tmp_path: Path) -> None:
    full_rollouts, _ = run(opened(tmp_path / "whole"), Stateless)
    with pytest.raises(Killed):
        run(opened(tmp_path / "cut"), Stateless, kill=("1/0/2", 2))
    rollouts, requests = run(opened(tmp_path / "cut"), Stateless)
    assert requests == [f"1/0/2/{turn}" for turn in range(4)]
    assert list(map(compared, rollouts)) == list(map(compared, full_rollouts))


def test_states_of_a_newer_policy_or_another_task_are_not_used(tmp_path: Path) -> None:
    with pytest.raises(Killed):
        run(opened(tmp_path), Resumable, kill=("1/0/2", 2))
    for version, task, usable in ((0, "t", True), (-1, "t", False), (0, "other", False)):
        journal = opened(tmp_path, version)
        assert (journal.episodes.group_states(0).load("1/0/2", task) is not None) is usable
        mentioned = journal.episodes.find_mentioned(["answer 1/0/2", "answer 1/0/1"])
        assert mentioned == ({"answer 1/0/2"} if version == 0 else set())
        journal.close()
    path = tmp_path / "journal/episodes/00000000/1%2F0%2F2.json"
    path.write_bytes(path.read_bytes().replace(b"answer", b"Answer"))
    with pytest.raises(ConfigError, match=r"1%2F0%2F2\.json .*damaged: ValueError: the checksum"):
        SavedEpisodes(path.parents[1], 0.0, 0).group_states(0).load("1/0/2", "t")


def test_saving_takes_a_small_share_of_the_time(tmp_path: Path) -> None:
    time_s = [100.0]
    episodes = SavedEpisodes(tmp_path, 30.0, 0, clock=lambda: time_s[0])
    assert not SavedEpisodes(tmp_path, None, 0).may_save(0.0)
    time_s[0] = 129.0
    assert not episodes.may_save(100.0), "29 s have passed"
    time_s[0] = 130.0
    assert episodes.may_save(100.0)
    episodes.add(1.0)
    assert not episodes.may_save(100.0), "1 s of 30 s"
    time_s[0] = 100.0 + 1.0 / SHARE
    assert episodes.may_save(100.0)
