"""Returns of turns, compared with the same turn of the same agent. Legend: ``S`` sampled tokens of a sequence, ``K`` turns."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from pydantic import Field
from typing_extensions import override

from agentrl.algo.advantages.grpo import Grpo
from agentrl.algo.advantages.rewards import by_row, sequences_with_returns
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class AtGrpo(AdvantageEstimator):
    """Each turn's return minus the mean return of this turn, divided by their standard deviation plus eps.

    Compared is turn k of an agent with turn k of the same agent in the task's other rollouts. A turn that no other
    rollout reached gets 0.

    Source: AT-GRPO, arXiv:2510.11062, section 4.2. There the candidates of a turn are sampled in the same state. Here
    they are of whole episodes, so that only the first turn's have one state. The standard deviation is the sample's (n - 1).
    """

    compares_group = True
    streams = True

    class Options(Grpo.Options):
        """Options of ``at_grpo``."""

        gamma: float = Field(default=1.0, gt=0, le=1)
        """Discount of a turn."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        turns: dict[tuple[int, str, int], list[float]] = defaultdict(list)
        sequences = sequences_with_returns(inputs, self.options.gamma)
        for group, sequence, returns_K in sequences:
            for turn, turn_return in enumerate(returns_K.tolist()):
                turns[group, sequence.rows[0].key.agent_id, turn].append(turn_return)
        scales = {key: self._mean_and_scale(returns) for key, returns in turns.items()}
        tokens = []
        for group, sequence, returns_K in sequences:
            agent = sequence.rows[0].key.agent_id
            mean_K, scale_K = np.array([scales[group, agent, turn] for turn in range(len(returns_K))]).T
            tokens.append((sequence, ((returns_K - mean_K) / scale_K)[sequence.turns_S]))
        return by_row(tokens)

    def _mean_and_scale(self, returns: list[float]) -> tuple[float, float]:
        if min(returns) == max(returns):  # rounding in the mean of equal returns is no advantage
            return returns[0], 1.0
        scale = float(np.std(returns, ddof=1)) + self.options.std_eps if self.options.std_normalise else 1.0
        return float(np.mean(returns)), scale
