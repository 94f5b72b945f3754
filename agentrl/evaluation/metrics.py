"""Metrics of an evaluation set, from its rollouts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from agentrl.core.types import Rollout
from agentrl.evaluation.intervals import Estimate, estimate, mean, pass_at_k, pass_ks
from agentrl.self_play.games import game_metrics


def rollout_means(rollouts: Sequence[Rollout]) -> dict[str, float]:
    """Return the mean of every environment metric over the rollouts that have it."""
    keys = sorted({key for rollout in rollouts for key in rollout.metrics})
    return {key: mean([rollout.metrics[key] for rollout in rollouts if key in rollout.metrics]) for key in keys}


@dataclass(frozen=True, slots=True)
class SetMetrics:
    """Metrics of the rollouts of one set, or of the part of it with one metadata value or seat."""

    prompts: int
    """Tasks."""
    episodes: int
    """Rollouts, including failed ones."""
    failed: float
    """Share of rollouts that failed."""
    dropped: float
    """Share of rollouts that the failure policy dropped. They are in no mean: what failed is not the policy's fault."""
    turns: float
    """Mean number of turns, dropped rollouts included."""
    tokens: float
    """Mean number of sampled tokens."""
    means: dict[str, Estimate]
    """``reward``, then the environment's metrics (each over the rollouts that have it), then ``pass@k``."""
    stops: dict[str, float]
    """Share of rollouts by stop reason."""
    groups: dict[str, SetMetrics] = field(default_factory=dict)
    """Metrics of the rollouts with each value of a metadata key, by names such as ``hops=2``, and of each seat."""


def compute_metrics(
    rollouts: Sequence[Rollout], *, pass_reward: float = 1.0, group_by: str | None = None, games: bool = False
) -> SetMetrics:
    """Return the metrics of the rollouts of one set.

    Args:
        rollouts: several of a prompt are its samples.
        pass_reward: a rollout passes if its reward is at least this.
        group_by: a key of the tasks' metadata; metrics are reported for each of its values too.
        games: report results of games (`game_metrics`), and all metrics for each seat too.
    """
    groups = {} if group_by is None else _group_by_metadata(rollouts, group_by)
    if games:
        for rollout in sorted(rollouts, key=lambda rollout: rollout.seat):
            groups.setdefault(f"seat={rollout.seat}", []).append(rollout)
    group_metrics = {name: _metrics(group_rollouts, pass_reward, games) for name, group_rollouts in groups.items()}
    return replace(_metrics(rollouts, pass_reward, games), groups=group_metrics)


def _reward_values(rollout: Rollout) -> dict[str, float]:
    return {f"reward/{name}": term.value for name, term in rollout.rewards.items() if term.value is not None}


def _metrics(rollouts: Sequence[Rollout], pass_reward: float, games: bool) -> SetMetrics:
    prompts = _by_prompt([rollout for rollout in rollouts if not rollout.dropped])
    means = (
        {} if not prompts else {"reward": estimate([[rollout.reward for rollout in samples] for samples in prompts])}
    )
    metrics_by_prompt = [
        [rollout.metrics | _reward_values(rollout) | (game_metrics(rollout) if games else {}) for rollout in samples]
        for samples in prompts
    ]
    for key in sorted(
        {key for samples in metrics_by_prompt for sample_metrics in samples for key in sample_metrics} - {"reward"}
    ):
        values = [
            [sample_metrics[key] for sample_metrics in samples if key in sample_metrics]
            for samples in metrics_by_prompt
        ]
        means[key] = estimate([samples for samples in values if samples])
    passed = [(len(samples), sum(rollout.reward >= pass_reward for rollout in samples)) for samples in prompts]
    for k in pass_ks(min(count for count, _ in passed) if passed else 0):
        means[f"pass@{k}"] = estimate([[pass_at_k(count, passes, k)] for count, passes in passed])
    stops = Counter(rollout.stop_reason.value for rollout in rollouts)
    return SetMetrics(
        prompts=len({rollout.prompt_id for rollout in rollouts}),
        episodes=len(rollouts),
        failed=mean([float(rollout.failure is not None) for rollout in rollouts]),
        dropped=mean([float(rollout.dropped) for rollout in rollouts]),
        turns=mean([float(len(rollout.turns)) for rollout in rollouts]),
        tokens=mean([float(rollout.sampled_tokens) for rollout in rollouts]),
        means=means,
        stops={reason: count / len(rollouts) for reason, count in sorted(stops.items())},
    )


def _by_prompt(rollouts: Sequence[Rollout]) -> list[list[Rollout]]:
    prompts: dict[str, list[Rollout]] = {}
    for rollout in rollouts:
        prompts.setdefault(rollout.prompt_id, []).append(rollout)
    return list(prompts.values())


def _group_by_metadata(rollouts: Sequence[Rollout], key: str) -> dict[str, list[Rollout]]:
    groups: dict[str, list[Rollout]] = {}
    for rollout in sorted(rollouts, key=lambda rollout: _order(rollout.metadata.get(key))):
        groups.setdefault(f"{key}={rollout.metadata.get(key)}", []).append(rollout)
    return groups


def _order(value: object) -> tuple[bool, float, str]:
    """Sort key: numbers by value and before everything else, so that 10 hops come after 2."""
    number = isinstance(value, int | float)
    return (not number, float(value) if isinstance(value, int | float) else 0.0, str(value))


def flat(metrics: SetMetrics, prefix: str) -> dict[str, float]:
    """Return one mapping of names to numbers: ``<prefix>reward``, ``<prefix>reward/ci95``, ``<prefix>reward/hops=2``, ….

    The keys of `SetMetrics` itself take precedence over environment metrics of the same name.
    """
    row = {f"{prefix}{key}": metric.value for key, metric in metrics.means.items()}
    row |= {f"{prefix}{key}/ci95": metric.ci95 for key, metric in metrics.means.items() if metric.ci95 is not None}
    for value, group in metrics.groups.items():
        row |= {f"{prefix}{key}/{value}": metric.value for key, metric in group.means.items()}
    counts = {key: float(getattr(metrics, key)) for key in ("episodes", "failed", "dropped", "turns", "tokens")}
    return row | {f"{prefix}{key}": value for key, value in counts.items()}


def metrics_to_dict(metrics: SetMetrics) -> dict[str, object]:
    """Return JSON-able data; the interval of fewer than two prompts is null."""
    return {
        "prompts": metrics.prompts,
        "episodes": metrics.episodes,
        "failed": metrics.failed,
        "dropped": metrics.dropped,
        "turns": metrics.turns,
        "tokens": metrics.tokens,
        "means": {
            key: {"value": metric.value, "ci95": metric.ci95, "low": metric.low, "high": metric.high}
            for key, metric in metrics.means.items()
        },
        "stops": metrics.stops,
        "by": {value: metrics_to_dict(group) for value, group in metrics.groups.items()},
    }
