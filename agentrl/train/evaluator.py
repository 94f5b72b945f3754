"""Runs the evaluations of a training run with its engines."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.evaluation.evaluate import OnDone, evaluate
from agentrl.evaluation.exploitability import GameScores
from agentrl.evaluation.result import SetResult
from agentrl.evaluation.sets import EvalTasks
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.jobs import watched
from agentrl.runtime.services import Services
from agentrl.train.self_play import SelfPlay


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
    running: bool = field(default=False, init=False)
    """Whether episodes of an evaluation run."""
    _exploitability: dict[str, float] = field(default_factory=dict, init=False)
    """Of the last evaluation."""

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
            async with watched(self.services, self.interrupt):
                results = await evaluate(self.sets, self.services.runner(), done)
                self._exploitability = await self._read_exploitability()
        finally:
            self.running = False
        if file is not None:
            await asyncio.to_thread(file.finish)
        if self.self_play is not None:
            self.self_play.on_evaluated(step, results)
        return results

    async def _read_exploitability(self) -> dict[str, float]:
        if self.game_scores is None:
            return {}
        found = self.game_scores.metrics(await self.game_scores.strategy_of(self.services.fleet))
        if self.self_play is not None:
            found |= self.game_scores.pool_metrics(await self.self_play.snapshot_strategies(self.game_scores))
        return found

    def standing(self) -> dict[str, float]:
        """Return the policy's rating, if there is self-play, and its exploitability, if the game has a tree."""
        return self._exploitability | ({} if self.self_play is None else self.self_play.standing())
