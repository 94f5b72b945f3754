"""Rollouts that are sampled with the policy, and their records."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

from typing_extensions import override

from agentrl.batch.groups import kept_rollouts
from agentrl.cluster.run_cluster import RunCluster
from agentrl.config.runners import rollout_form, with_runner_count
from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.data.buffer import DataBuffer
from agentrl.data.jobs import TaskJobs
from agentrl.data.task_sources import TaskSources, count_epochs, make_order, read_splits
from agentrl.inference.launch.launcher import EngineSpec, Launcher
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.models.engine_float8 import DTYPE as FLOAT8
from agentrl.models.float8 import is_quantized
from agentrl.obs.progress import Stopwatch
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services, open_services
from agentrl.self_play.training import SelfPlay, open_self_play
from agentrl.train.engine_weights import EngineWeights, open_engine_weights, sent_dtype, started_overrides
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.scheduler import GroupScheduler, open_scheduler
from agentrl.train.pipeline.token_ages import mask_stale, staleness_metrics
from agentrl.train.rollout_source import Consumer, RolloutSource, RunInputs, StepRollouts, TaskPosition
from agentrl.weight_sync.adapter import for_adapters
from agentrl.weight_sync.registry import for_transport

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class RunRecords:
    """The two places in which rollouts are kept."""

    recorder: RolloutRecorder
    """Files by step, for users."""
    journal: Journal
    """For a resumed run."""
    mask_older_than: int | None
    """``async.mask_older_than``."""
    resume_after: int | None
    """Files by step after this one are deleted, as these steps are run again; None deletes none."""
    _metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of a step that is trained again."""

    @classmethod
    def open(cls, run: RunInputs) -> RunRecords:
        """Return the records of a run, of which nothing is changed before `begin`.

        Raises:
            ConfigError: see `Journal`.
        """
        config = run.config
        recorder = RolloutRecorder(run.folder / "rollouts", keep=config.obs.rollouts, form=rollout_form(config))
        journal = Journal(
            run.folder,
            step=run.step,
            position=run.position,
            keep=config.train.keep,
            save_episodes_s=config.train.save_episodes_s,
            keys=run.keys,
            discard=run.discard,
        )
        return cls(recorder, journal, config.asynchronous.mask_older_than, run.resume_after)

    def begin(self) -> None:
        """Delete what was recorded of steps after the checkpoint, except what the journal uses again."""
        self.journal.begin()
        if self.resume_after is not None:
            self.recorder.delete_after(self.resume_after)

    def read_step(self, step: int) -> StepRollouts:
        """Return the rollouts with which ``step``, which is trained again, was trained before the run was resumed.

        Raises:
            ConfigError: the journal is damaged.
        """
        batch = self.journal.batch(step)
        assert batch is not None, "the step is trained again"
        rollouts = [rollout for position in batch.positions for rollout in self.journal.read_group(position)]
        filtered = [rollout for position in batch.dropped for rollout in self._read_dropped(position)]
        self._metrics = {"rollout/from_journal": 1.0} | staleness_metrics(rollouts, step - 1)
        if self.mask_older_than is not None:
            self._metrics["async/masked_share"] = mask_stale(rollouts, step - 1, self.mask_older_than)
        self.recorder.write(step, [*rollouts, *filtered])
        return StepRollouts(rollouts, TaskPosition(batch.first, batch.ahead), filtered, sampled=False)

    def metrics(self) -> dict[str, float]:
        """Return metrics of a step that was trained again since the last call."""
        metrics, self._metrics = self._metrics, {}
        return metrics

    def _read_dropped(self, position: int) -> list[Rollout]:
        """Return the rollouts of a group that was dropped, marked so."""
        group = self.journal.read_group(position)
        for rollout in kept_rollouts(group):
            rollout.dropped, rollout.filtered = True, self.journal.reason(position)
        return group

    async def record_trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Record that a step was trained, with the advantages of its rollouts by ``rollout_id``."""
        await asyncio.to_thread(self.recorder.finish, step, advantages)
        await self.journal.record_trained(step)


async def start_services(
    run: RunInputs, cluster: RunCluster, tasks: TaskSources, exits: AsyncExitStack
) -> tuple[Services, str | None]:
    """Start engines, by ``cluster``, and tool servers, which ``exits`` ends.

    Before a warm start the engines have the weights that it trains. They get those of the learner before they sample.

    Returns:
        the services, and the dtype in which weights are sent; see `sent_dtype`.
    """
    config = for_transport(await asyncio.to_thread(for_adapters, run.config, run.shape))
    config = with_runner_count(config, cluster.runner_cores)
    if run.warm_start is not None and "dtype" not in config.sampler.sglang:
        options = {"dtype": "bfloat16"} | config.sampler.sglang  # as for what a warm start writes
        config = config.model_copy(update={"sampler": config.sampler.model_copy(update={"sglang": options})})
    make_launcher = await cluster.engine_launcher()
    overrides = started_overrides(config, run.shape)

    def launcher(spec: EngineSpec) -> Launcher:
        return make_launcher(replace(spec, keep_minutes=config.sampler.keep_minutes, overrides=overrides))

    opening = open_services(
        config,
        tasks,
        run.shape,
        run.folder,
        config.run.seed,
        launcher=launcher,
        judge_launcher=await cluster.judge_launcher(),
        runners=cluster.runners(),
    )
    services = await exits.enter_async_context(opening)
    dtype = await sent_dtype(config.weights, services.fleet)
    if config.placement.shares_gpus:  # the learner loads next
        await asyncio.gather(*(engine.memory.release() for engine in services.fleet.live))
    return services, dtype


async def open_sampling(
    run: RunInputs,
    services: Services,
    dtype: str | None,
    tasks: TaskSources,
    interrupt: Interrupt,
    exits: AsyncExitStack,
    cluster: RunCluster,
) -> Sampling:
    """Return the rollout source of services that `start_services` has started, once the initial weights are there."""
    config = services.config
    records = RunRecords.open(replace(run, config=config))
    weights = await open_engine_weights(
        config, run.folder, run.model, services, dtype, exits, cluster.evaluation_launcher()
    )
    vocabulary = services.fleet.vocabulary
    snapshot_dtype = dtype
    if started_overrides(config, run.model) is not None:  # engines of snapshots are as the folder
        snapshot_dtype = FLOAT8 if is_quantized(run.model) else "bfloat16"
    self_play = await open_self_play(config, run.folder, run.model, vocabulary, exits, snapshot_dtype, run.resume_after)
    if self_play is not None:
        services.reserved += self_play.engines.fleets
        opponents = {group.position: group.opponent for group in records.journal.pending}
        self_play.restore(run.state["source"].get("self_play"), opponents)
    _log_lost_sessions(config, records.journal)
    splits = read_splits(config, tasks)
    batch_size = int(records.journal.first_keys["rollout.batch_size"])
    jobs = TaskJobs(config, make_order(config, splits), batch_size, count_epochs(config, splits))
    sampling = Sampling(config, services, jobs, weights, records, interrupt, self_play)
    await weights.open()
    exits.push_async_callback(sampling.aclose)
    if (data := run.state["source"].get("data")) is not None:
        jobs.buffer.load_state(data)
    sampling.config = with_steps(config, count_steps(config, run.step, jobs.buffer))
    return sampling


def count_steps(config: Config, step: int, buffer: DataBuffer) -> int:
    """Return the steps of a run: ``train.steps``, or as many as its tasks fill if those of ``train.epochs`` are fewer.

    Args:
        config: of the run.
        step: finished steps.
        buffer: the tasks of the run after them.
    """
    limit, untrained = config.train.steps, buffer.untrained
    steps = None if untrained is None else step + untrained // config.rollout.batch_size
    counts = [count for count in (limit, steps) if count is not None]
    assert counts, "a configuration has train.steps or train.epochs"
    return min(counts)


def with_steps(config: Config, steps: int) -> Config:
    """Return a configuration with ``train.steps``."""
    return config.model_copy(update={"train": config.train.model_copy(update={"steps": steps})})


def _log_lost_sessions(config: Config, journal: Journal) -> None:
    """Log what becomes of groups whose agents lost their sessions with the run."""
    lost = sum(not group.finished for group in journal.pending)
    if lost and any(source.rollout.agent.brings_tasks for source in config.by_source().values()):
        _log.warning(
            "rollout.agent.tasks=application: %d groups had not ended when the run did. Tasks that the application had brought "
            "for them are given up, and are trained only if it starts their sessions again",
            lost,
        )
    elif lost and any(source.rollout.agent.setting is not None for source in config.by_source().values()):
        _log.info(
            "%d groups had not ended when the run did. Conversations of agents end with it, so their episodes are sampled again",
            lost,
        )


@dataclass(slots=True)
class Sampling(RolloutSource):
    """Samples rollouts with the engines and the tool servers of a run."""

    samples: ClassVar[bool] = True
    config: Config
    services: Services
    tasks: TaskJobs
    """The episodes of the run's tasks."""
    weights: EngineWeights
    records: RunRecords
    interrupt: Interrupt
    self_play: SelfPlay | None = None
    """Opponents of the policy, if ``self_play`` is set."""
    _scheduler: GroupScheduler | None = field(default=None, init=False)
    """Runs the groups, from the first step on that samples some."""
    _batch: StepRollouts | None = field(default=None, init=False)
    """Rollouts of the step in training."""

    @property
    @override
    def steps(self) -> int:
        assert self.config.train.steps is not None, "`with_steps` has set it"
        return self.config.train.steps

    @property
    @override
    def epoch_steps(self) -> int | None:
        epochs = self.tasks.buffer.epochs
        return None if epochs is None else epochs.limit // self.config.rollout.batch_size

    @property
    @override
    def progress(self) -> float:
        epochs, untrained = self.tasks.buffer.epochs, self.tasks.buffer.untrained
        return 0.0 if epochs is None or untrained is None else max(0.0, 1 - untrained / epochs.limit)

    @property
    @override
    def pad_token_id(self) -> int:
        return self.services.renderer.pad_token_id

    def set_concurrency(self, episodes: int) -> None:
        """Let so many episodes run at the same time from the next step on; for runs without runner processes.

        With ``async.max_staleness`` the episodes in progress are not counted.
        """
        self.config.rollout.concurrency = episodes
        if self._scheduler is not None:
            self._scheduler.runner = self.services.runner()

    async def begin(self) -> None:
        """Delete what an earlier process recorded of steps after the checkpoint, and what its tool servers have left of episodes
        that do not continue: everything is checked and loaded.
        """
        self.records.begin()
        await self.services.tools.remove_left(self.records.journal.episodes.find_mentioned)
        if self.self_play is not None:
            self.self_play.log.begin()

    def add_critic(self, critic: CriticGroup | None) -> None:
        """Let the critic share the GPUs, if the learner does."""
        self.weights.gpus.critic = critic

    @override
    async def sync_weights(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:
        """A step that is trained again samples nothing, and needs no sync.

        Raises:
            EngineError: a live engine did not take them.
            RunStopped: a signal has arrived, which may have ended the engines, too.
        """
        self.interrupt.check()
        samples = self.records.journal.batch(version + 1) is None
        await self.weights.sync_weights(learner, version, watch, samples=samples)
        if self.self_play is not None:
            with watch("snapshot"):
                await self.self_play.on_weights(learner, version)

    @override
    async def release_gpus_for_training(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Nothing is released unless the engines share GPUs with the learner.

        Raises:
            EngineError: a live engine keeps its memory.
            LearnerError: there is not enough memory for the learner.
        """
        await self.weights.gpus.switch_to_learner(learner, watch)

    @override
    async def get_rollouts(
        self, step: int, position: TaskPosition, consume: Consumer | None = None
    ) -> StepRollouts | None:
        """The journal has the rollouts of a step that is trained again."""
        if self.records.journal.batch(step) is not None:
            self._batch = await self._read_journal(step)
            return self._batch
        if self._scheduler is None:
            self._scheduler = self._open_scheduler(step, position)
        if not self._scheduler.overlaps_training:
            self.services.fleet.metrics()  # drops what was measured before the step, such as in an evaluation
        first = next(position.untrained_positions())
        if self._writes_finished and self.tasks.buffer.has_task(first):
            first_task = await asyncio.to_thread(self.tasks.buffer.__getitem__, first)
            self.records.recorder.begin(step, first_task.id)
        async with self.weights.learner_idle():
            groups = await self._scheduler.take(consume and partial(self._with_learner, consume))
        if groups is None:
            return None
        next_position = position.after([*groups.positions, *groups.filtered_positions])
        await self.records.journal.record_taken(step, groups.positions, next_position, groups.filtered_positions)
        unwritten = groups.filtered if self._writes_finished else [*groups.rollouts, *groups.filtered]
        await asyncio.to_thread(self.records.recorder.write, step, unwritten)
        for rollout in (*groups.rollouts, *groups.filtered):
            rollout.record = b""  # it is in all files
        self._batch = StepRollouts(groups.rollouts, next_position, groups.filtered)
        return self._batch

    async def _read_journal(self, step: int) -> StepRollouts:
        """Return the rollouts with which ``step`` was trained before the run was resumed, once their tasks are drawn again."""
        self.interrupt.check()
        await asyncio.to_thread(self.tasks.buffer.draw, self.records.journal.drawn_positions(step))
        return await asyncio.to_thread(self.records.read_step, step)

    def _open_scheduler(self, step: int, position: TaskPosition) -> GroupScheduler:
        scheduler = open_scheduler(
            self.config,
            step - 1,
            position,
            self.records.journal,
            runner=self.services.runner(),
            group_jobs=self.tasks.group,
            guard=self._guard_episodes,
            on_done=self._write_finished,
            self_play=self.self_play,
            has_task=self.tasks.buffer.has_task,
        )
        self.weights.on_synced = scheduler.set_version
        return scheduler

    @asynccontextmanager
    async def _guard_episodes(self) -> AsyncIterator[None]:
        async with self.interrupt.guard_episodes(self.services.check):
            with self.weights.generating():
                yield

    async def _with_learner(self, consume: Consumer, rollouts: list[Rollout]) -> None:
        async with self.weights.learner_lock:
            await consume(rollouts)

    @property
    def _writes_finished(self) -> bool:
        """Whether rollouts are written as they finish: it is known which step trains them, and that no filter drops them."""
        assert self._scheduler is not None, "rollouts are written while the scheduler runs"
        return not self._scheduler.overlaps_training and not self.config.rollout.filter_groups.filters

    def _write_finished(self, rollout: Rollout) -> None:
        if self._writes_finished:
            self.records.recorder.write(self.weights.version + 1, rollout)

    async def aclose(self) -> None:
        """Cancel all episodes, and close the data source."""
        if self._scheduler is not None:
            await self._scheduler.aclose()
        self.tasks.close()

    @override
    def state(self) -> dict[str, Any]:
        league = {} if self.self_play is None else {"self_play": self.self_play.state()}
        return {"data": self.tasks.buffer.state(), **league}

    @override
    def metrics(self) -> dict[str, float]:
        metrics = self.services.fleet.metrics() | self.weights.metrics | self.tasks.buffer.metrics()
        metrics |= self.records.metrics() | ({} if self.self_play is None else self.self_play.metrics)
        if (time_sharing := self.services.time_sharing) is not None:
            metrics |= time_sharing.metrics()
        return metrics | ({} if self._scheduler is None else self._scheduler.metrics())

    @override
    async def on_step_trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Records also the results of tasks and the games of self-play."""
        assert self._batch is not None, "a step trains the rollouts of get_rollouts"
        rollouts = [*self._batch.rollouts, *self._batch.filtered]
        self.tasks.on_trained(self._batch.position, rollouts)
        if self.self_play is not None:
            self.self_play.on_step_trained(step, self._batch.position, rollouts)
        await self.records.record_trained(step, advantages)

    @override
    def decode(self, token_ids: Sequence[int]) -> str:
        return self.services.renderer.decode(token_ids)
