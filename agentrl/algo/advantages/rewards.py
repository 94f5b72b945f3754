"""Rewards of rollouts and their groups, as estimators use them. Legend: ``N`` rollouts, ``G`` groups, ``S`` tokens."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from agentrl.algo.base import AdvantageInput
from agentrl.batch.sequences import SampledSequence, sampled_sequences
from agentrl.core.errors import ConfigError
from agentrl.core.types import Rollout, RowKey

Floats = NDArray[np.float64]


def rewards_N(inputs: AdvantageInput) -> Floats:
    """Return the reward of each rollout, minus the KL penalties of its tokens if they belong to the reward."""
    return np.array(
        [
            rollout.reward - sum(float(sequence.gather(inputs.kl).sum()) for sequence in sampled_sequences(rollout))
            if inputs.kl
            else rollout.reward
            for rollout in inputs.groups.rollouts_N
        ],
        np.float64,
    )


def group_sizes_N(inputs: AdvantageInput) -> Floats:
    """Return the number of rollouts in each rollout's group."""
    groups_N = inputs.groups.groups_N
    return np.bincount(groups_N)[groups_N].astype(np.float64)


def group_means_N(inputs: AdvantageInput, values_N: Floats) -> Floats:
    """Return the mean over each rollout's group."""
    groups_N = inputs.groups.groups_N
    return np.bincount(groups_N, values_N)[groups_N] / group_sizes_N(inputs)


def centred_N(inputs: AdvantageInput, values_N: Floats) -> Floats:
    """Return values minus their group's mean; exact zeros if all of a group are equal, so that rounding in the mean does not
    become a gradient.
    """
    groups_N = inputs.groups.groups_N
    least_G, most_G = np.full(len(values_N), np.inf), np.full(len(values_N), -np.inf)
    np.minimum.at(least_G, groups_N, values_N)
    np.maximum.at(most_G, groups_N, values_N)
    return np.where((least_G == most_G)[groups_N], 0.0, values_N - group_means_N(inputs, values_N))


def by_rollout(inputs: AdvantageInput, advantages_N: Floats) -> dict[str, float]:
    """Return advantages by ``rollout_id``."""
    ids = (rollout.rollout_id for rollout in inputs.groups.rollouts_N)
    return dict(zip(ids, advantages_N.tolist(), strict=True))


def regroup(inputs: AdvantageInput, group_key: Callable[[Rollout], Hashable]) -> AdvantageInput:
    """Return the same rollouts in groups of one task and equal ``group_key``."""
    numbers: dict[Hashable, int] = {}
    pairs = zip(inputs.groups.rollouts_N, inputs.groups.groups_N.tolist(), strict=True)
    groups_N: NDArray[np.int64] = np.array(
        [numbers.setdefault((group, group_key(rollout)), len(numbers)) for rollout, group in pairs], np.int64
    )
    prompt_ids = dict(zip(groups_N.tolist(), (rollout.prompt_id for rollout in inputs.groups.rollouts_N), strict=True))
    prompt_ids_G = tuple(prompt_ids[number] for number in range(len(numbers)))
    return replace(inputs, groups=replace(inputs.groups, groups_N=groups_N, prompt_ids_G=prompt_ids_G))


def sequences_with_rewards(inputs: AdvantageInput) -> list[tuple[SampledSequence, Floats]]:
    """Return all sequences with the reward of each token ``[S]``: minus its KL penalty, and at the end the rollout's.

    Every agent of a rollout gets its reward.
    """
    sequences = []
    for rollout in inputs.groups.rollouts_N:
        for sequence in sampled_sequences(rollout):
            rewards_S = -sequence.gather(inputs.kl)
            if len(rewards_S):
                rewards_S[-1] += rollout.reward
                sequences.append((sequence, rewards_S))
    return sequences


def sequences_with_returns(inputs: AdvantageInput, gamma: float) -> list[tuple[int, SampledSequence, Floats]]:
    """Return all sequences with tokens, each with its rollout's group and the return of each turn, ``[K]``.

    The return of turn k is ``Σ_{j ≥ k} gamma^(j - k) · reward_j``, with the KL penalties of the turn's tokens in its reward.

    Raises:
        ConfigError: see `turn_rewards`.
    """
    sequences = []
    for rollout, group in zip(inputs.groups.rollouts_N, inputs.groups.groups_N.tolist(), strict=True):
        for sequence in sampled_sequences(rollout):
            turns_S = sequence.turns_S
            if not len(turns_S):
                continue
            returns_K = turn_rewards(rollout, int(turns_S[-1]) + 1)
            if inputs.kl:
                returns_K -= np.bincount(turns_S, sequence.gather(inputs.kl), len(returns_K))
            for turn in reversed(range(len(returns_K) - 1)):
                returns_K[turn] += gamma * returns_K[turn + 1]
            sequences.append((group, sequence, returns_K))
    return sequences


def turn_rewards(rollout: Rollout, turns: int) -> Floats:
    """Return the reward of each turn of a rollout; the last turn also gets the rest of the rollout's reward.

    Args:
        rollout: with ``Turn.reward``.
        turns: number of turns up to the last one with a trained token; a later one had no token, or none that is trained.

    Raises:
        ConfigError: the episode recorded fewer turns.
    """
    rewards = np.array([turn.reward for turn in rollout.turns], np.float64)
    if len(rewards) < turns:
        raise ConfigError(
            f"rollout {rollout.rollout_id!r} has {len(rewards)} turns with a reward, but its tokens are of {turns} requests, so "
            "turns cannot be told apart; choose an estimator of whole rollouts (algo.advantage.name)"
        )
    rewards[-1] += rollout.reward - rewards.sum()
    return rewards


def normalise_tokens(tokens: list[tuple[SampledSequence, Floats]]) -> dict[RowKey, NDArray[np.float32]]:
    """Return ``(a - mean) / sqrt(var + 1e-8)`` over the tokens of all sequences, by row; the variance is the sample's (n - 1).

    A single token, and equal values, get zeros.
    """
    if not tokens:
        return {}
    values = np.concatenate([values_S for _, values_S in tokens])
    mean = values.mean()
    scale = np.sqrt(values.var(ddof=1) + 1e-8) if len(values) > 1 and np.ptp(values) else np.inf
    return by_row([(sequence, (values_S - mean) / scale) for sequence, values_S in tokens])


def by_row(tokens: list[tuple[SampledSequence, Floats]]) -> dict[RowKey, NDArray[np.float32]]:
    """Return the tokens' values by row."""
    return {key: row for sequence, values_S in tokens for key, row in sequence.scatter(values_S).items()}
