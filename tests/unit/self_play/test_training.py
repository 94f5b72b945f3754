"""Self-play in a training run: snapshots on disk, the engines that play them, lineups, and the record of a step."""

import asyncio
import json
from dataclasses import dataclass, field

import torch

from agentrl.config.learner import LoraConfig
from agentrl.config.self_play import PoolConfig, SelfPlayConfig
from agentrl.core.lineup import EndpointSeat, PolicySeat, ScriptedSeat
from agentrl.core.task import Task
from agentrl.core.types import Failure, FailureKind, Rollout, SeatRecord, StopReason
from agentrl.data.jobs import Job
from agentrl.learner.checkpoints import STATE
from agentrl.models.weight_files import WeightFiles
from agentrl.self_play.game_scores import PlayedStrategy
from agentrl.self_play.league import League, LeagueLog, read_league
from agentrl.self_play.snapshots import OpponentEngine, SnapshotEngines, SnapshotFolder
from agentrl.self_play.training import SelfPlay
from agentrl.testing import FakeEngine, FakeLearner

TASKS = 8


def learner():
    return FakeLearner({"model.weight": torch.ones(2, 3)})


@dataclass
class FakeFleet:
    """A fleet of one engine."""

    sampler: str
    live: list[FakeEngine] = field(default_factory=lambda: [FakeEngine()])
    restarted: object = None

    def set_weight_sync(self, sync):
        self.restarted = sync


def loaded_snapshots(engine):
    """Names of the snapshots that an engine has loaded, in order."""
    return [folder.name for folder, _ in engine.folders]


def self_play(folder, mix=None, *, engines=2, endpoints=None, lora=None, **pool):
    section = SelfPlayConfig(
        mix=mix or {"mirror": 1, "past": 2, "fixed:random": 1}, engines=engines, pool=PoolConfig(**pool),
        endpoints=endpoints or {},
    )  # fmt: skip
    fleets = [FakeFleet(f"sampler {number}") for number in range(engines)]
    snapshots = SnapshotFolder(folder, lora=lora)
    play = SelfPlay(
        config=section, league=League(section, 5), agents=["player_0", "player_1"], tasks=TASKS, snapshots=snapshots,
        engines=SnapshotEngines([OpponentEngine(fleet, snapshots) for fleet in fleets]),
        log=LeagueLog(folder, None).begin(),
    )  # fmt: skip
    return play, fleets


def jobs(position, samples=2):
    task = position % TASKS
    name = f"{position // TASKS + 1}/{task}"
    return [Job(Task(f"t{task}", ()), sample, f"{name}/{sample}", 7) for sample in range(samples)]


def seats_of(play, step):
    """The episodes of the groups of a step with their players; all groups are admitted, and then run at the same time."""

    async def group(position):
        async with play.assign_players(position, jobs(position)) as played_jobs:
            await asyncio.sleep(0)
            return played_jobs

    async def main():
        positions = range((step - 1) * TASKS, step * TASKS)
        for position in positions:
            play.choose_opponent(position)
        return [job for group_jobs in await asyncio.gather(*map(group, positions)) for job in group_jobs]

    return asyncio.run(main())


def names(folder):
    return sorted(path.name for path in (folder / "snapshots").iterdir())


def test_a_snapshot_is_a_folder_that_engines_load(tmp_path):
    play, _ = self_play(tmp_path, snapshot_every=2)
    for step in range(4):
        asyncio.run(play.on_weights(learner(), step))
        asyncio.run(play.on_weights(learner(), step))  # of a resume, or another sync of the same step
    assert names(tmp_path) == ["step_000000", "step_000002"]
    assert play.league.pool.steps == [0, 2]
    assert WeightFiles(tmp_path / "snapshots" / "step_000002", "test").specs()


def test_without_past_opponents_there_are_no_snapshots(tmp_path):
    play, _ = self_play(tmp_path, {"mirror": 1.0})
    asyncio.run(play.on_weights(learner(), 0))
    assert not (tmp_path / "snapshots").exists()


