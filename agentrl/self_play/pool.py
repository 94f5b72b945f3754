"""The opponent pool: which snapshots there are, and which of them play in a step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from agentrl.config.self_play import PoolConfig

_CHOICE = 0x706F6F6C
"""Keeps these random numbers apart from others of the same seed and step."""


def snapshot_name(step: int) -> str:
    """Return the name of a snapshot, as a player and as a folder."""
    return f"step_{step:06d}"


def snapshot_step(name: str) -> int:
    """Return the step of a snapshot by its name."""
    return int(name.removeprefix("step_"))


@dataclass(slots=True)
class OpponentPool:
    """The snapshots of a run, by the step after which they were taken."""

    config: PoolConfig
    steps: list[int] = field(default_factory=list)
    """In ascending order."""

    @property
    def names(self) -> list[str]:
        """Names of the snapshots, the newest last."""
        return [snapshot_name(step) for step in self.steps]

    def due(self, step: int) -> bool:
        """Return whether a snapshot is to be taken after ``step``; never twice."""
        return step % self.config.snapshot_every == 0 and step not in self.steps

    def add(self, step: int, best: int | None = None) -> list[int]:
        """Add a snapshot and return those that are given up for it.

        Args:
            step: of the snapshot.
            best: of the snapshot with the best rating, which stays.
        """
        self.steps = sorted({*self.steps, step})
        dropped = []
        while len(self.steps) > max(self.config.keep, 1) and (redundant := self._least_needed(best)) is not None:
            self.steps.remove(redundant)
            dropped.append(redundant)
        return dropped

    def _least_needed(self, best: int | None) -> int | None:
        """Return the snapshot between whose neighbours the fewest steps are, the earlier of equal ones; None if all must stay."""
        if self.config.keep == 1:
            return self.steps[0]
        inner = zip(self.steps[:-2], self.steps[1:-1], self.steps[2:], strict=True)
        gaps = [(next_step - previous_step, step) for previous_step, step, next_step in inner if step != best]
        if gaps:
            return min(gaps)[1]
        return self.steps[0] if self.steps[0] != best else None

    def choose(self, seed: int, step: int, count: int, score: Callable[[str], float]) -> list[str]:
        """Return the names of up to ``count`` different snapshots that play in a step, a function of seed, step and scores.

        Args:
            seed: of the run.
            step: about to be sampled.
            count: how many can play at the same time.
            score: of the policy against a snapshot by name, from 0 to 1; for ``choose=pfsp``.
        """
        weights_N = self.weights([score(name) for name in self.names])
        if not len(weights_N):
            return []
        rng = np.random.default_rng([seed, step, _CHOICE])
        possible = int(np.count_nonzero(weights_N))
        chosen = rng.choice(len(weights_N), min(count, possible), replace=False, p=weights_N)
        return [snapshot_name(self.steps[number]) for number in chosen.tolist()]

    def weights(self, scores: Sequence[float]) -> NDArray[np.float64]:
        """Return the probability of each snapshot, ``[N]``, given the policy's scores against them.

        ``pfsp`` is prioritised fictitious self-play (AlphaStar, Nature 575:350, 2019) with ``(1 - score) ** power``. If the
        policy always wins against all of them, all are equally probable.
        """
        count, config = len(self.steps), self.config
        ages_N = np.arange(count)[::-1]
        weights_N: NDArray[np.float64] = np.ones(count)
        if config.choose == "latest":
            weights_N = (ages_N == 0).astype(np.float64)
        elif config.choose == "recent":
            weights_N = np.asarray(config.recency**ages_N, np.float64)
        elif config.choose == "pfsp":
            weights_N = (1 - np.array(scores, np.float64)) ** config.pfsp_power
        total = weights_N.sum()
        return weights_N / total if total > 0 else np.full(count, 1 / max(count, 1))
