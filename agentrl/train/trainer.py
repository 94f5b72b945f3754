"""The training loop: rollouts, optimizer steps, weight sync, metrics, evaluation, checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from agentrl.algo.estimate import mean_advantages
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError
from agentrl.core.types import Rollout
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.rollout_panel import rollout_panel
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.critic import returns_of, value_batches, value_metrics, warming_up
from agentrl.train.early_groups import EarlyGroups
from agentrl.train.evaluations import Evaluations
from agentrl.train.optimizer_steps import (
    Baselines,
    StepScores,
    baseline_metrics,
    critic_lr_scale,
    distillation_metrics,
    live_share,
    needs_scores,
    nothing_trained,
    optimizer_steps,
    score_rollouts,
    step_advantages,
    step_baselines,
    step_batch,
    step_correction,
)
from agentrl.train.rollout_source import RolloutSource, TaskPosition
from agentrl.train.step_metrics import merge_metrics, policy_metrics, rollout_metrics, source_metrics
from agentrl.train.teachers import Teachers

NONFINITE = {
    f"train/{prefix}nonfinite_gradients": f"{whose} gradient is not finite, so the optimizer step was skipped; a smaller {key} "
    f"or learner.precision=float32 may help. train/{prefix}nonfinite_gradients counts such steps"
    for prefix, whose, key in (
        ("", "the", "learner.optimizer.lr"),
        ("value_", "the critic's", "algo.critic.optimizer.lr"),
    )
}
"""Warnings by metric."""
UNCHANGED = (
    "the weights that were sent to the engines are those of the sync before, though the step was trained: every update was "
    "less than weights.dtype can hold, or the learner exports other weights than it trains; a larger learner.optimizer.lr "
    "helps in the first case. sync/unchanged is 1 in such steps"
)


@dataclass(slots=True)
class Trainer:
    """The state and the loop of one training run; built by `agentrl.train.run`."""

    config: Config
    source: RolloutSource
    learner: LearnerGroup
    checkpoints: Checkpoints
    metrics: MetricsLog
    view: ProgressView
    teachers: Teachers | None = None
    """The teachers of on-policy distillation."""
    step: int = 0
    """Finished steps, each of one batch of rollouts; also the policy version."""
    position: TaskPosition = field(default_factory=TaskPosition)
    """The trained tasks of the task order."""
    saved: int = -1
    """The step of the newest checkpoint."""
    critic: CriticGroup | None = None
    """Predicts values, if the estimator needs them."""
    spent_s: float = 0.0
    """Seconds in training steps, without evaluations."""
    evaluated: InitVar[int] = -1
    """The step of the newest evaluation."""
    score: InitVar[float | None] = None
    """The metric ``train.keep_best`` of that evaluation."""
    evaluations: Evaluations = field(init=False)
    monitor: Callable[[], dict[str, float]] = dict
    """Returns metrics of the run's processes since the last call, for the row of a step."""
    baselines: Baselines = field(default_factory=dict)
    """The baselines of ``rae`` for the next step."""
    _ahead: int = field(default=0, init=False)
    """Optimizer steps that learner and critic have taken in the unfinished training step."""
    _warned: set[str] = field(default_factory=set, init=False)

    def __post_init__(self, evaluated: int, score: float | None) -> None:
        """Go on with the evaluations of the run."""
        self.evaluations = Evaluations(
            self.config, self.source, self.checkpoints, self.metrics, self.view, evaluated, score
        )

    async def run(self) -> None:
        """Train to the last step. If anything ends the run early, the last finished step is saved first."""
        try:
            await self._loop()
        except (Exception, asyncio.CancelledError) as error:
            await self.evaluations.aclose()
            await self._save_after(error)
            raise
        await self._save()
        await self._finish_save()

    async def _loop(self) -> None:
        plan = self.config.train
        await self._sync_weights(Stopwatch())
        enough = await self.evaluations.after(
            self.step, last=self._finished()
        )  # a resumed run may have been interrupted in an evaluation
        while not enough and not self._finished():
            await self._step()
            self.checkpoints.check()
            enough = await self.evaluations.after(self.step, last=self._finished())
            if (plan.save_every and self.step % plan.save_every == 0) or await self._may_be_best():
                await self._save()

    async def _step(self) -> None:
        """Take one training step: rollouts, optimizer steps, weight sync, metrics."""
        watch, start, name = Stopwatch(), time.perf_counter(), f"step {self.step + 1}"
        self.view.phase("rollout")
        early = self._early_groups()
        with watch("rollout"), waiting(PHASE, name, "rollout"):
            given = await self.source.get_rollouts(self.step + 1, self.position, early.add if early else None)
        rollouts = given.rollouts
        self._show_best(rollouts)

        self.view.phase("learn")
        groups = group_rollouts(rollouts)
        scores = await self._score(groups if early is None else group_rollouts(early.others(rollouts)), watch)
        scores = scores if early is None else early.scores.joined(scores)
        advantages = step_advantages(self.config, groups, scores, self.baselines)
        correction = step_correction(self.config, groups, scores)
        batches = [
            step_batch(self.config, self.step, part, advantages, scores, self.source.pad_token_id, correction)
            if early is None
            else early.last_batch(part, advantages, scores)
            for part in optimizer_steps(self.config, groups, advantages)
            if not warming_up(self.config, self.step)
        ]
        learned: list[Mapping[str, float]] = []
        values: dict[str, float] = {}
        if batches or scores.values:
            await self.source.release_gpus_for_training(self.learner, watch)
            with watch("train"), waiting(PHASE, name, "train"):
                values = await self._train_critic(groups, scores)
                for batch in batches:
                    learned.append(batch.metrics | await asyncio.to_thread(self.learner.train_step, batch))
                    self._ahead += 1
        self.step, self.position, self._ahead = self.step + 1, given.position, 0
        self.baselines = step_baselines(self.config, groups, scores, self.baselines)
        if self.config.algo.reference_steps and self.step % self.config.algo.reference_steps == 0:
            await self.source.release_gpus_for_training(self.learner, watch)
            await asyncio.to_thread(self.learner.update_reference)
        await self.source.on_step_trained(self.step, mean_advantages(advantages))
        try:
            await self._sync_weights(watch)
        finally:  # the step is trained, and saved, also if its weights do not reach the engines
            self.spent_s += time.perf_counter() - start
            times = watch.metrics() | {"time/step_s": time.perf_counter() - start}
            sampled_s = times["time/rollout_s"] if self.source.samples and given.sampled else None
            row = rollout_metrics(rollouts, groups, sampled_s) | self.source.metrics()
            row |= {"batch/live_share": live_share(groups, advantages)} | values
            row |= source_metrics(self.config.sources, rollouts, groups, advantages)
            row |= distillation_metrics(self.config, groups, scores) | baseline_metrics(self.baselines)
            row |= {} if early is None else early.metrics()
            row |= merge_metrics(learned) if learned else {} if values else {"train/skipped": 1.0}
            row |= policy_metrics([batch.policy for batch in batches], learned)
            self._log(row | times | self.monitor() | {"train/version": float(self.step)}, rollouts, groups)

    def _early_groups(self) -> EarlyGroups | None:
        """Return what trains groups before the batch of the step is full, with ``async.streaming``."""
        if not self.config.asynchronous.streaming:
            return None
        return EarlyGroups(self.config, self.learner, self.step, self.source.pad_token_id)

    async def _train_critic(self, groups: RolloutGroups, scores: StepScores) -> dict[str, float]:
        """Take the critic's optimizer steps on the rollouts of a training step, and return its metrics."""
        if self.critic is None or not scores.values:
            return {}
        learned, returns = [], returns_of(self.config, groups, scores)
        batches = value_batches(self.config, groups, scores, returns, self.source.pad_token_id)
        for index, batch in enumerate(batches):
            batch.lr_scale = critic_lr_scale(self.config, self.step, index)
            learned.append(await asyncio.to_thread(self.critic.train_step, batch))
            self._ahead += 1
        return value_metrics(learned, groups, scores, returns)

    def _log(self, row: Mapping[str, float], rollouts: Sequence[Rollout], groups: RolloutGroups) -> None:
        """Log the metrics and rollouts of the step that has ended, and print warnings about them."""
        self.metrics.write(self.step, row)
        self.view.step(self.step, row, self._seconds_left())
        self.metrics.samples(self.step, rollouts)
        if row.get("train/skipped"):
            self._warn_once("skipped", f"nothing was trained: {nothing_trained(self.config, rollouts, groups)}")
        for key, text in NONFINITE.items():
            if row.get(key):
                self._warn_once(key, text)
        if row.get("sync/unchanged") and row.get("train/lr") and not row.get("train/nonfinite_gradients"):
            self._warn_once("unchanged", UNCHANGED)

    async def _score(self, groups: RolloutGroups, watch: Stopwatch) -> StepScores:
        """Return what models say of the rollouts before the first optimizer step: the learner's, then the teachers'."""
        scores, pad_id, name = StepScores(), self.source.pad_token_id, f"step {self.step + 1}"
        if not groups.rollouts_N:
            return scores
        if needs_scores(self.config):
            await self.source.release_gpus_for_training(self.learner, watch)
            with watch("score"), waiting(PHASE, name, "scores"):
                scores = await asyncio.to_thread(score_rollouts, self.config, groups, self.learner, self.critic, pad_id)
        if self.teachers is not None:
            if self.teachers.need_learner:
                await self.source.release_gpus_for_training(self.learner, watch)
            with watch("teachers"), waiting(PHASE, name, "teachers"):
                scores = replace(scores, teachers=await self.teachers.score(groups, self.learner, pad_id))
        return scores

    def _warn_once(self, about: str, text: str) -> None:
        """Print a warning about the step that has ended, unless there was one about the same."""
        if about not in self._warned:
            self._warned.add(about)
            self.view.print_text(f"warning: step {self.step}: {text}")

    async def _sync_weights(self, watch: Stopwatch) -> None:
        self.view.phase("weights")
        with waiting(PHASE, f"step {self.step}", "weights"):
            await self.source.sync_weights(self.learner, self.step, watch)

    def _finished(self) -> bool:
        left = self._seconds_left()
        return self.step >= self.source.steps or (left is not None and left <= 0)

    def _seconds_left(self) -> float | None:
        """Return what is left of ``train.minutes``, or None without that limit."""
        minutes = self.config.train.minutes
        return None if minutes is None else 60 * minutes - self.spent_s

    def _show_best(self, rollouts: Sequence[Rollout]) -> None:
        if self.step == 0 and rollouts:
            best = max(rollouts, key=lambda rollout: (rollout.reward, len(rollout.turns)))
            self.view.note(rollout_panel(best, f"a rollout of step 1, task {best.prompt_id}", self.source.decode))

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to the learner's state."""
        return {
            "step": self.step,
            "position": self.position.first,
            "trained_ahead": self.position.ahead,
            "spent_s": self.spent_s,
            "evaluated": self.evaluations.step,
            "seed": self.config.run.seed,
            "score": self.evaluations.score_of(self.step),
            "baselines": self.baselines,
            "source": self.source.state(),
        }

    async def _may_be_best(self) -> bool:
        """Return whether the step's evaluation is better than those of all checkpoints, or runs in the background."""
        if self.checkpoints.candidate == self.step:
            return True
        score = self.evaluations.score_of(self.step)
        if score is None:
            return False
        await self._finish_save()
        return score > self.checkpoints.best_score()

    async def _save(self) -> None:
        """Begin to write a checkpoint, and wait until the learner's state is copied; see `_finish_save`."""
        await self._finish_save()
        state = self.state()
        self.view.phase("save")
        with waiting(PHASE, f"step {self.step}", "save"):
            if self.saved == self.step:
                self.checkpoints.save_state(self.step, state)
            else:
                await asyncio.to_thread(self.checkpoints.save, self.step, self.learner, state, self.critic)
        self.saved = self.step

    async def _finish_save(self) -> None:
        """Wait until the checkpoint that is being written is complete."""
        with waiting(PHASE, f"step {self.step}", "save"):
            try:
                await asyncio.to_thread(self.checkpoints.finish)
            except Exception:
                self.saved = -1
                raise

    async def _save_after(self, error: BaseException) -> None:
        """Save before the run ends with ``error``, unless the learner is inside a step: then the previous checkpoint stays."""
        if self._ahead:
            self.view.note(
                f"step {self.step} is not saved after {type(error).__name__}: the learner is {self._ahead} optimizer "
                "step(s) further already, so the checkpoint before stands"
            )
            return
        try:
            await self._save()
            await self._finish_save()
        except (AgentrlError, OSError) as second:  # a full disk refuses both
            self.view.note(f"could not save step {self.step} after {type(error).__name__}: {second}")