def test_a_snapshot_stays_on_disk_as_long_as_a_checkpoint_has_it(tmp_path):
    play, _ = self_play(tmp_path, snapshot_every=1, keep=1)
    checkpoint = tmp_path / "checkpoints" / "step_000001"
    for step in range(3):
        asyncio.run(play.on_weights(learner(), step))
        if step == 1:
            checkpoint.mkdir(parents=True)
            state = {"source": {"self_play": play.league.state()}}
            (checkpoint / STATE).write_text(json.dumps(state))
    assert names(tmp_path) == ["step_000001", "step_000002"]
    (checkpoint / STATE).unlink()
    asyncio.run(play.on_weights(learner(), 3))
    assert names(tmp_path) == ["step_000003"]


def test_every_episode_has_its_players_and_engines_load_a_snapshot_once(tmp_path):
    play, fleets = self_play(tmp_path, snapshot_every=1)
    for step in range(2):
        asyncio.run(play.on_weights(learner(), step))
    episodes = []
    for step in (1, 2):
        episodes += seats_of(play, step)
    loaded = [loaded_snapshots(engine) for fleet in fleets for engine in fleet.live]
    assert sorted(loaded) == [["step_000000"], ["step_000001"]], "kept in the second step"
    assert {engine.sampled_version for fleet in fleets for engine in fleet.live} == {0, 1}
    kinds = set()
    for job in episodes:
        seats = job.lineup.seats
        kinds.add(job.lineup.opponent)
        if job.lineup.opponent == "mirror":
            assert seats == {}
            continue
        [(agent, seat)] = seats.items()
        assert agent in play.agents
        if job.lineup.opponent == "past":
            assert isinstance(seat, PolicySeat)
            assert not seat.trained
            assert seat.sampler in ("sampler 0", "sampler 1")
        else:
            assert seat == ScriptedSeat("random")
    assert kinds == {"mirror", "past", "fixed:random"}
    swapped = [
        {agent for job in episodes[at : at + 2] for agent in job.lineup.seats} for at in range(0, len(episodes), 2)
    ]
    assert set(map(frozenset, swapped)) == {frozenset(), frozenset(play.agents)}, "both seats in every task"


def test_a_model_at_an_endpoint_is_an_opponent_that_is_rated(tmp_path):
    endpoints = {"big": {"url": "http://127.0.0.1:1/v1", "model": "big-model"}}
    play, _ = self_play(tmp_path, {"endpoint:big": 1.0}, endpoints=endpoints)
    episodes = seats_of(play, 1)
    assert {job.lineup.opponent for job in episodes} == {"endpoint:big"}
    assert {seat.name for job in episodes for seat in job.lineup.seats.values()} == {"big"}
    assert all(isinstance(seat, EndpointSeat) for job in episodes for seat in job.lineup.seats.values())
    play.on_step_trained(1, range(TASKS), rollouts_of(episodes))
    assert "self_play/score/big" in play.metrics
    assert "endpoint:big" in play.league.ratings.table


def test_a_restarted_engine_loads_its_snapshot_again(tmp_path):
    play, [fleet] = self_play(tmp_path, {"past": 1.0}, engines=1)
    asyncio.run(play.on_weights(learner(), 0))
    fleet.live.clear()
    seats_of(play, 1)
    again = FakeEngine()
    assert asyncio.run(fleet.restarted(again)) == 0
    assert loaded_snapshots(again) == ["step_000000"]


def seat_record(lineup, agent):
    player = lineup.seat(agent, "")
    return SeatRecord(agent, agent, player.name, isinstance(player, PolicySeat) and player.trained, ())


def rollouts_of(episodes):
    """A win of the first seat in each episode; the last episode failed."""
    seat_rollouts = []
    for job in episodes:
        for seat, agent in enumerate(("player_0", "player_1")):
            if agent not in job.lineup.seats:
                seat_rollouts.append(
                    Rollout(
                        job.task.id,
                        f"{job.rollout_id}.{agent}",
                        [],
                        1.0 - 2 * seat,
                        StopReason.TERMINATED,
                        sampled_tokens=3,
                        agent=agent,
                        role=agent,
                        seat=seat,
                        opponent=job.lineup.opponent,
                        episode=job.rollout_id,
                        seat_rewards=(1.0, -1.0),
                        seats=tuple(seat_record(job.lineup, rollout) for rollout in ("player_0", "player_1")),
                    )
                )
    last = episodes[-1].rollout_id
    for rollout in seat_rollouts:
        if rollout.episode == last:
            rollout.failure = Failure(FailureKind.SAMPLER, "SamplerError", "gone")
    return seat_rollouts


