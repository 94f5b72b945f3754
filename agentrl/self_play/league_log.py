"""``league.jsonl`` of a run: ratings and results after each step, and those of evaluations, one JSON object a line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.atomic_files import append, write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading
from agentrl.self_play.league import League

FILE = "league.jsonl"


class LeagueLog:
    """Appends a line for each step.

    Args:
        folder: of the run.
        resume_after: lines of later steps are removed by `begin`, because these steps are run again; None removes all.

    Raises:
        ConfigError: the log of the run that is resumed is damaged.
    """

    def __init__(self, folder: Path, resume_after: int | None) -> None:
        self._path = folder / FILE
        self._rows = [] if resume_after is None else [row for row in _rows(self._path) if row["step"] <= resume_after]

    def begin(self) -> LeagueLog:
        """Write the lines of the run that is resumed, and no others."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with write_atomically(self._path) as partial:
            partial.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in self._rows))
        return self

    def write(self, step: int, league: League) -> None:
        """Append a step."""
        self._append({"step": step, "ratings": league.ratings.state(), "results": league.results.state()})

    def write_evaluation(self, step: int, reports: Mapping[str, Any]) -> None:
        """Append an evaluation after a step: its sets with opponents by name."""
        self._append({"step": step, "evaluation": dict(reports)})

    def _append(self, row: Mapping[str, Any]) -> None:
        append(self._path, orjson.dumps(row) + b"\n")


def read_league(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's steps, in their order.

    Raises:
        ConfigError: the folder is that of no run with self-play.
    """
    path = folder / FILE
    if not (steps := [row for row in _rows(path) if "ratings" in row]):
        raise ConfigError(f"{folder} has no {FILE} with a step: name the folder of a run with self_play")
    return steps


def last_evaluation(folder: Path) -> dict[str, Any] | None:
    """Return the line of a run's last evaluation with opponents; None if there is none."""
    return next((row for row in reversed(_rows(folder / FILE)) if "evaluation" in row), None)


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines; a kill may leave a part of the last one."""
    if not path.is_file():
        return []
    with reading(path, "record of a league"):
        return [orjson.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
