"""The training loop: rollouts, optimizer steps, weight sync, metrics, evaluation, checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import InitVar, dataclass, field, replace
from typing import Any

from agentrl.algo.estimate import RunEstimators, mean_advantages
from agentrl.batch.groups import group_rollouts
from agentrl.core.errors import AgentrlError
from agentrl.core.types import Rollout
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.rollout_panel import rollout_panel
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.early_groups import EarlyGroups
from agentrl.train.evaluations import Evaluations, Evaluator
from agentrl.train.rollout_source import RolloutSource, StepRollouts, TaskPosition
from agentrl.train.step_metrics import merge_metrics, policy_metrics
from agentrl.train.step_scores import StepScores, score_rollouts
from agentrl.train.step_settings import StepSettings
from agentrl.train.teachers import Teachers
from agentrl.train.training_step import TrainingStep

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

    settings: StepSettings
    source: RolloutSource
    learner: LearnerGroup
    estimators: RunEstimators
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
    evaluator: InitVar[Evaluator | None] = None
    """Runs the evaluations; None: nothing is evaluated."""
    evaluated: InitVar[int] = -1
    """The step of the newest evaluation."""
    score: InitVar[float | None] = None
    """The metric ``train.keep_best`` of that evaluation."""
    evaluations: Evaluations = field(init=False)
    monitor: Callable[[], dict[str, float]] = dict
    """Returns metrics of the run's processes since the last call, for the row of a step."""
    _ahead: int = field(default=0, init=False)
    """Optimizer steps that learner and critic have taken in the unfinished training step."""
    _warned: set[str] = field(default_factory=set, init=False)

    def __post_init__(self, evaluator: Evaluator | None, evaluated: int, score: float | None) -> None:
        """Resume the evaluations of the run."""
        config = self.settings.config
        self.evaluations = Evaluations(
            config.eval, config.train, evaluator, self.checkpoints, self.metrics, self.view, evaluated, score
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
        save_every = self.settings.config.train.save_every
        await self._sync_weights(Stopwatch())
        enough = await self.evaluations.after(
            self.step, last=self._is_finished()
        )  # a resumed run may have been interrupted in an evaluation
        while not enough and not self._is_finished():
            await self._step()
            self.checkpoints.check()
            enough = await self.evaluations.after(self.step, last=self._is_finished())
            if (save_every and self.step % save_every == 0) or await self._may_be_best():
                await self._save()

    async def _step(self) -> None:
        """Take one training step: rollouts, optimizer steps, weight sync, metrics."""
        watch, start = Stopwatch(), time.perf_counter()
        early = EarlyGroups(self.settings, self.estimators, self.learner, self.step) if self._streams else None
        self.view.phase("rollout")
        with watch("rollout"), waiting(PHASE, f"step {self.step + 1}", "rollout"):
            batch = await self.source.get_rollouts(self.step + 1, self.position, early.add if early else None)
        self._show_best(batch.rollouts)
        self.view.phase("learn")
        training_step = TrainingStep(self.settings, self.estimators, self.step, batch.rollouts)
        training_step.scores = await self._score(training_step, early, watch)
        metrics = await self._train(training_step, early, watch)
        self.step, self.position, self._ahead = self.step + 1, batch.position, 0
        self.estimators.update(training_step.advantage_inputs())
        await self._update_reference(watch)
        await self.source.on_step_trained(self.step, mean_advantages(training_step.advantages))
        try:
            await self._sync_weights(watch)
        finally:  # the step is trained, and saved, also if its weights do not reach the engines
            seconds = time.perf_counter() - start
            self.spent_s += seconds
            times = watch.metrics() | {"time/step_s": seconds}
            self._log(training_step, metrics | self._step_metrics(training_step, batch, early, times) | times)

    @property
    def _streams(self) -> bool:
        return self.settings.config.asynchronous.streaming

    async def _score(self, training_step: TrainingStep, early: EarlyGroups | None, watch: Stopwatch) -> StepScores:
        """Return the scores of the rollouts before the first optimizer step: the learner's, then the teachers'."""
        groups = training_step.groups if early is None else group_rollouts(early.remaining(training_step.rollouts))
        scores, name = StepScores(), f"step {self.step + 1}"
        if groups.rollouts_N and self.settings.needs_scores:
            await self.source.release_gpus_for_training(self.learner, watch)
            with watch("score"), waiting(PHASE, name, "scores"):
                scores = await asyncio.to_thread(score_rollouts, self.settings, groups, self.learner, self.critic)
        if groups.rollouts_N and self.teachers is not None:
            if self.teachers.need_learner:
                await self.source.release_gpus_for_training(self.learner, watch)
            with watch("teachers"), waiting(PHASE, name, "teachers"):
                logprobs = await self.teachers.score(groups, self.learner, self.settings.packing)
            scores = replace(scores, teachers=logprobs)
        return scores if early is None else early.scores.merge(scores)

    async def _train(
        self, training_step: TrainingStep, early: EarlyGroups | None, watch: Stopwatch
    ) -> dict[str, float]:
        """Take the optimizer steps of critic and policy, and return their metrics."""
        batches = [
            training_step.policy_batch(optimizer_step)
            if early is None
            else early.last_batch(training_step, optimizer_step)
            for optimizer_step in training_step.optimizer_steps()
            if not self.settings.trains_critic_alone(self.step)
        ]
        if not batches and not training_step.scores.values:
            return {"train/skipped": 1.0}
        await self.source.release_gpus_for_training(self.learner, watch)
        trained: list[Mapping[str, float]] = []
        with watch("train"), waiting(PHASE, f"step {self.step + 1}", "train"):
            metrics = await self._train_critic(training_step)
            for batch in batches:
                trained.append({**batch.metrics, **await asyncio.to_thread(self.learner.train_step, batch)})
                self._ahead += 1
        if trained:
            return metrics | merge_metrics(trained) | policy_metrics([batch.policy for batch in batches], trained)
        return metrics or {"train/skipped": 1.0}

    async def _train_critic(self, training_step: TrainingStep) -> dict[str, float]:
        """Take the critic's optimizer steps, and return their metrics; none without a critic."""
        if self.critic is None or not training_step.scores.values:
            return {}
        trained = []
        for batch in training_step.value_batches():
            trained.append(await asyncio.to_thread(self.critic.train_step, batch))
            self._ahead += 1
        return training_step.value_metrics(trained)

    async def _update_reference(self, watch: Stopwatch) -> None:
        """Copy the policy into the reference every ``algo.reference_steps`` steps."""
        steps = self.settings.algo.reference_steps
        if steps and self.step % steps == 0:
            await self.source.release_gpus_for_training(self.learner, watch)
            await asyncio.to_thread(self.learner.update_reference)

    def _step_metrics(
        self, training_step: TrainingStep, batch: StepRollouts, early: EarlyGroups | None, times: Mapping[str, float]
    ) -> dict[str, float]:
        """Return the metrics of a step's rollouts, of sampling, and of the run's processes."""
        sampled_s = times["time/rollout_s"] if self.source.samples and batch.sampled else None
        return (
            training_step.metrics(sampled_s)
            | self.source.metrics()
            | self.estimators.metrics()
            | ({} if early is None else early.metrics())
            | self.monitor()
            | {"train/version": float(self.step)}
        )

    def _log(self, training_step: TrainingStep, metrics: Mapping[str, float]) -> None:
        """Log the metrics and rollouts of the step that has ended, and print warnings about them."""
        self.metrics.write(self.step, metrics)
        self.view.step(self.step, metrics, self._seconds_left())
        self.metrics.samples(self.step, training_step.rollouts)
        if metrics.get("train/skipped"):
            self._warn_once("skipped", f"nothing was trained: {training_step.why_untrained()}")
        for key, text in NONFINITE.items():
            if metrics.get(key):
                self._warn_once(key, text)
        if metrics.get("sync/unchanged") and metrics.get("train/lr") and not metrics.get("train/nonfinite_gradients"):
            self._warn_once("unchanged", UNCHANGED)

    def _warn_once(self, subject: str, text: str) -> None:
        """Print a warning about the step that has ended, unless there was one on this subject."""
        if subject not in self._warned:
            self._warned.add(subject)
            self.view.print_text(f"warning: step {self.step}: {text}")

    async def _sync_weights(self, watch: Stopwatch) -> None:
        self.view.phase("weights")
        with waiting(PHASE, f"step {self.step}", "weights"):
            await self.source.sync_weights(self.learner, self.step, watch)

    def _is_finished(self) -> bool:
        seconds_left = self._seconds_left()
        return self.step >= self.source.steps or (seconds_left is not None and seconds_left <= 0)

    def _seconds_left(self) -> float | None:
        """Return what is left of ``train.minutes``, or None without that limit."""
        minutes = self.settings.config.train.minutes
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
            "seed": self.settings.config.run.seed,
            "score": self.evaluations.score_at(self.step),
            "estimators": self.estimators.state(),
            "source": self.source.state(),
        }

    async def _may_be_best(self) -> bool:
        """Return whether the step's evaluation is better than those of all checkpoints, or runs in the background."""
        if self.checkpoints.candidate == self.step:
            return True
        score = self.evaluations.score_at(self.step)
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
