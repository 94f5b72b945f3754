"""The training loop: rollouts, optimizer steps, weight sync, metrics, evaluation, checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.algo.estimate import mean_advantages
from agentrl.core.errors import AgentrlError, CallbackError
from agentrl.evaluation.intervals import mean
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.callbacks import RunCallbacks
from agentrl.train.evaluations import Evaluations
from agentrl.train.rollout_source import RolloutSource, TaskPosition
from agentrl.train.training_step import StepTrainer, TrainingStep

NONFINITE = {
    f"train/{prefix}nonfinite_gradients": f"{whose} gradient is not finite, so the optimizer step was skipped; a smaller {key} "
    f"or learner.precision=float32 may help. train/{prefix}nonfinite_gradients counts such steps"
    for prefix, whose, key in (
        ("", "the", "learner.optimizer.lr"),
        ("value_", "the critic's", "algo.critic.optimizer.lr"),
    )
}
"""Warnings by metric."""
FLAT_STEPS = 5
"""Steps over which the share of informative groups is averaged; below one half the run warns."""
FLAT = (
    f"{{taught:.0%}} of the groups of the last {FLAT_STEPS} steps taught something; within each of the others all rewards are "
    "equal (mean reward {reward:.2f}). Tasks of another difficulty teach more (tasks.options, data.path, or "
    "tasks.data_source.name=curriculum if tasks come several times), a smaller rollout.batch_size spends less on them, and "
    "train.stop_at ends a run that is good enough"
)
UNCHANGED = (
    "the weights that were sent to the engines are those of the sync before, though the step was trained: every update was "
    "less than weights.dtype can hold, or the learner exports other weights than it trains; a larger learner.optimizer.lr "
    "helps in the first case. sync/unchanged is 1 in such steps"
)


@dataclass(slots=True)
class Trainer:
    """The state and the loop of one training run; built by `agentrl.train.run`."""

    steps: StepTrainer
    checkpoints: Checkpoints
    metrics: MetricsLog
    view: ProgressView
    evaluations: Evaluations
    step: int = 0
    """Finished steps, each of one batch of rollouts; also the policy version."""
    position: TaskPosition = field(default_factory=TaskPosition)
    """The trained tasks of the task order."""
    saved: int = -1
    """The step of the newest checkpoint."""
    spent_s: float = 0.0
    """Seconds in training steps, without evaluations."""
    keys: Mapping[str, str] = field(default_factory=dict)
    """Configuration keys that the run's rollouts are made with; see `agentrl.config.recorded`."""
    monitor: Callable[[], dict[str, float]] = dict
    """Returns metrics of the run's processes since the last call, for the row of a step."""
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    """Callbacks of the run."""
    _unannounced: list[Path] = field(default_factory=list, init=False)
    """Checkpoints that have not been announced to the callbacks."""
    _warned: set[str] = field(default_factory=set, init=False)
    _taught: deque[float] = field(default_factory=lambda: deque(maxlen=FLAT_STEPS), init=False)
    """``train/taught_groups`` of the last steps."""
    _between_steps: Stopwatch = field(default_factory=Stopwatch, init=False)
    """Measures what follows the last step."""

    @property
    def source(self) -> RolloutSource:
        """The run's rollout source."""
        return self.steps.source

    async def run(self) -> None:
        """Train to the last step. If anything but a second Ctrl-C ends the run early, the last finished step is saved first."""
        try:
            await self._loop()
        except (Exception, asyncio.CancelledError) as error:
            await self.evaluations.aclose()
            task = asyncio.current_task()
            assert task is not None, "this is a task"
            if not task.cancelling():  # a second Ctrl-C may find a save in progress
                await self._save_after(error)
            raise
        await self._checkpoint()
        await self._finish_save()
        await self._announce_checkpoints()

    async def _loop(self) -> None:
        save_every = self.steps.settings.config.train.save_every
        await self._sync_weights(Stopwatch())
        # A resumed run may have been interrupted in an evaluation.
        is_last = self._is_finished()
        enough = await self.evaluations.after(self.step, last=is_last)
        while not (enough or is_last or self.callbacks.stops):
            if not await self._step():
                self.view.print_text("the tasks of train.epochs are used up: those that are left do not fill a batch")
                await self.evaluations.after(self.step, last=True)
                return
            self.checkpoints.check()
            if not self.checkpoints.is_writing:
                await self._announce_checkpoints()
            is_last = self._is_finished()
            with self._between_steps("eval_wait"):
                enough = await self.evaluations.after(self.step, last=is_last)
            if (save_every and self.step % save_every == 0) or await self._may_be_best():
                await self._checkpoint()

    async def _step(self) -> bool:
        """Take one training step: rollouts, optimizer steps, weight sync, metrics. Return whether there were tasks for it."""
        watch, start = Stopwatch(), time.perf_counter()
        trained = await self.steps.train(self.step, self.position, watch)
        if trained is None:
            return False
        training_step, rollouts, metrics = trained
        self.step, self.position = self.step + 1, rollouts.position
        self.callbacks.run.step = self.step
        await self.steps.finish(training_step, watch)
        with watch("record"):
            advantages = await asyncio.to_thread(lambda: mean_advantages(training_step.advantages))
            await self.source.on_step_trained(self.step, advantages)
            sampled_s = watch.seconds["rollout"] if self.source.samples and rollouts.sampled else None
            metrics |= await asyncio.to_thread(training_step.metrics, sampled_s, rollouts.filtered)
        is_synced = False
        try:
            await self._sync_weights(watch)
            is_synced = True
        finally:  # the step is trained, and is saved, even if its weights do not reach the engines
            with watch("record"):
                metrics |= self.source.metrics() | self.steps.estimators.metrics()
                metrics |= self.monitor() | {"train/version": float(self.step)} | self._between_steps.metrics()
            seconds = time.perf_counter() - start
            self.spent_s += seconds
            self._between_steps = Stopwatch()
            with self._between_steps("log"):
                metrics |= watch.step_metrics(seconds)
                added: dict[str, float] = {}
                try:
                    if is_synced:
                        added = await self.callbacks.on_step(metrics)
                finally:
                    self._log(training_step, metrics | added)
        return True

    def _log(self, training_step: TrainingStep, metrics: Mapping[str, float]) -> None:
        """Log the metrics and rollouts of the step that has ended, and print warnings about them."""
        self.metrics.write(self.step, metrics)
        self.view.step(self.step, metrics, self._seconds_left())
        self.metrics.samples(self.step, training_step.rollouts)
        if seconds := metrics.get("train/compile_s"):
            self.view.print_text(f"step {self.step}: the learner compiled for {seconds:.0f} s (learner.compile)")
        if metrics.get("train/skipped"):
            self._warn_once("skipped", f"nothing was trained: {training_step.why_untrained()}")
        for key, text in NONFINITE.items():
            if metrics.get(key):
                self._warn_once(key, text)
        self._taught.append(metrics["train/taught_groups"])
        if len(self._taught) == FLAT_STEPS and (taught := mean(self._taught)) < 0.5:
            self._warn_once("flat", FLAT.format(taught=taught, reward=metrics["train/reward"]))
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
            await self.source.sync_weights(self.steps.learner, self.step, watch)
        if self.source.samples:
            await self.callbacks.on_weights_synced()

    def _is_finished(self) -> bool:
        seconds_left = self._seconds_left()
        return (
            self.callbacks.stops or self.step >= self.source.steps or (seconds_left is not None and seconds_left <= 0)
        )

    def _seconds_left(self) -> float | None:
        """Return the seconds that remain of ``train.minutes``; None without that limit."""
        minutes = self.steps.settings.config.train.minutes
        return None if minutes is None else 60 * minutes - self.spent_s

    def state(self) -> dict[str, Any]:
        """Return what a resumed run needs in addition to the learner's state."""
        return {
            "step": self.step,
            "position": self.position.first,
            "trained_ahead": self.position.ahead,
            "spent_s": self.spent_s,
            "evaluated": self.evaluations.step,
            "keys": dict(self.keys),
            "score": self.evaluations.score_at(self.step),
            "score_of": self.evaluations.plan.keep_best,
            "estimators": self.steps.estimators.state(),
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
        with self._between_steps("save"), waiting(PHASE, f"step {self.step}", "save"):
            if self.saved == self.step:
                self.checkpoints.save_state(self.step, state)
            else:
                save, learner = self.checkpoints.save, self.steps.learner
                self._unannounced.append(await asyncio.to_thread(save, self.step, learner, state, self.steps.critic))
        self.saved = self.step

    async def _checkpoint(self) -> None:
        """Begin to write a checkpoint, once the previous one is complete and announced to the callbacks."""
        await self._finish_save()
        await self._announce_checkpoints()
        await self._save()

    async def _announce_checkpoints(self) -> None:
        """Call the callbacks for the checkpoints that are complete."""
        paths, self._unannounced = self._unannounced, []
        for path in paths:
            await self.callbacks.on_checkpoint(path)

    async def _finish_save(self) -> None:
        """Wait until the checkpoint in progress is complete."""
        with self._between_steps("save"), waiting(PHASE, f"step {self.step}", "save"):
            try:
                await asyncio.to_thread(self.checkpoints.finish)
            except Exception:
                self.saved, self._unannounced = -1, []
                raise

    async def _save_after(self, error: BaseException) -> None:
        """Save before the run ends with ``error``, unless the learner is inside a step: then the previous checkpoint stays."""
        if ahead := self.steps.optimizer_steps:
            self.view.note(
                f"step {self.step} is not saved after {type(error).__name__}: the learner is {ahead} optimizer step(s) further "
                "already, so the checkpoint before stands"
            )
            return
        try:
            await self._save()
            await self._finish_save()
            await self._announce_checkpoints()
        except CallbackError as second:
            self.view.note(f"warning: {second}")
        except (AgentrlError, OSError) as second:  # a full disk refuses both
            self.view.note(f"could not save step {self.step} after {type(error).__name__}: {second}")
