"""Learner ranks in processes of the test's interpreter."""

from __future__ import annotations

import os
from pathlib import Path

import preloaded

_ROOT = Path(__file__).parents[2]


def run_ranks(target: str, folder: Path, count: int, *, timeout_s: float) -> None:
    """Call ``module:function`` in a process for each rank, with ``folder`` and the rank as arguments; all must return 0."""
    with (folder / "log").open("wb") as log:
        files = {1: log.fileno(), 2: log.fileno()}
        ranks = [
            preloaded.Forked(preloaded.Request(target, [str(folder), str(number)], str(_ROOT), dict(os.environ), files))
            for number in range(count)
        ]
        try:
            codes = [rank.wait(timeout=timeout_s) for rank in ranks]
        finally:
            for rank in ranks:
                rank.end()
    assert codes == [0] * count, (folder / "log").read_text()