def test_a_step_is_recorded_once_it_is_trained(tmp_path):
    play, _ = self_play(tmp_path)
    asyncio.run(play.on_weights(learner(), 0))
    state_before = play.league.state()
    rollouts = rollouts_of(seats_of(play, 1))
    assert play.league.state() == state_before, "a step that fails is sampled again"
    assert [*play.opponents] == [*range(TASKS)]
    play.on_step_trained(1, range(TASKS), rollouts)
    assert play.opponents == {}
    games = sum(record.games for record in play.league.results.records.values()) / 2
    assert games == 15, "one of sixteen failed"
    assert play.metrics["self_play/asymmetry"] == 1.0
    [row] = read_league(tmp_path)
    assert (row["step"], row["ratings"]) == (1, play.league.ratings.state())


def test_a_warning_of_the_alarm_is_logged(tmp_path, caplog):
    play, _ = self_play(tmp_path, {"mirror": 1.0})
    for step in range(1, 6):
        play.on_step_trained(step, range(step * TASKS), rollouts_of(seats_of(play, step)))
    assert "step 5: in mirror play player_0 scored 1.00 and player_1 0.00 for 5 steps" in caplog.text


class FakeScores:
    """Reads how an engine plays: by the name of the snapshot that it holds."""

    async def score_strategy(self, fleet):
        return PlayedStrategy({"played by": {loaded_snapshots(fleet.live[0])[-1]: 1.0}}, 0.0)

    def pool_metrics(self, snapshots):
        return {name: 0.0 for strategy in snapshots for name in strategy.moves["played by"]}


def test_each_snapshot_of_the_pool_is_scored_once(tmp_path):
    play, [fleet] = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1, keep=2)
    for step in range(3):
        asyncio.run(play.on_weights(learner(), step))
        play.begin_evaluation()
        metrics = asyncio.run(play.pool_metrics(FakeScores()))
        assert list(metrics) == play.league.pool.names
    assert loaded_snapshots(fleet.live[0]) == ["step_000000", "step_000001", "step_000002"]


def test_an_evaluation_keeps_the_pool_with_which_it_began(tmp_path):
    play, _ = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1, keep=1)
    asyncio.run(play.on_weights(learner(), 0))
    rating = play.begin_evaluation()
    assert rating == {"eval/rating": play.league.ratings.rating("policy").low}
    for step in (1, 2):
        asyncio.run(play.on_weights(learner(), step))
    assert names(tmp_path) == ["step_000000", "step_000002"], "it is scored later"
    assert list(asyncio.run(play.pool_metrics(FakeScores()))) == ["step_000000"]
    asyncio.run(play.on_weights(learner(), 3))
    assert names(tmp_path) == ["step_000000", "step_000003"], "the engine would load it again after a restart"


def test_a_snapshot_stays_on_disk_as_long_as_an_engine_holds_it(tmp_path):
    play, [fleet] = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1, keep=1)
    asyncio.run(play.on_weights(learner(), 0))
    seats_of(play, 1)
    play.on_step_trained(1, range(TASKS), [])
    for step in (1, 2):
        asyncio.run(play.on_weights(learner(), step))
    assert asyncio.run(fleet.restarted(FakeEngine())) == 0
    seats_of(play, 2)
    play.on_step_trained(2, range(2 * TASKS), [])
    asyncio.run(play.on_weights(learner(), 3))
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_a_snapshot_stays_on_disk_as_long_as_a_group_plays_it(tmp_path):
    play, _ = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1, keep=1)
    asyncio.run(play.on_weights(learner(), 0))
    assert play.choose_opponent(TASKS - 1) == "step_000000"
    for step in (1, 2):
        asyncio.run(play.on_weights(learner(), step))
    assert names(tmp_path) == ["step_000000", "step_000002"]
    play.on_step_trained(3, range(TASKS), [])
    asyncio.run(play.on_weights(learner(), 3))
    assert names(tmp_path) == ["step_000003"]


