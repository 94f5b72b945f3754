"""Evaluation results as a table, and as lines for the log of a run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from agentrl.core.types import FinishReason
from agentrl.episode.failure_policy import describe_failure
from agentrl.evaluation.evaluate import SetResult
from agentrl.evaluation.intervals import Estimate
from agentrl.evaluation.metrics import SetMetrics

_FAILURES = 5
"""Causes of failures that are printed."""
_SHOWN = 400
"""Characters of a failure's message in a line."""
_CUT = 0.02
"""Share of turns that their limit ended, above which a line says so."""


def results_table(results: Sequence[SetResult], title: str) -> Table:
    """Return a table with one column per set and one row per metric: means with 95% intervals, then those by metadata."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("metric")
    for result in results:
        table.add_column(Text(result.eval_set.label), justify="right")
    for name, cells in _plan_rows(results):
        table.add_row(name, *cells, style="dim")
    table.add_section()
    for key in _merge_unique([list(result.metrics.means) for result in results]):
        table.add_row(Text(key), *(_cell(result.metrics, key) for result in results))
        for value in _merge_unique([list(result.metrics.groups) for result in results]):
            if any(key in result.metrics.groups[value].means for result in results if value in result.metrics.groups):
                groups = [result.metrics.groups.get(value) for result in results]
                table.add_row(Text(f"  {value}"), *(_cell(group, key) for group in groups), style="dim")
    table.add_section()
    for name, form in (("turns", "{:.2f}"), ("tokens", "{:.1f}"), ("failed", "{:.1%}"), ("dropped", "{:.1%}")):
        table.add_row(name, *(form.format(getattr(result.metrics, name)) for result in results))
    for reason in _merge_unique([list(result.metrics.stops) for result in results]):
        cells = [f"{result.metrics.stops.get(reason, 0.0):.1%}" for result in results]
        table.add_row(f"ended: {reason}", *cells)
    return table


def _plan_rows(results: Sequence[SetResult]) -> list[tuple[str, list[str]]]:
    return [
        ("tasks from", [result.eval_set.source.removeprefix("the ") for result in results]),
        ("tasks x samples", [f"{result.metrics.prompts} x {result.eval_set.samples}" for result in results]),
        ("sampling", [result.eval_set.decoding for result in results]),
    ]


def _merge_unique(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the items of all lists once, in order of first appearance."""
    return list(dict.fromkeys(item for items in lists for item in items))


def _cell(metrics: SetMetrics | None, key: str) -> str:
    return format_estimate(metrics.means[key]) if metrics is not None and key in metrics.means else "–"


def format_estimate(estimate: Estimate) -> str:
    """Return a mean with its interval: ``0.512 ±0.031``, or ``0.000 [0.000, 0.278]`` if its ends are not equally far."""
    if estimate.low is None or estimate.high is None or estimate.ci95 is None:
        return f"{estimate.value:.3f}"
    below, above = estimate.value - estimate.low, estimate.high - estimate.value
    if abs(above - below) < 0.001:
        return f"{estimate.value:.3f} ±{estimate.ci95:.3f}"
    return f"{estimate.value:.3f} [{estimate.low:.3f}, {estimate.high:.3f}]"


def failure_lines(results: Sequence[SetResult]) -> list[str]:
    """Return what failed in the episodes of an evaluation, the most frequent first, and how many turns a limit cut."""
    lines = []
    for result in results:
        rollouts, label = result.rollouts, result.eval_set.label
        failures = [rollout.failure for rollout in rollouts if rollout.failure is not None]
        if failures:
            dropped = sum(rollout.dropped for rollout in rollouts)
            lines.append(
                f"{label}: {len(failures)} of {len(rollouts)} episodes failed, {dropped} of them are in no mean "
                "(rollout.failure):"
            )
            common = Counter(map(describe_failure, failures)).most_common()
            lines += [f"  {times} x {text[:_SHOWN]}" for text, times in common[:_FAILURES]]
            others = sum(times for _, times in common[_FAILURES:])
            lines += [f"  and {others} others"] if others else []
        turns = [turn for rollout in rollouts for turn in rollout.turns]
        cut = sum(turn.finish_reason is FinishReason.LENGTH for turn in turns)
        if any(rollout.endpoint is not None for rollout in rollouts) and cut > _CUT * len(turns):
            lines.append(
                f"{label}: {cut} of {len(turns)} turns ended at the limit of their tokens; raise eval.max_new_tokens "
                "(sampler.max_new_tokens) and rollout.max_tokens"
            )
    return lines


def results_lines(results: Sequence[SetResult]) -> list[str]:
    """Return one line per set: its means with their intervals, without those by metadata."""
    lines = []
    for result in results:
        cells = [f"{key} {format_estimate(estimate)}" for key, estimate in result.metrics.means.items()]
        if result.metrics.failed:
            cells.append(f"failed {result.metrics.failed:.1%}")
        name = result.eval_set.full_name
        lines.append("  ".join([name, *cells] if name else cells))
    return lines
