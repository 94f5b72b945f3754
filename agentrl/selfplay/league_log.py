"""``league.jsonl`` of a run: ratings and results after each step, one JSON object a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.atomic_files import replacing
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading
from agentrl.selfplay.league import League

FILE = "league.jsonl"


class LeagueLog:
    """Appends a line for each step.

    Args:
        folder: of the run.
        resume_after: lines of later steps are removed, because these steps are run again.

    """

    def __init__(self, folder: Path, resume_after: int | None) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._path = folder / FILE
        kept = [] if resume_after is None else [row for row in _rows(self._path) if row["step"] <= resume_after]
        with replacing(self._path) as partial:
            partial.write_bytes(b"".join(orjson.dumps(row) + b"\n" for row in kept))

    def write(self, step: int, league: League) -> None:
        """Append a step."""
        row = {"step": step, "ratings": league.ratings.state(), "results": league.results.state()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_league(folder: Path) -> list[dict[str, Any]]:
    """Return the lines of a run, in the order of steps.

    Raises:
        ConfigError: the folder is that of no run with self-play.

    """
    path = folder / FILE
    if not path.is_file() or not (found := _rows(path)):
        raise ConfigError(f"{folder} has no {FILE} with a step: name the folder of a run with self_play")
    return found


def _rows(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines; a kill may leave a part of the last one."""
    if not path.is_file():
        return []
    with reading(path, "record of a league"):
        return [orjson.loads(line) for line in path.read_bytes().split(b"\n")[:-1]]
