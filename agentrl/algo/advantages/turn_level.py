"""Turn-level advantages. Legend: ``S`` sampled tokens of a sequence, ``K`` turns."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from agentrl.algo.advantages.rewards import by_row, sequences_with_returns
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.config.algo import TurnLevelAdvantage


def turn_level(given: AdvantageInput, options: TurnLevelAdvantage) -> Advantages:
    """Return for each turn its return minus the mean return of the group's *other* rollouts that reached this turn.

    The return of turn k is ``Σ_{j ≥ k} gamma^(j - k) · reward_j``. Whether a rollout reaches turn k is decided before turn k,
    so the baseline does not depend on what is sampled in it, and the gradient has no bias. (Centring each turn's *reward*
    before summing has one: every further turn adds a term whose mean is not 0, so that longer episodes are paid for;
    verl-project/verl#7244.) A turn that no other rollout reached is compared with the last turn that one of them reached:
    with an advantage of 0, turns would count the less, the fewer rollouts reach them. A group of one gets 0.
    """
    returns: dict[tuple[int, str], list[tuple[object, np.ndarray]]] = defaultdict(list)
    sequences = sequences_with_returns(given, options.gamma)
    for group, sequence, returns_K in sequences:
        returns[group, sequence.rows[0].key.agent_id].append((sequence, returns_K))
    tokens = []
    for group, sequence, returns_K in sequences:
        advantages_K = np.zeros(len(returns_K))
        rivals = [other for one, other in returns[group, sequence.rows[0].key.agent_id] if one is not sequence]
        last = max(map(len, rivals), default=0) - 1
        for turn, value in enumerate(returns_K):
            others = [other[min(turn, last)] for other in rivals if len(other) > min(turn, last)]
            if any(other != value for other in others):  # rounding in the mean of equal returns is no advantage
                advantages_K[turn] = value - np.mean(others)
        tokens.append((sequence, advantages_K[sequence.turns_S]))
    return by_row(tokens)
