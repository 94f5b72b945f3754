"""Drawn episodes in every dialect with an engine: the same ids, masks, log-probabilities and rewards as in a loop, bit for bit.

Each is also played through an environment, without what environments have not: branches, other conversations, titles.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest
from dialect_episodes import LIMITS, STEPS, Step, check_dialects, check_environment
from gateway_episodes import EngineSampler, Played, play_with

from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer

EPISODES = 300
"""Of a proof."""
KINDS = (
    *("continue", "branch", "parallel", "compact", "subagent", "title", "retry", "lost"),
    *("fork branch", "fork context", "thoughts", "calls", "several calls", "not ASCII"),
)
"""What the episodes of a proof must have."""


def long_proof(test: Callable[..., None]) -> Callable[..., None]:
    """Mark a test of 300 episodes, which takes minutes."""
    return pytest.mark.long(pytest.mark.timeout(7200)(test))


class PlayOn(Protocol):
    """Makes the episodes of an engine."""

    def __call__(self, *, temperature: float, max_new_tokens: int = 48) -> EngineEpisodes:
        """Return episodes that are sampled with a temperature."""
        ...


class EngineEpisodes:
    """Plays drawn episodes on an engine, and counts what was in them.

    Args:
        model: folder of the engine's policy.
        url: of the engine.
        temperature: of all turns.
        max_new_tokens: of a turn.
    """

    def __init__(self, model: Path, url: str, temperature: float, max_new_tokens: int = 48) -> None:
        self.renderer: ChatRenderer = load_renderer(model)
        self.counts = Counter[str]()
        self._url = url
        self._temperature = temperature
        self._max_new_tokens = max_new_tokens

    def play(self, talk: object, **options: Any) -> Played:
        """Play one episode; see `gateway_episodes.play_with`."""
        limits = LIMITS | {"max_tokens": 3000, "max_new_tokens": self._max_new_tokens, "max_seconds": 300.0}
        sampler = EngineSampler(self._url)
        return play_with(self.renderer, sampler, talk, temperature=self._temperature, **limits, **options)

    def check(self, episodes: int, seed: int, streams: Sequence[bool] = (False, True)) -> None:
        """Draw episodes, and check that each is the same in every dialect and through an environment.

        Args:
            episodes: how many.
            seed: draws them.
            streams: whether the clients request streams.
        """

        @hypothesis.seed(seed)
        @hypothesis.settings(
            max_examples=episodes,
            deadline=None,
            database=None,
            derandomize=False,
            phases=[hypothesis.Phase.generate],
            suppress_health_check=list(hypothesis.HealthCheck),
        )
        @hypothesis.given(steps=STEPS)
        def check_episode(steps: list[Step]) -> None:
            expected = check_dialects(self.play, steps, streams=streams)
            check_environment(self.play, steps, seeded=self._temperature > 0)
            self._count(steps, expected)
            if self.counts["episodes"] % 25 == 0:
                print(f"{self.counts['episodes']} episodes, {time.monotonic() - started:.0f} s", flush=True)

        started = time.monotonic()
        check_episode()

    def prove(self, seed: int) -> None:
        """Check 300 episodes, in which all kinds of steps and turns occur, and print what was in them."""
        self.check(EPISODES, seed)
        print(f"temperature {self._temperature:g}:", dict(self.counts))
        missing = [kind for kind in KINDS if not self.counts[kind]]
        assert not missing
        assert self.counts["episodes"] == EPISODES

    def _count(self, steps: list[Step], played: Played) -> None:
        rollout = played.rollout
        self.counts.update(how for how, _, _ in steps)
        self.counts.update({"episodes": 1, "turns": len(rollout.turns), "tokens": rollout.sampled_tokens})
        self.counts.update(f"fork {row.fork.value}" for row in rollout.rows if row.fork is not None)
        for turn in rollout.turns:
            calls = turn.action.count("<tool_call>")
            self.counts.update({"thoughts": "<think>" in turn.action, "calls": calls, "several calls": calls > 1})
            self.counts["not ASCII"] += not turn.action.isascii()
