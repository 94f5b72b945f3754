"""What a diagnosis finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["problem", "hint", "state"]
"""A problem ends or spoils the run, a hint is worth a look, a state is neither."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A fact about a run."""

    severity: Severity
    title: str
    """What is the case."""
    evidence: tuple[str, ...]
    """Figures and lines of the run that show it."""
    advice: tuple[str, ...] = ()
    """What to do, with the keys to change."""


def age(seconds: float) -> str:
    """Return seconds as ``45s``, ``12m`` or ``3.5h``."""
    if seconds < 120:
        return f"{seconds:.0f}s"
    return f"{seconds / 60:.0f}m" if seconds < 7200 else f"{seconds / 3600:.1f}h"


def mean(values: list[float]) -> float:
    """Return the mean of at least one value."""
    return sum(values) / len(values)
