"""Turn-level advantages. Legend: ``S`` sampled tokens of a sequence, ``K`` turns."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from pydantic import Field
from typing_extensions import override

from agentrl.algo.advantages.rewards import Floats, by_row, sequences_with_returns
from agentrl.algo.base import AdvantageEstimator, AdvantageInput, Advantages
from agentrl.batch.sequences import SampledSequence


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
        agents: dict[tuple[int, str], list[tuple[SampledSequence, Floats]]] = defaultdict(list)
        sequences = sequences_with_returns(inputs, self.options.gamma)
        for group, sequence, returns_K in sequences:
            agents[group, sequence.rows[0].key.agent_id].append((sequence, returns_K))
        tokens = []
        for group, sequence, returns_K in sequences:
            advantages_K = np.zeros(len(returns_K))
            agent = agents[group, sequence.rows[0].key.agent_id]
            rivals = [rival_K for rival, rival_K in agent if rival is not sequence]
            last = max(map(len, rivals), default=0) - 1
            for turn, turn_return in enumerate(returns_K):
                compared = [rival_K[min(turn, last)] for rival_K in rivals if len(rival_K) > min(turn, last)]
                if any(
                    rival != turn_return for rival in compared
                ):  # rounding in the mean of equal returns is no advantage
                    advantages_K[turn] = turn_return - np.mean(compared)
            tokens.append((sequence, advantages_K[sequence.turns_S]))
        return by_row(tokens)
