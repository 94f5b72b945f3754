"""Episodes as token counts and tool times, from recorded rollouts: what a simulated engine works through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import orjson

from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading
from agentrl.core.types import Rollout
from agentrl.obs.rollouts import read_rollouts, rollout_files

SHIPPED = Path(__file__).parent / "search_r1_episodes.json"
"""1,024 episodes of the first four steps of ``agentrl train --env search_r1 run.seed=0`` (two cores, 2026-11-23)."""


@dataclass(frozen=True, slots=True)
class EpisodePlan:
    """An episode: tokens of its turns, and seconds of its tools."""

    prompt: int
    """Tokens of the first prompt."""
    turns: tuple[tuple[int, int], ...]
    """Sampled tokens of each turn, and the observed ones after it."""
    tools_s: float
    """Seconds in tools, of the whole episode."""

    @property
    def sampled(self) -> int:
        """Sampled tokens of all turns."""
        return sum(sampled for sampled, _ in self.turns)

    @property
    def tokens(self) -> int:
        """All tokens: what the learner computes."""
        return self.prompt + sum(sampled + observed for sampled, observed in self.turns)

    def with_sampled(self, factor: float) -> EpisodePlan:
        """Return the episode with this many times as many sampled tokens in each turn, at least one."""
        return replace(
            self, turns=tuple((max(1, round(factor * sampled)), observed) for sampled, observed in self.turns)
        )


Group = tuple[EpisodePlan, ...]
"""The episodes of a task."""


def plan_from_rollout(rollout: Rollout) -> EpisodePlan | None:
    """Return the plan of a recorded rollout; None if it has not exactly one row, or nothing was sampled."""
    if len(rollout.rows) != 1 or not (rollout.rows[0].requests >= 0).any():
        return None
    requests = rollout.rows[0].requests
    turns = list[list[int]]()
    prompt, last = int((requests >= 0).argmax()), -1
    for request in requests[prompt:].tolist():
        if request >= 0:
            if request != last:
                turns.append([0, 0])
                last = request
            turns[-1][0] += 1
        else:
            turns[-1][1] += 1
    return EpisodePlan(prompt, tuple((sampled, observed) for sampled, observed in turns), rollout.tool_seconds)


def recorded_groups(run_dir: Path) -> list[Group]:
    """Return the groups of a run's rollout files, of all steps.

    Raises:
        ConfigError: there are none.
    """
    groups = list[Group]()
    for path in rollout_files(run_dir).values():
        by_task: dict[str, list[EpisodePlan]] = {}
        for rollout in read_rollouts(path):
            if (plan := plan_from_rollout(rollout)) is not None:
                by_task.setdefault(rollout.prompt_id, []).append(plan)
        groups += map(tuple, by_task.values())
    if not groups:
        raise ConfigError(f"--rollouts {run_dir}: no rollout file has an episode of one row with sampled tokens")
    return groups


def write_groups(groups: Sequence[Group], path: Path) -> None:
    """Write groups, each episode as ``[prompt, milliseconds in tools, sampled, observed, sampled, observed, …]``."""
    flat = [
        [[plan.prompt, round(1000 * plan.tools_s), *(count for turn in plan.turns for count in turn)] for plan in group]
        for group in groups
    ]
    path.write_bytes(orjson.dumps(flat))


def read_groups(path: Path) -> list[Group]:
    """Return what `write_groups` wrote.

    Raises:
        ConfigError: the file cannot be read.
    """
    with reading(path, "file of episodes"):
        return [
            tuple(
                EpisodePlan(prompt, tuple(zip(turns[::2], turns[1::2], strict=True)), tools_ms / 1000)
                for prompt, tools_ms, *turns in group
            )
            for group in orjson.loads(path.read_bytes())
        ]


@dataclass(frozen=True, slots=True)
class Tail:
    """A longer tail than the recorded one: a log-normal factor of each episode's sampled tokens, whose mean is 1."""

    sigma: float = 0.0
    """Standard deviation of the factor's logarithm; 0 leaves the recorded lengths."""
    longest: float = 8.0
    """Upper limit of the factor, as a run limits the tokens of an episode."""


def drawn_groups(groups: Sequence[Group], samples: int, tail: Tail, seed: int) -> Iterator[Group]:
    """Yield groups of ``samples`` episodes without end: a recorded group each, its episodes drawn with replacement.

    Args:
        groups: recorded.
        samples: episodes of a group.
        tail: of their lengths.
        seed: of the draws.
    """
    rng = np.random.default_rng(seed)
    while True:
        group = groups[int(rng.integers(len(groups)))]
        drawn = (group[index] for index in rng.integers(len(group), size=samples).tolist())
        if not tail.sigma:
            yield tuple(drawn)
            continue
        factors = np.exp(rng.normal(-(tail.sigma**2) / 2, tail.sigma, samples)).clip(max=tail.longest)
        yield tuple(plan.with_sampled(float(factor)) for plan, factor in zip(drawn, factors, strict=True))
