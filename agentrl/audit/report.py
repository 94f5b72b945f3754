"""Results of an audit, and their table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from rich.table import Table
from rich.text import Text


class Fault(NamedTuple):
    """A violated rule in a rollout, without its place in a file."""

    words: str
    """What is wrong, with the value."""
    row: int | None = None
    """The row's number; None for the rollout as a whole."""
    token: int | None = None
    """Index of the first token with it; None for the row as a whole."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault with its place."""

    where: str
    """File and line (in parquet: the rollout's number from 1)."""
    rollout_id: str
    """Empty if the rollout cannot be read."""
    fault: Fault
    """What is wrong."""

    def __str__(self) -> str:
        """Return place and fault in one line."""
        fields = [
            self.where,
            f"rollout {self.rollout_id}" if self.rollout_id else "",
            f"row {self.fault.row}" if self.fault.row is not None else "",
            f"token {self.fault.token}" if self.fault.token is not None else "",
        ]
        return f"{', '.join(field for field in fields if field)}: {self.fault.words}"


@dataclass(frozen=True, slots=True)
class DriftedTurn:
    """A turn whose text has other ids when it is retokenized."""

    rollout_id: str
    request_id: str
    token: int
    """Index of the turn's first token that would differ."""
    text: str
    """Text of the tokens from there on."""
    sampled: tuple[int, ...]
    """Sampled ids from there on."""
    again: tuple[int, ...]
    """Ids of the retokenized text."""


EXAMPLES = 3
"""Drifted turns that are kept as examples."""


@dataclass(slots=True)
class Report:
    """Counts and violations of all checked rollouts."""

    rollouts: int = 0
    endpoints: int = 0
    """Rollouts of models at endpoints: they have no token ids, and cannot be trained on."""
    rows: int = 0
    tokens: int = 0
    """Over all rows; shared tokens count in each."""
    sampled: int = 0
    """Sampled tokens, shared ones once; only of rollouts without violations, like drift."""
    trained: int = 0
    """Tokens with mask 1."""
    forks: Counter[str] = field(default_factory=Counter)
    """Rows by fork reason."""
    turns: int = 0
    """Sampled turns whose text was retokenized."""
    drifted: int = 0
    """Those with other ids after retokenization."""
    examples: list[DriftedTurn] = field(default_factory=list)
    """The first drifted turns."""
    violations: list[Violation] = field(default_factory=list)
    """In the order of the files."""


SHOWN = 8
"""Ids of a drifted turn in the output."""


def report_table(report: Report, no_tokenizer: str = "") -> Table:
    """Return the counts; ``no_tokenizer`` is the reason if drift was not measured."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    forks = ", ".join(f"{reason} {count:,}" for reason, count in sorted(report.forks.items())) or "none"
    no_tokens = {"not trainable": f"{report.endpoints:,} of models at endpoints, without token ids"}
    for name, value in {
        "rollouts": f"{report.rollouts:,}",
        **(no_tokens if report.endpoints else {}),
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
