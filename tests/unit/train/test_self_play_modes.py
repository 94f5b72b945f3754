"""Self-play with staleness, filters, evaluations in the background, kills and resumes, in virtual time."""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.types import Generation, Message, Prompt, Rollout, SamplingParams
from agentrl.learner.checkpoints import latest_checkpoint, read_state
from agentrl.obs.journal import read_journal
from agentrl.obs.rollouts import read_rollouts, rollout_files
from agentrl.self_play.games import POLICY
from agentrl.self_play.league import League, LeagueLog, snapshot_name
from agentrl.self_play.snapshots import OpponentEngine, SnapshotEngines, SnapshotFolder
from agentrl.self_play.training import SelfPlay, players_by_seat
from agentrl.testing import FakeLearner
from agentrl.train.sampling import RunRecords
from agentrl.train.trainer import Trainer
from tests.unit.train.async_world import Engines, fleet_of, make_config, steps, train
from tests.unit.train.test_journal import Killed, kill_at

__all__ = ["kill_at"]
STEPS = 8


class Duel(MultiAgentEnv):
    """The longer answer wins."""

    possible_agents = ["first", "second"]  # noqa: RUF012

    def step(self, actions: dict[str, Message]) -> Any:
        """End the game."""
        mine, theirs = (len(actions[agent].content) for agent in self.possible_agents)
        self.agents, self.acting = [], ()
        won = float((mine > theirs) - (mine < theirs))
        ends = dict.fromkeys(self.possible_agents, True)
        views = {agent: {"messages": ()} for agent in self.possible_agents}
        infos: dict[str, Any] = {agent: {} for agent in self.possible_agents}
        return views, {"first": won, "second": -won}, ends, dict.fromkeys(self.possible_agents, False), infos


class SnapshotEngine(Engines):
    """Plays the snapshot that it has loaded."""

    def __init__(self, seed: int, played: dict[str, str]) -> None:
        """Write who played in which episode to ``played``."""
        super().__init__(seed)
        self.played = played

    @property
    def updates(self) -> SnapshotEngine:
        """Return the engine."""
        return self

    async def from_disk(self, folder: Path, version: int) -> None:
        """Load a snapshot, of a folder that is complete."""
        assert self.running == 0, "a game would change its opponent"
        assert (folder / "model.safetensors.index.json").exists()
        await asyncio.sleep(1.0)
        assert self.running == 0
        self.version = version

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        """Return the script's answer."""
        name = snapshot_name(self.version)
        generation = await super().generate(prompt, params, **names)
        assert snapshot_name(self.version) == name
        self.played[names["session_id"].rpartition(".")[0]] = name
        return generation


class Run:
    """A run in a folder, which may be killed and go on."""

    def __init__(self, folder: Path, *overrides: str, engines: int = 1) -> None:
        """Train `STEPS` steps."""
        pool = "{snapshot_every: 1, keep: 2, choose: pfsp}"
        self.folder, self.engines = folder, engines
        self.played: dict[str, str] = {}
        """The snapshot that played in an episode, by what its engine says."""
        self.config = make_config(
            "env.name=tictactoe",
            f"self_play={{mix: {{mirror: 1, past: 2, 'fixed:random': 1}}, engines: {engines}, pool: {pool}}}",
            "algo.advantage.name=rae",
            f"train.steps={STEPS}",
            *overrides,
        )

    def train(self, seed: int = 0, learner: FakeLearner | None = None) -> Trainer:
        """Train from the newest checkpoint on."""
        learner = learner or FakeLearner({"weight": torch.ones(2)})
        return train(self.folder, self.config, seed=seed, learner=learner, env=Duel, self_play=self._self_play)

    def _self_play(self, records: RunRecords, state: Mapping[str, Any], state_after: int | None) -> SelfPlay:
        self_play = self.config.self_play
        assert self_play is not None
        fleets = [fleet_of(SnapshotEngine(number, self.played)) for number in range(self.engines)]
        snapshots = SnapshotFolder(self.folder)
        actual_self_play = SelfPlay(
            config=self_play,
            league=League(self_play, 0),
            agents=Duel.possible_agents,
            tasks=self.config.rollout.batch_size,
            snapshots=snapshots,
            engines=SnapshotEngines([OpponentEngine(fleet, snapshots) for fleet in fleets]),
            log=LeagueLog(self.folder, state_after).begin(),
        )
        if "source" in state:
            actual_self_play.league.load(state["source"]["self_play"])
        actual_self_play.opponents = {group.position: group.opponent for group in records.journal.pending}
        return actual_self_play

    def rollouts(self) -> dict[int, list[Rollout]]:
        """Return the rollouts of each step."""
        return {step: read_rollouts(path) for step, path in rollout_files(self.folder).items()}

    def state(self) -> dict[str, Any]:
        """Return the state of the newest checkpoint."""
        newest = latest_checkpoint(self.folder / "checkpoints")
        assert newest is not None
        return read_state(newest)

    def check(self) -> None:
        """Each game counted once, against the opponent of its group's admission, and in the order of steps."""
        journal, again = read_journal(self.folder), SelfPlay.__new__(SelfPlay)
        assert journal is not None
        assert journal.faults() == []
        assert self.config.self_play is not None
        league, past = League(self.config.self_play, 0), 0
        league.add_snapshot(0)
        for step, rollouts in self.rollouts().items():
            batch = journal.batches[step]
            names = {journal.groups[position].opponent for position in (*batch.positions, *batch.dropped)}
            assert {
                next((rollout for rollout in players_by_seat(each) if rollout != POLICY), POLICY) for each in rollouts
            } == names
            for rollout in rollouts:
                if rollout.opponent == "past":
                    past += 1
                    assert self.played[rollout.episode] in players_by_seat(rollout)
            again.league, again.opponents, again.log = league, {}, LeagueLog(self.folder / "again", None).begin()
            again.on_step_trained(step, (), rollouts)
            league.add_snapshot(step)
        assert past > 0
        assert league.state() == self.state()["source"]["self_play"]
        counts = Counter(rollout.rollout_id for step_rollouts in self.rollouts().values() for rollout in step_rollouts)
        assert set(counts.values()) == {1}


