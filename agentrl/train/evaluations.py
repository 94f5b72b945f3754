"""The evaluations of a training run: when they are due, what they have measured, and what follows from it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.evaluation.result import SetResult, flat_metrics
from agentrl.evaluation.sets import check_goals_are_measured, reached
from agentrl.evaluation.table import results_lines
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView
from agentrl.obs.waiting import PHASE, waiting
from agentrl.train.pipeline.staleness import lag_metrics
from agentrl.train.rollout_source import RolloutSource


@dataclass(slots=True)
class _Running:
    """An evaluation in progress."""

    step: int
    """It evaluates the policy after this step."""
    total: int
    """Its episodes."""
    start: float
    """When it began, on the clock of `time.perf_counter`."""
    done: int = 0
    """Of them, those that have ended."""
    seconds: float = 0.0
    """Its duration, once it has ended."""
    awaited: bool = False
    """Whether the trainer waits for it."""


@dataclass(slots=True)
class Evaluations:
    """Evaluates when ``train.eval_every`` says so, and after the last step.

    The trainer waits for an evaluation, or with ``eval.background`` goes on while it runs. One runs at a time: the trainer
    waits for it when the next is due. It always waits for the last, so that its result and its failure are never lost.
    """

    config: Config
    source: RolloutSource
    checkpoints: Checkpoints
    metrics: MetricsLog
    view: ProgressView
    step: int = -1
    """The step whose policy was evaluated last."""
    score: float | None = None
    """The metric ``train.keep_best`` of that evaluation."""
    results: dict[str, float] = field(default_factory=dict)
    """Metrics of that evaluation."""
    _running: _Running | None = field(default=None, init=False)
    _task: asyncio.Task[list[SetResult]] | None = field(default=None, init=False)
    """Of `_running`."""

    async def after(self, step: int, *, last: bool) -> bool:
        """Begin the evaluation after ``step``, if it is due, and take the result of an earlier evaluation that has ended.

        Args:
            step: finished training steps.
            last: no other step follows.

        Returns:
            Whether ``train.stop_at`` is reached. Then the policy after ``step`` has been evaluated too.

        Raises:
            AgentrlError: an evaluation has failed.
            ConfigError: it does not measure what ``train.stop_at`` or ``train.keep_best`` names.

        """
        plan = self.config.train
        due = plan.eval_first if step == 0 else bool(plan.eval_every) and step % plan.eval_every == 0
        due = (due or last) and self.step != step
        enough = False
        if self._task is not None and (due or self._task.done()):
            enough = await self._finish(step)
        if enough or due:
            await self._begin(step)
            if enough or last or not self.config.eval.background:
                enough = await self._finish(step) or enough
            elif plan.keep_best:
                self.checkpoints.candidate = step
        return enough

    def score_of(self, step: int) -> float | None:
        """Return the metric ``train.keep_best`` of the policy after ``step``, if that was evaluated."""
        return self.score if self.step == step else None

    async def aclose(self) -> None:
        """Cancel the evaluation that runs: its step stays without a result."""
        if self._running is not None and self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.view.note(f"evaluation after step {self._running.step}: not finished, as the run ends before it")

    async def _begin(self, step: int) -> None:
        evaluator, start, total = self.source.evaluator, time.perf_counter(), 0
        with waiting(PHASE, f"step {step}", "evaluation"):
            await self.source.prepare_evaluation()
            if evaluator is not None:
                total = sum(one.episodes for one in evaluator.sets)
                async with self.source.learner_idle():
                    await evaluator.begin()
        self._running = _Running(step, total, start)
        self._task = asyncio.create_task(self._evaluate(self._running))

    async def _evaluate(self, running: _Running) -> list[SetResult]:
        evaluator = self.source.evaluator

        def count(_: Rollout) -> None:
            running.done += 1
            self._show(running)

        if evaluator is None:
            return []
        with waiting(PHASE, f"step {running.step}", "evaluation"):
            results = await evaluator.evaluate(running.step, count)
        running.seconds = time.perf_counter() - running.start
        return results

    def _show(self, running: _Running) -> None:
        if running.awaited and running.total:
            self.view.phase(f"evaluate {running.done}/{running.total}")

    async def _finish(self, now: int) -> bool:
        """Wait for the evaluation that runs, log it, and return whether it reaches ``train.stop_at``.

        Args:
            now: finished training steps.

        """
        running, task, plan = self._running, self._task, self.config.train
        assert running is not None, "it was begun"
        assert task is not None, "it was begun"
        running.awaited = True
        self._show(running)
        async with self.source.learner_idle():
            results = await task
        self._running = self._task = None
        self.step, self.results = running.step, self._measured(running, results, now)
        check_goals_are_measured("train.stop_at", plan.stop_at, self.results)
        if plan.keep_best:
            check_goals_are_measured("train.keep_best", [plan.keep_best], self.results)
            self.score = self.results[f"eval/{plan.keep_best}"]
        if self.step != now:  # its checkpoint, if there is one, was written before
            news = {"evaluated": self.step, "score": self.score}
            await asyncio.to_thread(self.checkpoints.update_state, self.step, news)
            self.checkpoints.candidate = None
        return self.step > 0 and reached(plan.stop_at, self.results)

    def _measured(self, running: _Running, results: Sequence[SetResult], now: int) -> dict[str, float]:
        """Log the metrics of an evaluation, and return them."""
        evaluator, step = self.source.evaluator, running.step
        if evaluator is None or not evaluator.sets:
            return {}
        standing = evaluator.standing()
        found = flat_metrics(results) | standing | {"time/eval_s": running.seconds}
        if self.config.eval.background:
            found |= lag_metrics([one for result in results for one in result.rollouts], step)
            found["eval/lag_steps"] = float(now - step)
        self.metrics.write(step, found)
        also = "  ".join(f"{key.removeprefix('eval/')} {value:.3f}" for key, value in standing.items())
        for line in [*results_lines(results), *([also] if also else [])]:
            self.view.note(f"evaluation after step {step}: {line}")
        return found
