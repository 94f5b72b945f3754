"""Figures of an evaluation set from its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from agentrl.core.types import Rollout
from agentrl.evaluation.intervals import Estimate, estimate, mean, pass_at_k, pass_ks


def rollout_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of every environment metric over the rollouts that have it."""
    keys = sorted({key for rollout in rollouts for key in rollout.metrics})
    return {key: mean([rollout.metrics[key] for rollout in rollouts if key in rollout.metrics]) for key in keys}


@dataclass(frozen=True, slots=True)
class Figures:
    """What some rollouts amount to."""

    prompts: int
    """Tasks."""
    episodes: int
    """Rollouts, those that failed among them."""
    failed: float
    """Share of rollouts that failed. They count with what they had earned, mostly 0."""
    turns: float
    """Mean number of turns."""
    tokens: float
    """Mean number of sampled tokens."""
    means: dict[str, Estimate]
    """``reward``, then the environment's metrics (each over the rollouts that have it), then ``pass@k``."""
    stops: dict[str, float]
    """Share of rollouts by why they ended."""
    by: dict[str, Figures] = field(default_factory=dict)
    """The same for the rollouts of each value of a metadata key: ``hops=2`` and its figures."""


def figures_of(rollouts: Sequence[Rollout], *, pass_reward: float = 1.0, by: str | None = None) -> Figures:
    """Return the figures of rollouts.

    Args:
        rollouts: of one set; those of one prompt are its samples.
        pass_reward: a rollout passes where its reward is at least this.
        by: a key of the tasks' metadata to divide by as well.

    """
    prompts = _by_prompt(rollouts)
    means = {"reward": estimate([[rollout.reward for rollout in some] for some in prompts])}
    for key in sorted({key for rollout in rollouts for key in rollout.metrics} - {"reward"}):
        values = [[rollout.metrics[key] for rollout in some if key in rollout.metrics] for some in prompts]
        means[key] = estimate([some for some in values if some])
    passed = [(len(some), sum(rollout.reward >= pass_reward for rollout in some)) for some in prompts]
    for k in pass_ks(min(samples for samples, _ in passed) if passed else 0):
        means[f"pass@{k}"] = estimate([[pass_at_k(samples, count, k)] for samples, count in passed])
    stops = Counter(rollout.stop_reason.value for rollout in rollouts)
    return Figures(
        prompts=len(prompts),
        episodes=len(rollouts),
        failed=mean([float(rollout.failure is not None) for rollout in rollouts]),
        turns=mean([float(len(rollout.turns)) for rollout in rollouts]),
        tokens=mean([float(rollout.sampled_tokens) for rollout in rollouts]),
        means=means,
        stops={reason: count / len(rollouts) for reason, count in sorted(stops.items())},
        by=_divided(rollouts, pass_reward, by) if by is not None else {},
    )


def _by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    prompts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.prompt_id, []).append(rollout)
    return list(prompts.values())


def _divided(rollouts: Sequence[Rollout], pass_reward: float, by: str) -> dict[str, Figures]:
    parts: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: _order(rollout.metadata.get(by))):
        parts.setdefault(f"{by}={rollout.metadata.get(by)}", []).append(rollout)
    return {name: figures_of(some, pass_reward=pass_reward) for name, some in parts.items()}


def _order(value: object) -> tuple[bool, float, str]:
    """Order numbers as numbers and before all else: 10 hops come after 2."""
    number = isinstance(value, int | float)
    return (not number, float(value) if isinstance(value, int | float) else 0.0, str(value))


def flat(figures: Figures, prefix: str) -> dict[str, float]:
    """Return figures as metrics: ``<prefix>reward``, ``<prefix>reward/ci95``, ``<prefix>reward/hops=2``, ….

    The keys of `Figures` itself win over environment metrics of the same name.
    """
    row = {f"{prefix}{key}": each.value for key, each in figures.means.items()}
    row |= {f"{prefix}{key}/ci95": each.ci95 for key, each in figures.means.items() if each.ci95 is not None}
    for value, part in figures.by.items():
        row |= {f"{prefix}{key}/{value}": each.value for key, each in part.means.items()}
    own = {key: float(getattr(figures, key)) for key in ("episodes", "failed", "turns", "tokens")}
    return row | {f"{prefix}{key}": value for key, value in own.items()}


def nested(figures: Figures) -> dict[str, object]:
    """Return figures as JSON-able data; an interval that could not be had is null."""
    return {
        "prompts": figures.prompts,
        "episodes": figures.episodes,
        "failed": figures.failed,
        "turns": figures.turns,
        "tokens": figures.tokens,
        "means": {
            key: {"value": each.value, "ci95": each.ci95, "low": each.low, "high": each.high}
            for key, each in figures.means.items()
        },
        "stops": figures.stops,
        "by": {value: nested(part) for value, part in figures.by.items()},
    }
