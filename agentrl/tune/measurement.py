"""What a trial measured: tokens a second of whole steps, and their spread."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from agentrl.obs.step_times import StepTimes

_LOGGED = ("train/sampler_kl", "rollout/accept_length", "train/peak_gpu_gib")
"""Metrics that a table of trials has, if the run has them."""


@dataclass(frozen=True, slots=True)
class Measurement:
    """The measured steps of a trial; at least one."""

    steps: Sequence[StepTimes]
    start_s: float = 0.0
    """Seconds until the run had started; 0 if it ran already."""

    @property
    def step_s(self) -> float:
        """Seconds a step."""
        return statistics.fmean(step.wall_s for step in self.steps)

    @property
    def rates(self) -> list[float]:
        """Sampled tokens a second of each step, all phases included."""
        return [step.metrics["rollout/sampled_tokens"] / step.wall_s for step in self.steps]

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens a second of all steps together. It depends less than seconds a step on the tasks that a step gets."""
        return sum(step.metrics["rollout/sampled_tokens"] for step in self.steps) / sum(
            step.wall_s for step in self.steps
        )

    @property
    def spread(self) -> float:
        """Standard deviation of `rates` as a share of their mean; 0 of one step."""
        return statistics.stdev(self.rates) / statistics.fmean(self.rates) if len(self.rates) > 1 else 0.0

    def share(self, phases: Collection[str]) -> float:
        """Return the share of the time that is in these phases."""
        seconds = sum(step.phases().get(phase, 0.0) for step in self.steps for phase in phases)
        return seconds / sum(step.wall_s for step in self.steps)

    def metrics(self) -> dict[str, float]:
        """Return means over the steps of metrics that say whether a choice can be trusted."""
        values = {name: [step.metrics[name] for step in self.steps if name in step.metrics] for name in _LOGGED}
        return {name: statistics.fmean(numbers) for name, numbers in values.items() if numbers}


_LEAST = 0.02
"""A smaller gain is worth no setting."""
_ERRORS = 3.0
"""Standard errors of a difference: with a few steps these are known roughly, and of many choices one is the luckiest."""


def noise(first: Measurement, second: Measurement) -> float:
    """Return the relative difference of two trials that may be chance, from two trials of the same configuration.

    The largest of 2%, of their difference, and of three times the standard error of such a difference by the spread of their
    steps.
    """
    slower, faster = sorted((first.tokens_per_s, second.tokens_per_s))
    difference = faster / slower - 1
    spread = math.sqrt((first.spread**2 + second.spread**2) / 2)
    error = spread * math.sqrt(1 / len(first.steps) + 1 / len(second.steps))
    return max(_LEAST, difference, _ERRORS * error)
