"""Runs the evaluations of a training run with its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.evaluation.evaluate import OnDone, evaluate
from agentrl.evaluation.result import SetResult
from agentrl.evaluation.sets import EvalTasks
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.fleet.reserved_engines import reserved_fleet
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.services import Services
from agentrl.self_play.game_scores import GameScores
from agentrl.self_play.training import SelfPlay
from agentrl.weight_sync.base import WeightSync


@dataclass(frozen=True, slots=True)
class EvalEngines:
    """Engines that only evaluate. They get weights when an evaluation begins, and keep them until the next."""

    fleet: Fleet
    sync: WeightSync


async def open_eval_engines(
    config: Config, folder: Path, model: Path, services: Services, sync: WeightSync, exits: AsyncExitStack
) -> EvalEngines | None:
    """Start the engines of ``eval.engines``, if there are any, which ``exits`` ends.

    Args:
        config: of the run.
        folder: of the run.
        model: that they load first.
        services: of the run, which check these engines too.
        sync: of weights to them.
        exits: gets what ends them.

    Raises:
        EngineError: an engine does not start; the message has its last log lines.

    """
    if not config.eval.engines:
        return None
    opponents = 0 if config.self_play is None else config.self_play.snapshot_engines
    logs, after = folder / "logs" / "evaluation", len(services.frozen) + opponents
    fleet = reserved_fleet(config, model, logs, after, services.fleet.vocabulary, engines=config.eval.engines)
    exits.push_async_callback(fleet.aclose)
    await fleet.start()
    exits.push_async_callback(sync.aclose)
    services.reserved.append(fleet)
    return EvalEngines(fleet, sync)


@dataclass(slots=True)
class Evaluator:
    """Evaluates the policy that the engines hold."""

    config: Config
    services: Services
    sets: Sequence[EvalTasks]
    """The evaluation sets; without any nothing is evaluated."""
    recorder: RolloutRecorder
    interrupt: Interrupt
    self_play: SelfPlay | None = None
    """Opponents of the policy, if ``self_play`` is set."""
    game_scores: GameScores | None = None
    """Reads strategies, in a game with a tree."""
    engines: EvalEngines | None = None
    """None: those of training evaluate."""
    running: bool = field(default=False, init=False)
    """Whether episodes of an evaluation run."""
    _standing: dict[str, float] = field(default_factory=dict, init=False)
    """Of the policy that is evaluated: its rating in self-play, and its exploitability."""

    async def begin(self) -> None:
        """Measure what only the policy of this moment has, before the learner may go on: its rating and its strategy.

        Raises:
            RunStopped: a signal ends the run.
            AgentrlError: a server died.

        """
        self._standing = {} if self.self_play is None else self.self_play.begin_evaluation()
        if self.game_scores is not None:
            fleet = self.services.fleet if self.engines is None else self.engines.fleet
            async with self.interrupt.guard_episodes(self.services.check):
                self._standing |= self.game_scores.metrics(await self.game_scores.strategy_of(fleet))

    async def evaluate(self, step: int, on_done: OnDone) -> list[SetResult]:
        """Run the episodes of all sets after ``step``; ``on_done`` is called with every rollout.

        Raises:
            RunStopped: a signal or the failure policy ends the run.
            AgentrlError: a server died.

        """
        file = self.recorder.evaluation(step) if self.config.eval.save_rollouts else None

        def done(rollout: Rollout) -> None:
            if file is not None:
                file.write(rollout)
            on_done(rollout)

        self.running = True
        try:
            async with self.interrupt.guard_episodes(self.services.check):
                runner = self.services.runner(sampler=None if self.engines is None else self.engines.fleet.sampler)
                results = await evaluate(self.sets, runner, done)
                if self.game_scores is not None and self.self_play is not None:
                    self._standing |= await self.self_play.pool_metrics(self.game_scores)
        finally:
            self.running = False
        if file is not None:
            await asyncio.to_thread(file.finish)
        if self.self_play is not None:
            self.self_play.on_evaluated(
                step, {one.eval_set.full_name: one.rollouts for one in results if one.eval_set.lineups}
            )
        return results

    def standing(self) -> dict[str, float]:
        """Return the policy's rating, if there is self-play, and its exploitability, if the game has a tree."""
        return self._standing
