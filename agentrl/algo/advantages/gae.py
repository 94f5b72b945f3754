"""Generalised advantage estimation. Legend: ``S`` sampled tokens of a sequence, ``K`` time steps."""

from __future__ import annotations

import numpy as np

from agentrl.algo.advantages.rewards import Floats, by_row, normalised, sequences_with_rewards
from agentrl.algo.base import AdvantageInput, Advantages, RowValues
from agentrl.batch.sequences import SampledSequence
from agentrl.config.algo import GaeAdvantage


def gae(given: AdvantageInput, options: GaeAdvantage) -> Advantages:
    """Return the advantage of each sampled token, or of each turn at all of its tokens.

    Source: Schulman et al., arXiv:1506.02438, equation 16. Time steps are sampled tokens only, or turns: then a step's
    value is that of the turn's first token, and its reward the sum over the turn. After the last step the value is 0.
    """
    tokens = [(sequence, advantages_S) for sequence, advantages_S, _ in _estimates(given, options)]
    return normalised(tokens) if options.normalise else by_row(tokens)


def gae_returns(given: AdvantageInput, options: GaeAdvantage) -> RowValues:
    """Return what the critic learns to predict for each token: the advantage before normalisation, plus the value."""
    return by_row(
        [(sequence, advantages_S + values_S) for sequence, advantages_S, values_S in _estimates(given, options)]
    )


def _estimates(given: AdvantageInput, options: GaeAdvantage) -> list[tuple[SampledSequence, Floats, Floats]]:
    """Return each sequence with the advantages and values of its tokens; with turns, those of their turn."""
    found = []
    for sequence, rewards_S in sequences_with_rewards(given):
        values_S = sequence.gather(given.values)
        if options.step == "token":
            found.append((sequence, _gae(rewards_S, values_S, options), values_S))
            continue
        turns_S = sequence.turns_S
        firsts_K = np.unique(turns_S, return_index=True)[1]
        advantages_K = _gae(np.bincount(turns_S, rewards_S).astype(np.float64), values_S[firsts_K], options)
        found.append((sequence, advantages_K[turns_S], values_S[firsts_K][turns_S]))
    return found


def _gae(rewards_K: Floats, values_K: Floats, options: GaeAdvantage) -> Floats:
    advantages_K, later, next_value = np.zeros(len(rewards_K)), 0.0, 0.0
    for index in reversed(range(len(rewards_K))):
        error = rewards_K[index] + options.gamma * next_value - values_K[index]
        later = advantages_K[index] = error + options.gamma * options.lam * later
        next_value = values_K[index]
    return advantages_K
