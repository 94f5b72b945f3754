"""The search for faster settings: one knob at a time, each from the best settings so far (coordinate descent)."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, TrialError
from agentrl.obs.progress import format_left
from agentrl.tune.measurement import Measurement, noise

Settings = Mapping[str, Any]
"""Values by full key, such as ``{"rollout.concurrency": 512}``; None is the key's default."""
Outcome = Literal["start", "repeat", "kept", "no gain", "failed", "refused", "skipped", "interrupted", "confirmed"]
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
    """Over the best settings before it; of ``confirmed`` over the start."""
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
        return f"{self.name}: {', '.join(part for part in parts if part)}"


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
        resolve: returns the configuration with settings on top of the user's. Raises `ConfigError` for those that are not valid
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
        """Of the configuration with the settings that were kept."""

    def run(self, knobs: Sequence[Knob]) -> None:
        """Measure the start, try the knobs, and measure what was kept again.

        Raises:
            TrialError: the start configuration cannot be measured.
            KeyboardInterrupt: an interrupt; the results so far stay.
        """
        config = self._resolve({})
        self._start = self._best = self._measure("start", config, "start")
        try:
            repeat = self._measure("start again", config, "repeat", fresh=self._is_cheap())
        except TrialError as error:
            raise TrialError(f"the start configuration ran once, and then not again: {error}") from error
        self.noise = noise(self._start, repeat)
        self._note(f"the start differs from itself by up to {self.noise:.1%}: smaller gains are not kept")
        for knob in sorted(knobs, key=lambda knob: (knob.restarts, -self._share(knob))):
            self._try(knob)
        if self.best and self._fits(restarts=True):
            try:
                together = self._measure(describe(self.best), self._resolve(self.best), "confirmed", fresh=True)
            except TrialError as error:
                self._add(Trial(describe(self.best), "failed", reason=str(error)))
            else:
                self._note(f"all together {self._gain(together, self._start):+.1%} over the start")

    def _try(self, knob: Knob) -> None:
        """Try a knob's directions until one gains."""
        if knob.phases and (share := self._share(knob)) < _MIN_SHARE:
            reason = f"{', '.join(knob.phases)}: {share:.1%} of a step"
            return self._add(Trial(knob.name, "skipped", reason=reason))
        for direction in knob.choices(self._resolve(self.best)):
            kept = 0
            for settings in direction:
                if not self._choose(knob, settings):
                    break
                kept += 1
            if kept:
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
        except ConfigError as error:
            self._add(Trial(name, "refused", reason=str(error)))
            return False
        try:
            measured = self._runner.run(config, self._limit_s())
        except TrialError as error:
            self._add(Trial(name, "failed", reason=str(error)))
            return False
        except KeyboardInterrupt:
            self._add(Trial(name, "interrupted"))
            raise
        gain = self._gain(measured, self._best)
        gains = gain > self.noise
        self._add(Trial(name, "kept" if gains else "no gain", measured, gain))
        if gains:
            self.best |= settings
            self._best = measured
        return gains

    def _measure(self, name: str, config: Config, outcome: Outcome, *, fresh: bool = False) -> Measurement:
        limit_s = self._end - self._clock() if self._start is None else self._limit_s()
        measured = self._runner.run(config, limit_s, fresh=fresh)
        gain = None if self._start is None else self._gain(measured, self._start)
        self._add(Trial(name, outcome, measured, gain))
        return measured

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