def test_a_group_that_is_admitted_late_plays_the_snapshot_that_was_drawn_for_it(tmp_path):
    """The first group of a step is admitted, the pool changes, and the others are admitted."""
    play, _ = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1, keep=1)
    asyncio.run(play.on_weights(learner(), 0))
    play.choose_opponent(0)
    play.on_step_trained(1, range(1), [])
    for step in (1, 2):
        asyncio.run(play.on_weights(learner(), step))

    async def late() -> None:
        for position in range(1, TASKS):
            assert play.choose_opponent(position) == "step_000000"
            async with play.assign_players(position, jobs(position)):
                assert "step_000000" in names(tmp_path)

    asyncio.run(late())
    play.on_step_trained(3, range(TASKS), [])
    play.choose_opponent(TASKS)
    asyncio.run(play.on_weights(learner(), 3))
    assert "step_000002" in names(tmp_path), "of groups that are not admitted yet"


def test_a_snapshot_stays_on_disk_for_a_checkpoint_that_is_being_written(tmp_path):
    play, _ = self_play(tmp_path, snapshot_every=1, keep=1)
    asyncio.run(play.on_weights(learner(), 0))
    state = play.state()
    for step in (1, 2):
        asyncio.run(play.on_weights(learner(), step))
    assert state["snapshots"] == [0]
    assert names(tmp_path) == ["step_000000", "step_000002"]
    play.state()  # of the next one, which begins when this is complete
    asyncio.run(play.on_weights(learner(), 3))
    assert names(tmp_path) == ["step_000002", "step_000003"]


def test_an_engine_changes_its_snapshot_for_the_first_that_waits(tmp_path):
    play, [fleet] = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1)
    for step in range(2):
        asyncio.run(play.on_weights(learner(), step))
    order = []

    async def use(snapshot, turns):
        async with play.engines.engine_with(snapshot):
            order.append(snapshot)
            for _ in range(turns):
                assert play.engines.engines[0].snapshot == snapshot
                await asyncio.sleep(0)

    async def main():
        await asyncio.gather(
            *(use(f"step_00000{step_number}", turns) for step_number, turns in ((0, 9), (0, 5), (1, 5), (0, 5)))
        )

    asyncio.run(main())
    assert order == ["step_000000", "step_000000", "step_000001", "step_000000"], "in the order of requests"
    assert loaded_snapshots(fleet.live[0]) == ["step_000000", "step_000001", "step_000000"]


def test_without_engines_no_snapshot_is_scored(tmp_path):
    play, _ = self_play(tmp_path, {"mirror": 1.0})
    play.league.add_snapshot(0)  # of a run that is resumed with another mix
    play.engines = SnapshotEngines([])
    assert asyncio.run(play.pool_metrics(FakeScores())) == {}


def test_more_snapshots_than_engines_wait_for_another_step(tmp_path):
    play, [fleet] = self_play(tmp_path, {"past": 1.0}, engines=1, snapshot_every=1)
    for step in range(4):
        asyncio.run(play.on_weights(learner(), step))
    for step in range(1, 30):
        seats_of(play, step)
    assert {*loaded_snapshots(fleet.live[0])} == {f"step_00000{number}" for number in range(4)}


def test_a_snapshot_of_several_policies_has_the_adapters_of_each_and_its_agents_play_them(tmp_path):
    lora = LoraConfig(rank=2, policies=["a", "b"])
    play, fleets = self_play(tmp_path, {"past": 1}, engines=1, lora=lora, snapshot_every=1)
    play.policies = {"player_0": "a", "player_1": "b"}
    name = "base_model.model.q.lora_A.weight"
    adapters = {policy: {name: torch.full((2, 3), float(ord(policy)))} for policy in "ab"}
    asyncio.run(play.on_weights(FakeLearner(adapters=adapters), 0))
    episodes = seats_of(play, 1)
    adapters = fleets[0].live[0].adapters
    assert {name: float(adapter.tensors[0][1][0, 0]) for name, adapter in adapters.items()} == {"a": 97, "b": 98}
    for job in episodes:
        seats = {agent: job.lineup.seat(agent, "") for agent in play.agents}
        assert {agent: seat.policy for agent, seat in seats.items()} == play.policies
        assert sorted((seat.trained, seat.sampler) for seat in seats.values()) == [(False, "sampler 0"), (True, None)]
