"""Turn-level advantages. Legend: ``S`` sampled tokens of a sequence, ``K`` turns."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
from pydantic import Field
from typing_extensions import override

from agentrl.algo.advantages.rewards import Floats, by_row, sequences_with_returns
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages


class TurnLevel(AdvantageEstimator):
    """Each turn's return minus the mean return of the group's *other* rollouts that reached this turn.

    The return of turn k is ``Σ_{j ≥ k} gamma^(j - k) · reward_j``. Whether a rollout reaches turn k is decided before turn k,
    so the baseline does not depend on what is sampled in it, and the gradient has no bias. (Centring each turn's *reward*
    before summing has one: every further turn adds a term whose mean is not 0, so that longer episodes are paid for;
    verl-project/verl#7244.) A turn that no other rollout reached is compared with the last turn that one of them reached:
    with an advantage of 0, turns would count the less, the fewer rollouts reach them. A group of one gets 0.
    """

    compares_group = True
    streams = True

    class Options(AdvantageEstimator.Options):
        """Options of ``turn_level``."""

        gamma: float = Field(default=1.0, gt=0, le=1)
        """Discount of a turn."""

    options: Options

    @override
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        agents: dict[tuple[int, str], list[Floats]] = defaultdict(list)
        sequences = sequences_with_returns(inputs, self.options.gamma)
        for group, sequence, returns_K in sequences:
            agents[group, sequence.rows[0].key.agent_id].append(returns_K)
        turns = {agent: _Turns(returns) for agent, returns in agents.items()}
        return by_row(
            [
                (sequence, turns[group, sequence.rows[0].key.agent_id].advantages_K(returns_K)[sequence.turns_S])
                for group, sequence, returns_K in sequences
            ]
        )


class _Turns:
    """The returns of an agent's sequences in a group, by turn, as far as two sequences reach."""

    def __init__(self, returns: Sequence[Floats]) -> None:
        self.shared = sorted(map(len, returns))[-2] if len(returns) > 1 else 0
        self.by_turn = [
            np.array([returns_K[turn] for returns_K in returns if len(returns_K) > turn]) for turn in range(self.shared)
        ]
        self.means = [values.mean() for values in self.by_turn]
        self.are_equal = [bool(np.ptp(values) == 0) for values in self.by_turn]

    def advantages_K(self, returns_K: Floats) -> Floats:
        """Return each turn's return minus the mean of the others'; exactly 0 if they are equal, whose mean would be rounded."""
        advantages_K = np.zeros(len(returns_K))
        for turn in range(min(len(returns_K), self.shared)):
            if not self.are_equal[turn]:
                count = len(self.by_turn[turn])
                advantages_K[turn] = (returns_K[turn] - self.means[turn]) * count / (count - 1)
        if 0 < self.shared < len(returns_K):  # no other sequence is as long
            last = self.by_turn[-1]
            others = np.delete(last, np.flatnonzero(last == returns_K[self.shared - 1])[:1])
            later_K = returns_K[self.shared :]
            equal_K = (later_K == others.min()) & (others.min() == others.max())
            advantages_K[self.shared :] = np.where(equal_K, 0.0, later_K - others.mean())
        return advantages_K