@pytest.mark.parametrize(("staleness", "engines"), [(0, 2), pytest.param(1, 1, marks=pytest.mark.long), (4, 2)])
def test_groups_keep_their_opponent_and_games_count_in_the_order_of_steps(
    tmp_path: Path, staleness: int, engines: int
) -> None:
    run = Run(tmp_path, f"async.max_staleness={staleness}", engines=engines)
    run.train()
    run.check()
    rows = steps(tmp_path)
    assert len(rows) == STEPS
    if staleness:
        assert max(row["async/staleness_max"] for row in rows) == staleness


def test_games_of_filtered_groups_count_too(tmp_path: Path) -> None:
    run = Run(tmp_path, "async.max_staleness=2", "rollout.filter_groups.filters=[zero_variance]")
    run.train()
    run.check()
    assert sum(row["rollout/filtered_groups"] for row in steps(tmp_path)) > 0


@pytest.mark.parametrize(("staleness", "save_every"), [(0, 3), (3, 2)])
def test_a_run_that_is_killed_at_random_records_goes_on_with_the_same_opponents(
    tmp_path: Path, kill_at: Callable[[int], None], staleness: int, save_every: int
) -> None:
    rng = random.Random(staleness)
    settings = (f"async.max_staleness={staleness}", f"train.save_every={save_every}")
    run = Run(tmp_path / "killed", *settings, engines=2)
    admitted: dict[int, str] = {}
    for kill in range(4):
        kill_at(rng.randrange(10, 50))
        with suppress(Killed):
            run.train(seed=kill)
        journal = read_journal(run.folder)
        assert journal is not None
        opponents = {position: group.opponent for position, group in journal.groups.items()}
        assert admitted.items() <= opponents.items(), "chosen once"
        admitted = opponents
    kill_at(10**6)
    run.train(seed=9)
    run.check()
    if not staleness:
        full_run = Run(tmp_path / "whole", *settings, engines=2)
        full_run.train(seed=10)
        for key in ("source", "estimators", "position"):
            assert run.state()[key] == full_run.state()[key]


def test_an_evaluation_in_the_background_has_the_rating_of_its_step(tmp_path: Path) -> None:
    run = Run(tmp_path, "async.max_staleness=2", "train.eval_every=2", "eval.background=true")
    run.train()
    run.check()
    lines = [json.loads(line) for line in (tmp_path / "league.jsonl").read_text().splitlines()]
    ratings = {line["step"]: line["ratings"] for line in lines}
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    row_by_name = {row["step"]: row["eval/rating"] for row in rows if "eval/rating" in row}
    lags = {row["step"]: row["eval/lag_steps"] for row in rows if "eval/rating" in row}
    assert row_by_name.keys() == {2, 4, 6, 8}
    assert max(lags.values()) > 0
    league = League(run.config.self_play, 0)  # type: ignore[arg-type]
    for step, rating in row_by_name.items():
        league.ratings = type(league.ratings).from_state(ratings[step])
        assert rating == pytest.approx(league.ratings.rating(POLICY).low)


@pytest.mark.parametrize("engines", [pytest.param(1, marks=pytest.mark.long), 2])
def test_groups_that_are_admitted_long_after_they_were_drawn_find_their_snapshot(tmp_path: Path, engines: int) -> None:
    slow = ("async.max_staleness=2", "rollout.concurrency=2", "rollout.batch_size=8", "train.save_every=0")
    run = Run(tmp_path / "run", *slow, "self_play.mix={past: 1}", "self_play.pool.keep=1", engines=engines)
    run.train()
    run.check()
