"""The training loop: get rollouts, learn, send weights, measure, save."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError
from agentrl.core.types import Rollout
from agentrl.evaluation.result import flat_figures
from agentrl.evaluation.sets import reached
from agentrl.evaluation.table import results_lines
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.rollout_panel import rollout_panel
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.batches import merge_figures, rollout_advantages, rollout_figures, train_batches
from agentrl.train.sampling import RolloutSource


@dataclass(slots=True)
class Trainer:
    """One run in progress; `agentrl.train.run` builds it."""

    config: Config
    source: RolloutSource
    learner: LearnerGroup
    checkpoints: Checkpoints
    metrics: MetricsLog
    view: ProgressView
    step: int = 0
    """Finished steps, each of one batch of rollouts; also the policy version."""
    position: int = 0
    """Tasks taken from the order since the run's start."""
    saved: int = -1
    """The step of the newest checkpoint."""
    spent_s: float = 0.0
    """Seconds in training steps, evaluations left out."""
    figures: dict[str, float] = field(default_factory=dict)
    """The newest evaluation."""
    _ahead: int = field(default=0, init=False)
    """Optimizer steps that the learner has taken in a step that is not finished."""

    async def run(self) -> None:
        """Train to the end. Whatever ends it earlier, the last finished step is saved first."""
        try:
            await self._loop()
        except (Exception, asyncio.CancelledError) as error:
            self._save_after(error)
            raise
        self._save()

    async def _loop(self) -> None:
        plan = self.config.train
        await self._follow(Stopwatch())
        if plan.eval_first and self.step == 0:
            await self._evaluate()
        while not self._over():
            await self._step()
            if self._over() or (plan.eval_every and self.step % plan.eval_every == 0):
                await self._evaluate()
                if reached(plan.stop_at, self.figures):
                    break
            if plan.save_every and self.step % plan.save_every == 0:
                self._save()

    def _over(self) -> bool:
        left = self._seconds_left()
        return self.step >= self.source.steps or (left is not None and left <= 0)

    def _seconds_left(self) -> float | None:
        """Return what ``train.minutes`` leaves, None where it is not set."""
        minutes = self.config.train.minutes
        return None if minutes is None else 60 * minutes - self.spent_s

    async def _step(self) -> None:
        watch, start = Stopwatch(), time.perf_counter()
        self.view.phase("rollout")
        with watch("rollout"), waiting(PHASE, f"step {self.step + 1}", "rollout"):
            rollouts = await self.source.take(self.step + 1, self.position)
        if self.step == 0 and rollouts:
            best = max(rollouts, key=lambda rollout: (rollout.reward, len(rollout.turns)))
            self.view.note(rollout_panel(best, f"a rollout of step 1, task {best.prompt_id}"))
        groups = group_rollouts(rollouts)
        learned = await self._learn(groups, watch)
        self.step += 1
        self.position += self.config.rollout.batch_size
        self._ahead = 0
        await self._follow(watch)
        self.spent_s += time.perf_counter() - start
        times = watch.figures() | {"time/step_s": time.perf_counter() - start}
        sampled_s = times["time/rollout_s"] if self.source.samples else None
        self._log(rollout_figures(rollouts, groups, sampled_s) | self.source.figures() | learned | times)
        self.metrics.samples(self.step, rollouts)

    async def _learn(self, groups: RolloutGroups, watch: Stopwatch) -> dict[str, float]:
        self.view.phase("learn")
        advantages = rollout_advantages(self.config, groups)
        await self.source.trained(self.step + 1, advantages)
        batches = train_batches(self.config, groups, advantages, self.source.pad_token_id)
        if not batches:
            return {"train/skipped": 1.0}
        figures = []
        await self.source.make_way(self.learner, watch)
        with watch("train"), waiting(PHASE, f"step {self.step + 1}", "train"):
            for batch in batches:
                figures.append(batch.metrics | await asyncio.to_thread(self.learner.train_step, batch))
                self._ahead += 1
        return merge_figures(figures)

    async def _follow(self, watch: Stopwatch) -> None:
        self.view.phase("weights")
        with waiting(PHASE, f"step {self.step}", "weights"):
            await self.source.follow(self.learner, self.step, watch)

    async def _evaluate(self) -> None:
        sets = self.source.sets
        if not sets:
            return
        start, done = time.perf_counter(), 0
        total = sum(len(choice.tasks) * choice.plan.n_samples for choice in sets)

        def count(_: Rollout) -> None:
            nonlocal done
            done += 1
            self.view.phase(f"evaluate {done}/{total}")

        self.view.phase(f"evaluate 0/{total}")
        with waiting(PHASE, f"step {self.step}", "evaluation"):
            results = await self.source.evaluate(count)
        self.figures = flat_figures(results) | {"time/eval_s": time.perf_counter() - start}
        self.metrics.write(self.step, self.figures)
        for line in results_lines(results):
            self.view.note(f"evaluation after step {self.step}: {line}")

    def _log(self, figures: Mapping[str, float]) -> None:
        row = {**figures, "train/version": float(self.step)}
        self.metrics.write(self.step, row)
        self.view.step(self.step, row, self._seconds_left())

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs beside the learner's own state."""
        return {"step": self.step, "position": self.position, "spent_s": self.spent_s, "seed": self.config.run.seed}

    def _save(self) -> None:
        if self.saved == self.step:
            return
        self.view.phase("save")
        with waiting(PHASE, f"step {self.step}", "save"):
            self.checkpoints.save(self.step, self.learner, self.state())
        self.saved = self.step

    def _save_after(self, error: BaseException) -> None:
        """Save on the way out; where the learner itself failed, the checkpoint before stands."""
        if self._ahead:
            self.view.note(
                f"step {self.step} is not saved after {type(error).__name__}: the learner is {self._ahead} optimizer "
                "step(s) further already, so the checkpoint before stands"
            )
            return
        try:
            self._save()
        except AgentrlError as second:
            self.view.note(f"could not save step {self.step} after {type(error).__name__}: {second}")
