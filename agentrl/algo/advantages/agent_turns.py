"""Returns of turns, compared by agent. Legend: ``S`` sampled tokens of a sequence, ``K`` turns."""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from agentrl.algo.advantages.rewards import by_row, sequences_with_returns
from agentrl.algo.base import AdvantageInput, Advantages
from agentrl.config.algo import AgentNormAdvantage, AtGrpoAdvantage


def at_grpo(given: AdvantageInput, options: AtGrpoAdvantage) -> Advantages:
    """Return for each turn its return minus the mean return of this turn, divided by their standard deviation plus eps.

    Compared is turn k of an agent with turn k of the same agent in the task's other rollouts. A turn that no other
    rollout reached gets 0.

    Source: AT-GRPO, arXiv:2510.11062, section 4.2. There the candidates of a turn are sampled in the same state. Here
    they are of whole episodes, so that only the first turn's have one state. The standard deviation is the sample's (n - 1).
    """
    turns: dict[tuple[int, str, int], list[float]] = defaultdict(list)
    sequences = sequences_with_returns(given, options.gamma)
    for group, sequence, returns_K in sequences:
        for turn, value in enumerate(returns_K.tolist()):
            turns[group, sequence.rows[0].key.agent_id, turn].append(value)
    tokens = []
    for group, sequence, returns_K in sequences:
        compared = [turns[group, sequence.rows[0].key.agent_id, turn] for turn in range(len(returns_K))]
        values = zip(returns_K.tolist(), compared, strict=True)
        advantages_K = np.array([_relative(value, others, options) for value, others in values])
        tokens.append((sequence, advantages_K[sequence.turns_S]))
    return by_row(tokens)


def _relative(value: float, compared: list[float], options: AtGrpoAdvantage) -> float:
    if min(compared) == max(compared):  # rounding in the mean of equal returns is no advantage
        return 0.0
    centred = value - float(np.mean(compared))
    return centred / (float(np.std(compared, ddof=1)) + options.std_eps) if options.std_normalise else centred


def agent_norm(given: AdvantageInput, options: AgentNormAdvantage) -> Advantages:
    """Return each turn's return, normalised over all turns of its role in the training step.

    Source: MARSHAL, arXiv:2510.15414, section 3: ``(R - mean) / (std + eps)`` for each role, so that a role with larger rewards,
    or the better one of two roles, does not dominate. A role whose returns are all equal gets 0. The standard deviation
    is the sample's (n - 1).
    """
    sequences = sequences_with_returns(given, options.gamma)
    roles = {rollout.rollout_id: rollout.role for rollout in given.groups.rollouts_N}
    returns: dict[tuple[str, str], list[float]] = defaultdict(list)
    keys = [(roles[one.rows[0].key.rollout_id], one.rows[0].key.agent_id) for _, one, _ in sequences]
    for key, (_, _, returns_K) in zip(keys, sequences, strict=True):
        returns[key] += returns_K.tolist()
    tokens = []
    for key, (_, sequence, returns_K) in zip(keys, sequences, strict=True):
        every = returns[key]
        scale = float(np.std(every, ddof=1)) + options.std_eps if np.ptp(every) else np.inf
        tokens.append((sequence, ((returns_K - np.mean(every)) / scale)[sequence.turns_S]))
    return by_row(tokens)
