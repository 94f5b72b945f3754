"""What an audit finds."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple


class Fault(NamedTuple):
    """Something in a rollout that is not as it must be."""

    words: str
    """What, with the value."""
    row: int | None = None
    """The row's number; None for the rollout as a whole."""
    token: int | None = None
    """The first token of the row that has it; None for the row as a whole."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A fault and where it lies."""

    where: str
    """File and line (in parquet: the rollout's number from 1)."""
    rollout_id: str
    """Empty where it cannot be read."""
    fault: Fault
    """What is wrong."""

    def __str__(self) -> str:
        """Return it in one line."""
        parts = [
            self.where,
            f"rollout {self.rollout_id}" if self.rollout_id else "",
            f"row {self.fault.row}" if self.fault.row is not None else "",
            f"token {self.fault.token}" if self.fault.token is not None else "",
        ]
        return f"{', '.join(part for part in parts if part)}: {self.fault.words}"


@dataclass(frozen=True, slots=True)
class Drifted:
    """A turn whose text is other tokens when it is tokenised again."""

    rollout_id: str
    request_id: str
    token: int
    """The first of the turn's tokens that would be another."""
    text: str
    """What these tokens say, from there on."""
    sampled: tuple[int, ...]
    """The ids that were sampled, from there on."""
    again: tuple[int, ...]
    """The ids that the text would become."""


EXAMPLES = 3
"""Drifted turns that are kept to show."""


@dataclass(slots=True)
class Report:
    """Figures and violations of all rollouts that were looked at."""

    rollouts: int = 0
    rows: int = 0
    tokens: int = 0
    """In all rows, shared ones in each."""
    sampled: int = 0
    """Tokens that the policy sampled, shared ones once; of rollouts without a violation, as drift is."""
    trained: int = 0
    """Tokens with mask 1."""
    forks: Counter[str] = field(default_factory=Counter)
    """Rows by the reason why they fork."""
    turns: int = 0
    """Sampled turns whose text was tokenised again."""
    drifted: int = 0
    """Those of them that came back as other ids."""
    examples: list[Drifted] = field(default_factory=list)
    """The first few."""
    violations: list[Violation] = field(default_factory=list)
    """In the order of the files."""
