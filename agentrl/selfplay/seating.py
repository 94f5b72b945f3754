"""Who plays in the episodes of a step: classes of opponents by share of the tasks, and the policy's seat."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.config.self_play import MIRROR, PAST, SelfPlayConfig
from agentrl.selfplay.games import POLICY

_MIX = 0x6D6978
"""Keeps these random numbers apart from others of the same seed and step."""


@dataclass(frozen=True, slots=True)
class Seating:
    """Who plays in an episode."""

    opponent: str
    """Class of opponents: ``mirror``, ``past``, ``fixed:NAME`` or ``endpoint:NAME``."""
    players: tuple[str, ...]
    """By seat: `POLICY`, the name of a snapshot, ``fixed:NAME`` or ``endpoint:NAME``."""


def task_opponents(mix: Mapping[str, float], tasks: int, seed: int, step: int) -> list[str]:
    """Return the class of opponents of each task of a step, a function of mix, seed and step.

    Each class has its share of the tasks, up to one more or less, and over many steps exactly its share in the mean
    (systematic sampling); which tasks it has is random.
    """
    rng = np.random.default_rng([seed, step, _MIX])
    names = [name for name, share in mix.items() if share]
    shares = np.array([mix[name] for name in names], np.float64)
    ends = np.cumsum(shares / shares.sum())
    ends[-1] = 1.0
    points = (np.arange(tasks) + rng.random()) / max(tasks, 1)
    return [names[index] for index in rng.permutation(np.searchsorted(ends, points, side="right")).tolist()]


def step_seatings(
    config: SelfPlayConfig, *, seats: int, tasks: int, samples: int, seed: int, step: int, snapshots: Sequence[str]
) -> list[list[Seating]]:
    """Return who plays in each episode of a step, by task and sample.

    All episodes of a task have the same opponents, so that its rollouts can be compared. With ``swap_seats`` the policy's
    seat changes from sample to sample, and from task to task if a task has one sample. Tasks against past snapshots are
    dealt out to ``snapshots`` in turn.

    Args:
        config: of self-play.
        seats: of the environment.
        tasks: of the step.
        samples: episodes of a task.
        seed: of the run.
        step: about to be sampled.
        snapshots: names of those that can play in this step; without any, ``past`` tasks are mirror play.

    """
    found, past = [], 0
    for task, opponent in enumerate(task_opponents(config.mix, tasks, seed, step)):
        name = opponent
        if opponent == PAST:
            name = snapshots[past % len(snapshots)] if snapshots else POLICY
            opponent = PAST if snapshots else MIRROR
            past += 1
        elif opponent == MIRROR:
            name = POLICY
        of_task = []
        for sample in range(samples):
            mine = (task + sample) % seats if config.swap_seats else 0
            of_task.append(Seating(opponent, tuple(POLICY if seat == mine else name for seat in range(seats))))
        found.append(of_task)
    return found
