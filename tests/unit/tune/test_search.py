"""The search on virtual trials: each takes virtual time, and has the speed that a function of its settings gives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agentrl.config.load import load_config, read_yaml
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, TrialError
from agentrl.obs.step_times import StepTimes
from agentrl.tune.measurement import Measurement, noise
from agentrl.tune.report import result_table, write_settings
from agentrl.tune.resolve import settings_tree
from agentrl.tune.search import Knob, Search, Settings

TOKENS = 1000
STEPS = 3


def measurement(*walls_s: float, start_s: float = 0.0, rollout: float = 0.5) -> Measurement:
    """Steps of 1,000 tokens, of whose time ``rollout`` is in the phase ``rollout`` and the rest in ``train``."""
    steps = [
        StepTimes(
            number,
            wall_s,
            {},
            {
                "time/step_s": wall_s,
                "time/rollout_s": rollout * wall_s,
                "time/train_s": (1 - rollout) * wall_s,
                "rollout/sampled_tokens": TOKENS,
            },
        )
        for number, wall_s in enumerate(walls_s)
    ]
    return Measurement(steps, start_s)


@dataclass
class ScriptedTrials:
    """Trials of ``speed`` steps a second, each step by chance up to ``jitter`` slower or faster."""

    speed: Callable[[Config], float]
    jitter: float = 0.01
    start_s: float = 10.0
    rollout: float = 0.5
    time_s: float = 0.0
    seen: list[tuple[int, int, bool]] = field(default_factory=list)
    """Concurrency and tokens of a micro-batch of each trial, and whether it was fresh."""
    limits_s: list[float] = field(default_factory=list)
    seed: int = 5
    _random: random.Random = field(init=False)

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)

    def run(self, config: Config, limit_s: float, *, fresh: bool = False) -> Measurement:
        self.seen.append((config.rollout.concurrency, config.batch.micro_tokens, fresh))
        self.limits_s.append(limit_s)
        speed = self.speed(config)
        walls_s = [(1 + self._random.uniform(-self.jitter, self.jitter)) / speed for _ in range(STEPS)]
        self.time_s += self.start_s + sum(walls_s) + walls_s[0]
        return measurement(*walls_s, start_s=self.start_s, rollout=self.rollout)


def resolve(settings: Settings) -> Config:
    keys = [f"{key}={value}" for key, value in settings.items()]
    return load_config(None, ["rollout.concurrency=64", "batch.tokens_per_micro=4096", *keys])


def search_by(trials: ScriptedTrials, *knobs: Knob, budget_s: float = 1000.0) -> Search:
    search = Search(trials, resolve, budget_s=budget_s, note=lambda text: None, clock=lambda: trials.time_s)
    search.run(knobs)
    return search


def outcomes(search: Search) -> list[tuple[str, str]]:
    return [(trial.name, trial.outcome) for trial in search.trials]


def doubling(key: str, values: Sequence[Sequence[Any]], phases: tuple[str, ...] = ()) -> Knob:
    return Knob(key, lambda config: [[{key: value} for value in direction] for direction in values], phases)


EPISODES = doubling("rollout.concurrency", [[128, 256, 512], [32]])
MICRO = doubling("batch.tokens_per_micro", [[8192], [2048, 1024]])


def test_a_direction_is_followed_while_it_gains_and_the_next_knob_starts_from_there() -> None:
    """Most speed is at 256 episodes and 2,048 tokens: the direction to fewer episodes is left out, that to fewer tokens tried."""

    def speed(config: Config) -> float:
        episodes, tokens = config.rollout.concurrency, config.batch.micro_tokens
        return {64: 1.0, 128: 1.3, 256: 1.6, 512: 1.5}[episodes] * {4096: 1.0, 8192: 0.8, 2048: 1.2, 1024: 1.1}[tokens]

    trials = ScriptedTrials(speed)
    search = search_by(trials, EPISODES, MICRO)
    assert search.best == {"rollout.concurrency": 256, "batch.tokens_per_micro": 2048}
    assert trials.seen == [
        (64, 4096, False),
        (64, 4096, True),
        *((episodes, 4096, False) for episodes in (128, 128, 256, 256, 512)),  # what gains is measured twice
        *((256, tokens, False) for tokens in (8192, 2048, 2048, 1024)),
        (256, 2048, True),
    ]
    assert [outcome for _, outcome in outcomes(search)] == [
        *("start", "repeat", "kept", "kept", "no gain", "no gain", "kept", "no gain", "confirmed")
    ]
    gains = [trial.gain for trial in search.trials]
    assert gains[2] == pytest.approx(0.3, abs=0.03)
    assert gains[3] == pytest.approx(1.6 / 1.3 - 1, abs=0.03), "over the settings kept before"
    assert gains[-1] == pytest.approx(0.92, abs=0.06), "over the start"


def test_chance_is_hardly_ever_kept_and_a_gain_above_it_nearly_always() -> None:
    """Fifty searches of six settings each: none is faster, or one is by a tenth where steps differ by 3%."""
    by_chance = sum(
        bool(search_by(ScriptedTrials(lambda config: 1.0, 0.3, seed=seed), EPISODES, MICRO).best) for seed in range(50)
    )
    assert by_chance <= 2
    right = 0
    for seed in range(50):
        trials = ScriptedTrials(lambda config: 1.1 if config.rollout.concurrency == 32 else 1.0, 0.03, seed=seed)
        right += search_by(trials, EPISODES, MICRO).best == {"rollout.concurrency": 32}
    assert right >= 45


def test_settings_that_gain_nothing_in_a_run_of_their_own_are_dropped(tmp_path: Path) -> None:
    """Such as a speed-up of tasks that came late in the run of the trials."""

    def speed(config: Config) -> float:
        return 1.0 if trials.seen[-1][2] or config.rollout.concurrency == 64 else 1.5

    trials = ScriptedTrials(speed)
    search = search_by(trials, doubling("rollout.concurrency", [[128]]))
    assert [outcome for _, outcome in outcomes(search)] == ["start", "repeat", "kept", "not confirmed"]
    assert search.best == {}
    write_settings(tmp_path / "tuned.yaml", search, [])
    assert read_yaml(tmp_path / "tuned.yaml") == {}


def test_noise_is_the_difference_of_two_trials_or_that_which_the_spread_of_their_steps_gives() -> None:
    assert noise(measurement(1.0, 1.0, 1.0), measurement(1.25, 1.25, 1.25)) == pytest.approx(0.25)
    assert noise(measurement(0.9, 1.0, 1.1), measurement(0.9, 1.0, 1.1)) == pytest.approx(
        3 * 0.1005 * (2 / 3) ** 0.5, abs=1e-3
    )
    assert noise(measurement(1.0, 1.0), measurement(1.0, 1.0)) == 0.02


def test_trials_that_fail_or_are_refused_are_results_and_the_search_goes_on() -> None:
    def speed(config: Config) -> float:
        if config.rollout.concurrency == 128:
            raise TrialError("CUDA out of memory\nmany lines")
        return 2.0 if config.batch.micro_tokens == 8192 else 1.0

    search = search_by(ScriptedTrials(speed), doubling("rollout.concurrency", [[128, 256], [0]]), MICRO)
    assert outcomes(search)[2:] == [
        ("rollout.concurrency=128", "failed"),
        ("rollout.concurrency=0", "refused"),
        ("batch.tokens_per_micro=8192", "kept"),
        ("batch.tokens_per_micro=8192", "confirmed"),
    ]
    assert "CUDA out of memory" in search.trials[2].reason
    assert "rollout.concurrency" in search.trials[3].reason
    assert str(search.trials[2]) == "rollout.concurrency=128: failed, CUDA out of memory", "one line for the user"


def test_a_start_that_fails_is_the_error() -> None:
    def speed(config: Config) -> float:
        raise TrialError("no engine")

    with pytest.raises(TrialError, match="no engine"):
        search_by(ScriptedTrials(speed), EPISODES)


def test_a_knob_whose_phases_have_no_time_is_skipped_and_the_larger_share_comes_first() -> None:
    small = doubling("rollout.concurrency", [[128]], ("rollout",))
    large = doubling("batch.tokens_per_micro", [[8192]], ("train",))
    search = search_by(ScriptedTrials(lambda config: 1.0, rollout=0.02), small, large)
    assert outcomes(search)[2:] == [("batch.tokens_per_micro=8192", "no gain"), ("rollout.concurrency", "skipped")]
    assert search.trials[3].reason == "rollout: 2.0% of a step"


def test_no_trial_begins_that_would_not_end_in_time() -> None:
    """A trial takes 14 s: after the start, its repetition and one more, the budget of 50 s has room for none."""
    trials = ScriptedTrials(lambda config: 1.0)
    search = search_by(trials, EPISODES, budget_s=50)
    assert [outcome for _, outcome in outcomes(search)] == ["start", "repeat", "no gain", "skipped"]
    assert search.trials[-1].reason == "no time left"
    assert not trials.seen[1][2], "of processes that take so long to start, the repetition uses those that run"
    assert trials.limits_s[0] == 50
    assert all(limit_s < 50 for limit_s in trials.limits_s[1:])


def test_an_interrupt_leaves_what_was_found_and_it_is_written(tmp_path: Path) -> None:
    def speed(config: Config) -> float:
        if config.rollout.concurrency == 256:
            raise KeyboardInterrupt
        return config.rollout.concurrency / 64

    trials = ScriptedTrials(speed)
    search = Search(trials, resolve, budget_s=1000, note=lambda text: None, clock=lambda: trials.time_s)
    with pytest.raises(KeyboardInterrupt):
        search.run([EPISODES])
    assert outcomes(search)[2:] == [("rollout.concurrency=128", "kept"), ("rollout.concurrency=256", "interrupted")]
    write_settings(tmp_path / "tuned.yaml", search, ["agentrl tune"])
    text = (tmp_path / "tuned.yaml").read_text()
    assert text.startswith("# agentrl tune\n")
    assert f"# rollout.concurrency=128: {search.trials[2].gain:+.1%}\n" in text
    assert read_yaml(tmp_path / "tuned.yaml") == {"rollout": {"concurrency": 128}}
    console = Console(width=200, record=True, quiet=True)
    console.print(result_table(search.trials))


def test_nothing_found_is_a_file_that_changes_nothing(tmp_path: Path) -> None:
    search = search_by(ScriptedTrials(lambda config: 1.0), EPISODES)
    write_settings(tmp_path / "tuned.yaml", search, [])
    assert read_yaml(tmp_path / "tuned.yaml") == {}
    assert "changes nothing" in (tmp_path / "tuned.yaml").read_text()


def test_settings_by_key_are_a_tree() -> None:
    assert settings_tree({"a.b": 1, "a.c": None, "d": 2}) == {"a": {"b": 1, "c": None}, "d": 2}


def test_refusals_come_from_the_configuration() -> None:
    with pytest.raises(ConfigError, match=r"rollout\.concurrency"):
        resolve({"rollout.concurrency": 0})
