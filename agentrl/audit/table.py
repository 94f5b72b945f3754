"""An audit's report as a table."""

from __future__ import annotations

from collections.abc import Iterator

from rich.table import Table
from rich.text import Text

from agentrl.audit.report import DriftedTurn, Report

SHOWN = 8
"""Ids of a drifted turn in the output."""


def report_table(report: Report, no_tokenizer: str = "") -> Table:
    """Return the counts; ``no_tokenizer`` is the reason if drift was not measured."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    forks = ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.forks.items())) or "none"
    for name, value in {
        "rollouts": f"{report.rollouts:,}",
        "rows": f"{report.rows:,}",
        "tokens": f"{report.tokens:,}",
        "sampled tokens": f"{report.sampled:,}",
        "trained tokens": f"{report.trained:,}",
        "forks": forks,
        "drift": no_tokenizer or _drift(report),
        "violations": f"{len(report.violations):,}",
    }.items():
        table.add_row(name, Text(value, "bold red" if name == "violations" and report.violations else ""))
    return table


def example_lines(report: Report) -> Iterator[str]:
    """Yield one line per example of a drifted turn."""
    for drifted in report.examples:
        yield (
            f"  rollout {drifted.rollout_id}, request {drifted.request_id}, from its token {drifted.token} on: "
            f"{drifted.text[:40]!r} was sampled as {_ids(drifted.sampled, drifted)} and would come back as "
            f"{_ids(drifted.again, drifted)}"
        )


def _drift(report: Report) -> str:
    if not report.turns:
        return "no sampled turn to tokenise again"
    share = report.drifted / report.turns
    return f"{report.drifted:,} of {report.turns:,} sampled turns ({share:.2%}) would be other ids if tokenised again"


def _ids(ids: tuple[int, ...], drifted: DriftedTurn) -> str:
    same = 0
    while (
        same < min(len(drifted.sampled), len(drifted.again)) and drifted.sampled[-1 - same] == drifted.again[-1 - same]
    ):
        same += 1  # the common suffix does not differ
    different = ids[: max(1, len(ids) - same)]
    return " ".join(map(str, different[:SHOWN])) + (" …" if len(different) > SHOWN else "")
