"""Evaluation results for people: a table, and a line for the log of a run."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table
from rich.text import Text

from agentrl.evaluation.intervals import Estimate
from agentrl.evaluation.metrics import Figures
from agentrl.evaluation.result import SetResult


def results_table(results: Sequence[SetResult], title: str) -> Table:
    """Return a table with a column a set and a row a figure; means with 95% intervals, those by metadata below them."""
    table = Table(title=title, title_justify="left", header_style="bold")
    table.add_column("figure")
    for result in results:
        table.add_column(Text(result.choice.label), justify="right")
    for name, cells in _plan_rows(results):
        table.add_row(name, *cells, style="dim")
    table.add_section()
    for key in _merged([list(result.figures.means) for result in results]):
        table.add_row(Text(key), *(_cell(result.figures, key) for result in results))
        for value in _merged([list(result.figures.by) for result in results]):
            if any(key in result.figures.by[value].means for result in results if value in result.figures.by):
                parts = [result.figures.by.get(value) for result in results]
                table.add_row(Text(f"  {value}"), *(_cell(part, key) for part in parts), style="dim")
    table.add_section()
    for name, form in (("turns", "{:.2f}"), ("tokens", "{:.1f}"), ("failed", "{:.1%}")):
        table.add_row(name, *(form.format(getattr(result.figures, name)) for result in results))
    for reason in _merged([list(result.figures.stops) for result in results]):
        cells = [f"{result.figures.stops.get(reason, 0.0):.1%}" for result in results]
        table.add_row(f"ended: {reason}", *cells)
    return table


def _plan_rows(results: Sequence[SetResult]) -> list[tuple[str, list[str]]]:
    return [
        ("tasks from", [result.choice.source.removeprefix("the ") for result in results]),
        ("tasks x samples", [f"{result.figures.prompts} x {result.choice.plan.n_samples}" for result in results]),
        ("sampling", [result.choice.decoding for result in results]),
    ]


def _merged(lists: Sequence[Sequence[str]]) -> list[str]:
    """Return the items of all lists once, in the order they are first met."""
    return list(dict.fromkeys(item for each in lists for item in each))


def _cell(figures: Figures | None, key: str) -> str:
    return format_estimate(figures.means[key]) if figures is not None and key in figures.means else "–"


def format_estimate(each: Estimate) -> str:
    """Return ``0.512 ±0.031``."""
    return f"{each.value:.3f}" + (f" ±{each.ci95:.3f}" if each.ci95 is not None else "")


def results_lines(results: Sequence[SetResult]) -> list[str]:
    """Return a line a set: its means with their intervals, those by metadata left out."""
    lines = []
    for result in results:
        cells = [f"{key} {format_estimate(each)}" for key, each in result.figures.means.items()]
        if result.figures.failed:
            cells.append(f"failed {result.figures.failed:.1%}")
        lines.append("  ".join([result.choice.name, *cells] if result.choice.name else cells))
    return lines
