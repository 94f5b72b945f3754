"""The training loop: roll out, learn, send weights, measure, save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.collect import merge_figures, rollout_advantages, rollout_figures, train_batches
from agentrl.config.schema import Config
from agentrl.episode.runner import EpisodeRunner, Job
from agentrl.errors import AgentrlError
from agentrl.eval import evaluate_watched
from agentrl.evaluation.result import flat_figures
from agentrl.evaluation.sets import TaskChoice, reached
from agentrl.evaluation.show import results_lines
from agentrl.interrupt import Interrupt
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.rollouts import RolloutRecorder, write_advantages
from agentrl.obs.show import rollout_panel
from agentrl.protocols import LearnerGroup, WeightSync
from agentrl.stack import Stack
from agentrl.task import TaskSet
from agentrl.tasksource import TaskOrder, episode_seed
from agentrl.types import Rollout


@dataclass(slots=True)
class Trainer:
    """One run in progress; `agentrl.session` builds it."""

    config: Config
    tasks: TaskSet
    stack: Stack
    learner: LearnerGroup
    sync: WeightSync
    checkpoints: Checkpoints
    metrics: MetricsLog
    recorder: RolloutRecorder
    view: ProgressView
    interrupt: Interrupt
    sets: Sequence[TaskChoice] = ()
    """What to evaluate on; without any nothing is evaluated."""
    step: int = 0
    """Finished optimizer steps; also the policy version."""
    position: int = 0
    """Tasks taken from the order since the run's start."""
    saved: int = -1
    """The step of the newest checkpoint."""
    spent_s: float = 0.0
    """Seconds in training steps, evaluations left out."""
    figures: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""

    async def run(self) -> None:
        """Train to the end. Whatever ends it earlier, the last finished step is saved first."""
        try:
            await self._loop()
        except (AgentrlError, asyncio.CancelledError) as error:
            self._save_after(error)
            raise
        self._save()

    async def _loop(self) -> None:
        plan = self.config.train
        await self._sync(Stopwatch())
        order = TaskOrder(self.tasks.split(self.config.tasks.train_split), self.config.run.seed)
        runner = self.stack.runner()
        if plan.eval_first and self.step == 0:
            await self._evaluate()
        while self.step < plan.steps and not self._out_of_time():
            watch, start = Stopwatch(), time.perf_counter()
            with watch("rollout"):
                rollouts = await self._collect(runner, order)
            groups = group_rollouts(rollouts)
            learned = await self._learn(groups, watch)
            self.step += 1
            self.position += self.config.rollout.batch_size
            await self._sync(watch)
            self.spent_s += time.perf_counter() - start
            times = watch.figures() | {"time/step_s": time.perf_counter() - start}
            self._log(rollout_figures(rollouts, groups, times["time/rollout_s"]) | learned | times)
            last = self.step == plan.steps or self._out_of_time()
            if last or (plan.eval_every and self.step % plan.eval_every == 0):
                await self._evaluate()
                if reached(plan.stop_at, self.figures):
                    break
            if plan.save_every and self.step % plan.save_every == 0:
                self._save()

    async def _collect(self, runner: EpisodeRunner, order: TaskOrder) -> list[Rollout]:
        self.view.phase("rollout")
        jobs = []
        seed = self.config.run.seed
        for offset, task in enumerate(order.take(self.position, self.config.rollout.batch_size)):
            for sample in range(self.config.rollout.n_samples_per_prompt):
                rollout_id = f"{self.step + 1}/{offset}/{sample}"
                jobs.append(Job(task, episode_seed(seed, self.position + offset, sample), rollout_id))
        try:
            rollouts = await self.interrupt.guard(runner.run_many(jobs), self.stack.check)
        except AgentrlError:
            self.stack.check()
            raise
        self.recorder.write(self.step + 1, rollouts)
        if self.step == 0:
            best = max(rollouts, key=lambda rollout: (rollout.reward, len(rollout.turns)))
            self.view.note(rollout_panel(best, f"a rollout of step 1, task {best.prompt_id}"))
        return rollouts

    async def _learn(self, groups: RolloutGroups, watch: Stopwatch) -> dict[str, float]:
        self.view.phase("learn")
        advantages = rollout_advantages(self.config, groups)
        write_advantages(self.recorder.folder, self.step + 1, advantages)
        batches = train_batches(self.config, groups, advantages, self.stack.renderer.pad_token_id)
        if not batches:
            return {"train/skipped": 1.0}
        with watch("train"):
            steps = [batch.metrics | await asyncio.to_thread(self.learner.train_step, batch) for batch in batches]
        return merge_figures(steps)

    async def _sync(self, watch: Stopwatch) -> None:
        self.view.phase("weights")
        with watch("sync"):
            await self.sync.push(self.learner, [self.stack.client], self.step)

    async def _evaluate(self) -> None:
        if not self.sets:
            return
        start, done = time.perf_counter(), 0
        total = sum(len(choice.tasks) * choice.plan.n_samples for choice in self.sets)

        def count(_: Rollout) -> None:
            nonlocal done
            done += 1
            self.view.phase(f"evaluate {done}/{total}")

        self.view.phase(f"evaluate 0/{total}")
        results = await evaluate_watched(self.sets, self.stack, self.interrupt, count)
        self.figures = flat_figures(results) | {"time/eval_s": time.perf_counter() - start}
        self.metrics.write(self.step, self.figures)
        for line in results_lines(results):
            self.view.note(f"evaluation after step {self.step}: {line}")

    def _log(self, figures: Mapping[str, float]) -> None:
        row = {**figures, "train/version": float(self.step)}
        self.metrics.write(self.step, row)
        self.view.step(self.step, row)

    def _out_of_time(self) -> bool:
        minutes = self.config.train.minutes
        return minutes is not None and self.spent_s >= 60 * minutes

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the learner's own state."""
        return {"step": self.step, "position": self.position, "spent_s": self.spent_s, "seed": self.config.run.seed}

    def _save(self) -> None:
        if self.saved == self.step:
            return
        self.view.phase("save")
        self.checkpoints.save(self.step, self.learner, self.state())
        self.saved = self.step

    def _save_after(self, error: BaseException) -> None:
        """Save on the way out; where the learner itself failed, the checkpoint before stands."""
        try:
            self._save()
        except AgentrlError as second:
            self.view.note(f"could not save step {self.step} after {type(error).__name__}: {second}")
