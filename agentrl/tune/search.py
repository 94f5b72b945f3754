"""The search for faster settings: one knob at a time, each from the best settings so far (coordinate descent)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, Protocol

from agentrl.config.schema import Config
from agentrl.core.errors import TrialError, UserError
from agentrl.obs.progress import format_left
from agentrl.tune.measurement import Measurement, noise

Settings = Mapping[str, Any]
"""Values by full key, such as ``{"rollout.concurrency": 512}``; None is the key's default."""
Outcome = Literal[
    "start", "repeat", "kept", "no gain", "failed", "refused", "skipped", "interrupted", "confirmed", "not confirmed"
]
_LIMIT = 3.0
"""A trial may take so many times as long as the start configuration took."""
_GRACE_S = 30.0
_CHEAP = 0.1
_MIN_SHARE = 0.03
"""A knob is not tried if the phases that it can shorten have a smaller share of the step."""


@dataclass(frozen=True, slots=True)
class Knob:
    """Keys that are tried together."""

    name: str
    choices: Callable[[Config], Sequence[Sequence[Settings]]]
    """Returns directions from the best configuration so far. The settings of a direction are tried in their order until one
    does not gain; after a direction that gained, the others are left out."""
    phases: tuple[str, ...] = ()
    """Phases of a step that it can shorten; empty: all."""
    restarts: bool = True
    """Whether engines or learner start again for it."""


@dataclass(frozen=True, slots=True)
class Trial:
    """One line of the result."""

    name: str
    """The settings, as text."""
    outcome: Outcome
    measurement: Measurement | None = None
    gain: float | None = None
    """Over the best settings before it; of all settings together over the start."""
    reason: str = ""
    """Why there is no measurement."""

    def __str__(self) -> str:
        """Return one line for the user."""
        measured = self.measurement
        parts = [self.outcome, self.reason.partition("\n")[0]]
        if measured is not None:
            parts += [f"{measured.step_s:.2f} s a step, {measured.tokens_per_s:,.0f} tokens/s"]
        if self.gain is not None:
            parts += [f"{self.gain:+.1%}"]
        return f"{self.name}: {', '.join(filter(None, parts))}"


class TrialRunner(Protocol):
    """Runs trials."""

    def run(self, config: Config, limit_s: float, *, fresh: bool = False) -> Measurement:
        """Measure steps of a configuration, in processes that are ``fresh`` or that an earlier trial has left.

        Raises:
            TrialError: it failed, or took longer than ``limit_s``.
        """
        ...


