"""Rollouts that are sampled with the policy."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.core.types import Rollout
from agentrl.data.jobs import Job, TaskJobs
from agentrl.inference.base import EngineControl
from agentrl.inference.fleet.fleet import Fleet
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.obs.progress import Stopwatch
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.self_play.training import SelfPlay
from agentrl.train.evaluator import EvalEngines, Evaluator
from agentrl.train.gpu_time_sharing import GpuTimeSharing
from agentrl.train.pipeline.records import RunRecords
from agentrl.train.pipeline.scheduler import GroupScheduler
from agentrl.train.rollout_source import Consumer, StepRollouts, TaskPosition
from agentrl.weight_sync.base import SyncedWeights, WeightSync
from agentrl.weight_sync.engines import paused

Engines = Sequence[EngineControl]


@dataclass(slots=True)
class Sampling:
    """Implements `RolloutSource` with the engines and the tool servers of a run.

    A restarted engine gets the learner's weights while episodes run: only then is the learner idle and at the end of a
    whole step. With GPU time sharing, the engine is also started only then.
    """

    config: Config
    services: Services
    tasks: TaskJobs
    """The episodes of the run's tasks."""
    sync: WeightSync
    records: RunRecords
    interrupt: Interrupt
    evaluator: Evaluator | None = None
    """Runs evaluations with the engines."""
    restart_sync: WeightSync | None = None
    """Syncs weights to restarted engines, if ``sync`` cannot while the learner is offloaded."""
    self_play: SelfPlay | None = None
    """Opponents of the policy, if ``self_play`` is set."""
    _gpu_sharing: GpuTimeSharing | None = field(default=None, init=False)
    """None: engines and learner both keep their memory."""
    _scheduler: GroupScheduler | None = field(default=None, init=False)
    """Runs the groups, from the first step on that samples some."""
    _taken: StepRollouts | None = field(default=None, init=False)
    """Rollouts of the step in training."""
    _learner: LearnerGroup | None = field(default=None, init=False)
    _version: int = field(default=0, init=False)
    """Policy version of the learner's weights."""
    _synced: int | None = field(default=None, init=False)
    """Policy version of the engines' weights."""
    _sent: SyncedWeights | None = field(default=None, init=False)
    """What the last sync sent."""
    _sync_metrics: dict[str, float] = field(default_factory=dict, init=False)
    """Of the last sync."""
    _learner_lock: asyncio.Lock = field(default_factory=asyncio.Lock, init=False)
    """Held by the user of the learner: by the trainer, except while episodes run."""

    async def open(self) -> None:
        """Connect to the fleet's restarts; the trainer has exclusive use of the learner from here on."""
        await self._learner_lock.acquire()
        fleet, restarted = self.services.fleet, partial(self._sync_restarted, self.restart_sync or self.sync)
        if self.config.placement.mode == "colocate":
            pause = self.config.weights.pause if self.config.asynchronous.max_staleness else None
            assert pause is None or pause in ("abort", "restart"), "check_placement comes first"
            self._gpu_sharing = GpuTimeSharing(fleet, pause)
            fleet.set_weight_sync(restarted, launch_in=self._learner_lock)
        else:
            fleet.set_weight_sync(restarted)
        if self._eval_engines is not None:
            self._eval_engines.fleet.set_weight_sync(partial(self._sync_restarted, self._eval_engines.sync))

    @property
    def _eval_engines(self) -> EvalEngines | None:
        return None if self.evaluator is None else self.evaluator.engines

    @property
    def steps(self) -> int:
        """Return ``train.steps``."""
        return self.config.train.steps

    @property
    def samples(self) -> bool:
        """Return True."""
        return True

    @property
    def pad_token_id(self) -> int:
        """Return the tokenizer's pad token."""
        return self.services.renderer.pad_token_id

    def add_critic(self, critic: CriticGroup | None) -> None:
        """Let the critic share the GPUs, if the learner does."""
        if self._gpu_sharing is not None:
            self._gpu_sharing.critic = critic

    async def sync_weights(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:
        """Sync the weights to all engines, or only every ``weights.sync_every`` versions.

        Engines that share no GPU with the learner get none before a step that is trained again, for which nothing is sampled.

        Raises:
            EngineError: a live engine did not take them.
            RunStopped: a signal has arrived, which may have ended the engines, too.

        """
        self.interrupt.check()
        self._learner, self._version = learner, version
        if self._gpu_sharing is not None:
            await self._gpu_sharing.switch_to_engines(learner, self._push, watch)
        elif self.records.journal.batch(version + 1) is None and self._sync_is_due():
            with watch("sync"):
                await self._push(watch)
        if self.self_play is not None:
            with watch("snapshot"):
                await self.self_play.on_weights(learner, version)

    def _sync_is_due(self) -> bool:
        return self._synced is None or self._version - self._synced >= self.config.weights.sync_every

    async def release_gpus_for_training(self, learner: LearnerGroup, watch: Stopwatch) -> None:
        """Release the engines' memory if they share GPUs with the learner.

        Raises:
            EngineError: a live engine keeps its memory.
            LearnerError: there is not enough memory for the learner.

        """
        if self._gpu_sharing is not None:
            await self._gpu_sharing.switch_to_learner(learner, watch)

    async def _push(self, watch: Stopwatch | None = None) -> None:
        sent = await self._send(self.services.fleet, self.sync, partial(self._paused, watch or Stopwatch()))
        if sent is not None:
            self._note(sent)
        self._synced = self._version
        if self._scheduler is not None:
            self._scheduler.note_version(self._version)

    async def _send(
        self, fleet: Fleet, sync: WeightSync, around: Callable[[Engines], AbstractAsyncContextManager[None]]
    ) -> SyncedWeights | None:
        """Sync the weights to the live engines of a fleet, if there are any; ``around`` is entered with these engines."""
        assert self._learner is not None, "sync_weights comes first"
        while engines := fleet.live:
            try:
                async with around(engines):
                    return await sync.sync_weights(self._learner, engines, self._version)
            except EngineError:
                await fleet.check_now()
                if set(engines) <= set(fleet.live):
                    raise
                # One engine is lost. It gets the weights after its restart; the others get them from the beginning.
        return None

    def _note(self, sent: SyncedWeights) -> None:
        """Compare what was sent with the sync before."""
        unchanged = self._sent is not None and self._sent.fingerprint == sent.fingerprint
        self._sent = sent
        self._sync_metrics = {"sync/mib": sent.bytes / 2**20, "sync/unchanged": float(unchanged)}

    @asynccontextmanager
    async def _paused(self, watch: Stopwatch, engines: Engines) -> AsyncIterator[None]:
        """Pause the generations in progress for a weight sync, unless they are to end before; ``watch`` gets the seconds."""
        training = self._scheduler is not None and self.config.asynchronous.max_staleness > 0
        shared = self.evaluator is not None and self.evaluator.running and self.evaluator.engines is None
        idle = self._gpu_sharing is not None or not (training or shared)  # with shared GPUs generations are cut already
        if idle or self.config.weights.pause == "finish":
            yield
            return
        with watch("pause"):
            async with paused(engines, self.config.weights.pause):
                yield

    async def _sync_restarted(self, sync: WeightSync, engine: EngineControl) -> int:
        """Sync the newest weights to a restarted engine and return their version."""
        # With GPU time sharing the whole restart already runs under the lock.
        async with nullcontext() if self._gpu_sharing is not None else self._learner_lock:
            assert self._learner is not None, "episodes run only after the first sync"
            await sync.sync_weights(self._learner, [engine], self._version)
            return self._version

    @asynccontextmanager
    async def learner_idle(self) -> AsyncIterator[None]:
        """Let restarted engines use the learner in the body."""
        self._learner_lock.release()
        try:
            yield
        finally:
            await self._learner_lock.acquire()

    async def get_rollouts(self, step: int, position: TaskPosition, consume: Consumer | None = None) -> StepRollouts:
        """Return a step's rollouts. The journal has those of a step that is trained again."""
        if self.records.journal.batch(step) is not None:
            self._taken = await self._from_journal(step)
        else:
            self._taken = await self._sampled(step, position, consume and partial(self._with_learner, consume))
        return self._taken

    async def _with_learner(self, consume: Consumer, rollouts: list[Rollout]) -> None:
        async with self._learner_lock:
            await consume(rollouts)

    async def _from_journal(self, step: int) -> StepRollouts:
        """Return the rollouts with which ``step`` was trained before the run was resumed, once their tasks are drawn again."""
        self.interrupt.check()
        await asyncio.to_thread(self.tasks.buffer.draw, self.records.journal.begun(step))
        return await asyncio.to_thread(self.records.trained_before, step)

    async def _sampled(self, step: int, position: TaskPosition, consume: Consumer | None) -> StepRollouts:
        """Return the groups that the scheduler has for ``step``."""
        if self._scheduler is None:
            self._scheduler = GroupScheduler.of_run(
                self.config,
                position,
                step - 1,
                self.services.runner(),
                self._group_jobs,
                partial(self.interrupt.guard_episodes, self.services.check),
                self.records.journal,
                self._write_ended,
                self.self_play,
            )
        if not self.config.asynchronous.max_staleness:
            self.services.fleet.metrics()  # drops what was measured before the step, such as in an evaluation
        if self._writes_ended:
            first = await asyncio.to_thread(self.tasks.buffer.__getitem__, next(position.untrained()))
            self.records.recorder.begin(step, first.id)
        async with self.learner_idle():
            taken = await self._scheduler.take(consume)
        self._scheduler.runner.check_dropped([*taken.rollouts, *taken.filtered])
        after = position.after([*taken.positions, *taken.filtered_positions])
        await self.records.journal.taken(step, taken.positions, after, taken.filtered_positions)
        unwritten = taken.filtered if self._writes_ended else [*taken.rollouts, *taken.filtered]
        await asyncio.to_thread(self.records.recorder.write, step, unwritten)
        return StepRollouts(taken.rollouts, after, taken.filtered)

    @property
    def _writes_ended(self) -> bool:
        """Whether rollouts are written as they end: it is known which step trains them, and that no filter drops them."""
        return not self.config.asynchronous.max_staleness and not self.config.rollout.filter_groups.filters

    def _write_ended(self, rollout: Rollout) -> None:
        if self._writes_ended:
            self.records.recorder.write(self._version + 1, rollout)

    def _group_jobs(self, position: int) -> list[Job]:
        """Return the episodes of a group, named as if each step took the next tasks.

        The batch size is that with which the run began: another one would give names again that earlier groups have.
        """
        step, offset = divmod(position, self.records.journal.first_settings["batch_size"])
        return self.tasks.group(position, f"{step + 1}/{offset}")

    async def aclose(self) -> None:
        """Cancel all episodes, and close the data source."""
        if self._scheduler is not None:
            await self._scheduler.aclose()
        self.tasks.close()

    def state(self) -> dict[str, Any]:
        """Return the state of the data buffer, and of the league if there is self-play."""
        league = {} if self.self_play is None else {"self_play": self.self_play.league.state()}
        return {"data": self.tasks.buffer.state(), **league}

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the fleet, the last sync, the data buffer, self-play, and the step's episodes."""
        found = self.services.fleet.metrics() | self._sync_metrics | self.tasks.buffer.metrics()
        found |= self.records.metrics() | ({} if self.self_play is None else self.self_play.metrics())
        return found | ({} if self._scheduler is None else self._scheduler.metrics())

    async def on_step_trained(self, step: int, advantages: Mapping[str, float]) -> None:
        """Record the results and the games of self-play, and write the advantages next to the step's rollouts."""
        assert self._taken is not None, "a step trains what it took"
        self.tasks.on_trained(self._taken.position, [*self._taken.rollouts, *self._taken.filtered])
        if self.self_play is not None:
            played = [*self._taken.rollouts, *self._taken.filtered]
            self.self_play.on_step_trained(step, self._taken.position, played)
        await self.records.trained(step, advantages)

    async def prepare_evaluation(self) -> None:
        """Sync the newest weights to the engines that evaluate, unless they have them: see `sync_weights`."""
        if (engines := self._eval_engines) is not None:
            await self._send(engines.fleet, engines.sync, lambda _: nullcontext())
        elif self._synced != self._version:
            await self._push()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens."""
        return self.services.renderer.decode(token_ids)
