"""The evaluations of a training run with its engines: when they are due, their metrics, and the goals that they reach."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

from agentrl.config.evaluation import EvalConfig
from agentrl.config.train import TrainConfig
from agentrl.core.types import Rollout
from agentrl.episode.runner import GroupRunner
from agentrl.evaluation.evaluate import OnDone, SetResult, evaluate, flat_metrics
from agentrl.evaluation.own_function import call_evaluation, load_evaluation, make_policy
from agentrl.evaluation.sets import EvalTasks, check_goals_are_measured, reaches_goals
from agentrl.evaluation.table import results_lines
from agentrl.learner.checkpoints import Checkpoints
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.obs.waiting import PHASE, waiting
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.self_play.game_scores import GameScores
from agentrl.self_play.training import SelfPlay
from agentrl.train.callbacks import RunCallbacks
from agentrl.train.engine_weights import EngineWeights
from agentrl.train.pipeline.token_ages import lag_metrics


@dataclass(slots=True)
class Evaluator:
    """Evaluates the policy with the engines of a run."""

    config: EvalConfig
    services: Services
    sets: Sequence[EvalTasks]
    """The evaluation sets; without any nothing is evaluated."""
    recorder: RolloutRecorder
    interrupt: Interrupt
    weights: EngineWeights
    """Weights of the engines; nothing is evaluated before their first sync."""
    self_play: SelfPlay | None = None
    """Opponents of the policy, if ``self_play`` is set."""
    game_scores: GameScores | None = None
    """Reads strategies, in a game with a tree."""
    standing: dict[str, float] = field(default_factory=dict, init=False)
    """Metrics of the policy that is evaluated: its rating in self-play, and its exploitability."""

    @property
    def episodes(self) -> int:
        """Number of episodes of an evaluation."""
        return sum(eval_set.episodes for eval_set in self.sets)

    def engine_metrics(self) -> dict[str, float]:
        """Return metrics of the engines that only evaluate, since the last call; none without any."""
        if (engines := self.weights.eval_engines) is None:
            return {}
        group, metrics = f"engines/{engines.fleet.group}", engines.fleet.metrics()
        names = [name for name in metrics if name.startswith(f"{group}/")]
        return {name: metrics[name] for name in names} | {
            f"{group}/{name}": metrics[f"rollout/{name}"]
            for name in ("cache_hit", "accept_length")
            if f"rollout/{name}" in metrics
        }

    @property
    def measures(self) -> bool:
        """Whether there is anything to evaluate: sets, or a function of the user."""
        return bool(self.sets) or self.config.function is not None

    async def begin(self) -> None:
        """Sync the newest weights, and measure rating and strategy, which the next training step changes.

        Raises:
            RunStopped: a signal ends the run.
            AgentrlError: a server died, or an engine did not take the weights.
        """
        await self.weights.sync_for_evaluation()
        async with self.weights.learner_idle():
            self.standing = {} if self.self_play is None else self.self_play.begin_evaluation()
            if self.game_scores is not None:
                engines = self.weights.eval_engines
                fleet = self.services.fleet if engines is None else engines.fleet
                async with self.interrupt.guard_episodes(self.services.check):
                    self.standing |= self.game_scores.metrics(await self.game_scores.score_strategy(fleet))

    async def _evaluate(self, step: int, runner: GroupRunner, done: OnDone) -> list[SetResult]:
        """Return the results of the sets; metrics of ``eval.function`` are added to `standing`."""
        function = load_evaluation(self.config)
        if function is None:
            return await evaluate(self.sets, runner, done)
        policy = make_policy(self.services.config, step, self.sets, runner, done)
        self.standing |= await call_evaluation(
            function, str(self.config.function), policy, lambda: flat_metrics(policy.results)
        )
        return policy.results

    async def evaluate(self, step: int, on_done: OnDone) -> list[SetResult]:
        """Run the episodes of all sets after ``step``; ``on_done`` is called with every rollout.

        Raises:
            RunStopped: a signal or the failure policy ends the run.
            AgentrlError: a server died.
        """
        file = self.recorder.evaluation(step) if self.config.save_rollouts else None

        def done(rollout: Rollout) -> None:
            if file is not None:
                file.write(rollout)
            rollout.record = b""
            on_done(rollout)

        engines = self.weights.eval_engines
        with self.weights.generating() if engines is None else nullcontext():
            async with self.interrupt.guard_episodes(self.services.check):
                runner = self.services.runner(sampler=None if engines is None else engines.fleet.sampler)
                results = await self._evaluate(step, runner, done)
                if self.game_scores is not None and self.self_play is not None:
                    self.standing |= await self.self_play.pool_metrics(self.game_scores)
        if file is not None:
            await asyncio.to_thread(file.finish)
        if self.self_play is not None:
            games = {result.eval_set.full_name: result.rollouts for result in results if result.eval_set.lineups}
            self.self_play.on_evaluated(step, games)
        return results


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
    """Episodes that have ended."""
    seconds: float = 0.0
    """Its duration, once it has ended."""
    awaited: bool = False
    """Whether the trainer waits for it."""


@dataclass(slots=True)
class Evaluations:
    """Evaluates every ``train.eval_every`` steps, and after the last step.

    The trainer waits for an evaluation, or with ``eval.background`` continues while it runs. One runs at a time: the trainer
    waits for it when the next is due. It always waits for the last, so that its result and its failure are never lost.
    """

    config: EvalConfig
    plan: TrainConfig
    evaluator: Evaluator | None
    """None: nothing is evaluated, as with recorded rollouts."""
    checkpoints: Checkpoints
    metrics: MetricsLog
    view: ProgressView
    step: int = -1
    """The step whose policy was evaluated last."""
    score: float | None = None
    """The metric ``train.keep_best`` of that evaluation."""
    callbacks: RunCallbacks = field(default_factory=RunCallbacks)
    """The run's."""
    results: dict[str, float] = field(default_factory=dict)
    """Metrics of that evaluation."""
    _running: _Running | None = field(default=None, init=False)
    _task: asyncio.Task[list[SetResult]] | None = field(default=None, init=False)
    """Task of `_running`."""

    async def after(self, step: int, *, last: bool) -> bool:
        """Begin the evaluation after ``step``, if it is due, and log an earlier evaluation that has ended.

        Returns:
            Whether ``train.stop_at`` is reached. Then the policy after ``step`` has been evaluated too.

        Raises:
            AgentrlError: an evaluation has failed.
            ConfigError: it does not measure what ``train.stop_at`` or ``train.keep_best`` names.
        """
        plan = self.plan
        due = plan.eval_first if step == 0 else bool(plan.eval_every) and step % plan.eval_every == 0
        due = (due or last) and self.step != step
        goals_reached = False
        if self._task is not None and (due or self._task.done()):
            goals_reached = await self._finish(step)
        if goals_reached or due:
            await self._begin(step)
            if goals_reached or last or not self.config.background:
                goals_reached = await self._finish(step) or goals_reached
            elif plan.keep_best:
                self.checkpoints.candidate = step
        return goals_reached

    def score_at(self, step: int) -> float | None:
        """Return the metric ``train.keep_best`` of the policy after ``step``, if that was evaluated."""
        return self.score if self.step == step else None

    async def aclose(self) -> None:
        """Cancel the evaluation that runs: its step stays without a result."""
        if self._running is not None and self._task is not None and not self._task.done():
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self.view.note(f"evaluation after step {self._running.step}: not finished, as the run ends before it")

    async def _begin(self, step: int) -> None:
        start = time.perf_counter()
        if self.evaluator is not None:
            with waiting(PHASE, f"step {step}", "evaluation"):
                await self.evaluator.begin()
        self._running = _Running(step, 0 if self.evaluator is None else self.evaluator.episodes, start)
        self._task = asyncio.create_task(self._evaluate(self._running))

    async def _evaluate(self, running: _Running) -> list[SetResult]:
        def count(_: Rollout) -> None:
            running.done += 1
            self._show(running)

        if self.evaluator is None:
            return []
        with waiting(PHASE, f"step {running.step}", "evaluation"):
            results = await self.evaluator.evaluate(running.step, count)
        running.seconds = time.perf_counter() - running.start
        return results

    def _show(self, running: _Running) -> None:
        if running.awaited and running.total:
            self.view.phase(f"evaluate {running.done}/{running.total}")

    async def _finish(self, trained_step: int) -> bool:
        """Wait for the evaluation that runs, log it, and return whether it reaches ``train.stop_at``."""
        running, task, plan = self._running, self._task, self.plan
        assert running is not None, "it was begun"
        assert task is not None, "it was begun"
        running.awaited = True
        self._show(running)
        async with nullcontext() if self.evaluator is None else self.evaluator.weights.learner_idle():
            results = await task
        self._running = self._task = None
        self.step, self.results = running.step, self._log(running, results, trained_step)
        check_goals_are_measured("train.stop_at", plan.stop_at, self.results)
        if plan.keep_best:
            check_goals_are_measured("train.keep_best", [plan.keep_best], self.results)
            self.score = self.results[f"eval/{plan.keep_best}"]
        if self.step != trained_step:  # its checkpoint, if there is one, was already written
            changes = {"evaluated": self.step, "score": self.score}
            await asyncio.to_thread(self.checkpoints.update_state, self.step, changes)
            self.checkpoints.candidate = None
        if self.results:
            await self.callbacks.on_eval(self.step, self.results)
        return self.step > 0 and reaches_goals(plan.stop_at, self.results)

    def _log(self, running: _Running, results: Sequence[SetResult], trained_step: int) -> dict[str, float]:
        """Log the metrics of an evaluation, and return them."""
        evaluator, step = self.evaluator, running.step
        if evaluator is None or not evaluator.measures:
            return {}
        standing = evaluator.standing
        metrics = flat_metrics(results) | standing | {"time/eval_s": running.seconds} | evaluator.engine_metrics()
        if self.config.background:
            metrics |= lag_metrics([rollout for result in results for rollout in result.rollouts], step)
            metrics["eval/lag_steps"] = float(trained_step - step)
        self.metrics.write(step, metrics)
        summary = "  ".join(f"{key.removeprefix('eval/')} {value:.3f}" for key, value in standing.items())
        for line in [*results_lines(results), *([summary] if summary else [])]:
            self.view.note(f"evaluation after step {step}: {line}")
        return metrics