class Search:
    """A search, with what it has found so far: it may be interrupted at any time.

    Args:
        runner: runs the trials.
        resolve: returns the configuration with settings on top of the user's. Raises `UserError` for those that are not valid
            or known not to fit.
        budget_s: seconds for all trials.
        note: prints progress.
        clock: seconds.
    """

    def __init__(
        self,
        runner: TrialRunner,
        resolve: Callable[[Settings], Config],
        *,
        budget_s: float,
        note: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.best: dict[str, Any] = {}
        """The settings that were kept."""
        self.trials: list[Trial] = []
        self.noise = 0.0
        """Relative gain up to which a trial may be chance."""
        self._runner, self._resolve, self._note, self._clock = runner, resolve, note, clock
        self._end = clock() + budget_s
        self._start: Measurement | None = None
        self._best: Measurement | None = None
        """Measurement of the configuration with the settings that were kept."""

    def run(self, knobs: Sequence[Knob]) -> None:
        """Measure the start, try the knobs, and measure what was kept again.

        Raises:
            TrialError: the start configuration cannot be measured.
            KeyboardInterrupt: an interrupt; the results so far stay.
        """
        config = self._resolve({})
        self._start = self._best = self._runner.run(config, self._end - self._clock())
        self._add(Trial("start", "start", self._start))
        repeat = self._runner.run(config, self._limit_s(), fresh=self._is_cheap())
        self._add(Trial("start again", "repeat", repeat, self._gain(repeat, self._start)))
        self.noise = noise(self._start, repeat)
        self._note(f"the start differs from itself by up to {self.noise:.1%}: smaller gains are not kept")
        for knob in sorted(knobs, key=lambda knob: (knob.restarts, -self._share(knob))):
            self._try(knob)
        if self.best and self._fits(restarts=True):
            self._confirm()

    def _confirm(self) -> None:
        """Measure all settings that were kept in a separate run, and drop them if they gain nothing together."""
        assert self._start is not None, "the start is measured first"
        name = describe(self.best)
        try:
            measured = self._runner.run(self._resolve(self.best), self._limit_s(), fresh=True)
        except TrialError as error:
            self.best = {}
            return self._add(Trial(name, "failed", reason=str(error)))
        gain = self._gain(measured, self._start)
        if gain <= self.noise:
            self.best = {}
        self._add(Trial(name, "confirmed" if self.best else "not confirmed", measured, gain))
        return None

    def _try(self, knob: Knob) -> None:
        """Try a knob's directions until one gains."""
        if knob.phases and (share := self._share(knob)) < _MIN_SHARE:
            reason = f"{', '.join(knob.phases)}: {share:.1%} of a step"
            return self._add(Trial(knob.name, "skipped", reason=reason))
        for direction in knob.choices(self._resolve(self.best)):
            gains = [*takewhile(bool, (self._choose(knob, settings) for settings in direction))]
            if gains:
                return None
        return None

    def _choose(self, knob: Knob, settings: Settings) -> bool:
        """Try settings, keep them if they gain more than chance, and return whether they did."""
        name = describe(settings)
        if not self._fits(restarts=knob.restarts):
            self._add(Trial(name, "skipped", reason="no time left"))
            return False
        assert self._best is not None, "the start is measured first"
        try:
            config = self._resolve({**self.best, **settings})
        except UserError as error:
            self._add(Trial(name, "refused", reason=str(error)))
            return False
        self._note(f"{name} …")
        try:
            gain, measured = self._measure_twice(config, self._best)
        except TrialError as error:
            self._add(Trial(name, "failed", reason=str(error)))
            return False
        except KeyboardInterrupt:
            self._add(Trial(name, "interrupted"))
            raise
        is_kept = gain > self.noise
        self._add(Trial(name, "kept" if is_kept else "no gain", measured, gain))
        if is_kept:
            self.best |= settings
            self._best = measured
        return is_kept

    def _measure_twice(self, config: Config, base: Measurement) -> tuple[float, Measurement]:
        """Return the gain over ``base`` and its measurement; of what gains more than chance, the smaller gain of two trials.

        Of many choices that gain nothing, one is lucky; hardly one is twice.
        """
        measured = self._runner.run(config, self._limit_s())
        gain = self._gain(measured, base)
        if gain <= self.noise:
            return gain, measured
        again = self._runner.run(config, self._limit_s())
        return min(gain, self._gain(again, base)), Measurement([*measured.steps, *again.steps], measured.start_s)

    def _add(self, trial: Trial) -> None:
        self.trials.append(trial)
        self._note(f"{trial}; {format_left(max(0.0, self._end - self._clock()))} left")

    @staticmethod
    def _gain(measured: Measurement, base: Measurement) -> float:
        return measured.tokens_per_s / base.tokens_per_s - 1

    def _share(self, knob: Knob) -> float:
        assert self._start is not None, "the start is measured first"
        return self._start.share(knob.phases) if knob.phases else 1.0

    def _is_cheap(self) -> bool:
        """Whether another start of all processes costs a small part of the time."""
        assert self._start is not None, "the start is measured first"
        return self._start.start_s < _CHEAP * (self._end - self._clock())

    def _trial_s(self, *, restarts: bool) -> float:
        """Return how long a trial takes if it is as fast as the start configuration."""
        assert self._start is not None, "the start is measured first"
        steps_s = (len(self._start.steps) + 1) * self._start.step_s
        return steps_s + (self._start.start_s if restarts else 0.0)

    def _fits(self, *, restarts: bool) -> bool:
        return self._clock() + self._trial_s(restarts=restarts) < self._end

    def _limit_s(self) -> float:
        return min(self._end - self._clock(), _LIMIT * self._trial_s(restarts=True) + _GRACE_S)


def describe(settings: Settings) -> str:
    """Return settings as on a command line."""
    return " ".join(
        f"{key}={'null' if value is None else str(value).lower() if isinstance(value, bool) else value}"
        for key, value in settings.items()
    )
