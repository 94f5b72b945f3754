"""The job of pictures at full size: a small policy learns to answer questions about them, and nothing where they are shuffled."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MINUTES = 10
NOISE = 0.08
"""Three standard errors of the difference of two shares of about 0.15 on 384 pictures."""
GROWTH_GIB = 0.1
"""Host memory that the processes of a run may have more after 50 steps than after ten."""


def train(folder: Path, *words: str) -> tuple[list[dict[str, float]], float]:
    """Return the rows of ``metrics.jsonl``, and the seconds of the command."""
    start = time.monotonic()
    job = ("train", "--env", "geometry", "run.dir=run", "eval.size=384", *words)
    done = agentrl(*job, cwd=folder, timeout=1800, forks=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return metrics(folder / "run"), time.monotonic() - start


def gain(name: str, rows: list[dict[str, float]]) -> float:
    first, last = (row["eval/exact_match"] for row in rows if "eval/exact_match" in row)
    print(f"{name}: exact match on held-out pictures {first:.3f} to {last:.3f}", flush=True)
    return last - first


def test_learns_to_see_and_zoom_in_ten_minutes(tmp_path: Path) -> None:
    """Memory of the host stays as it is from the tenth step to the fiftieth."""
    rows, seconds = train(tmp_path)
    print(f"{seconds / 60:.1f} minutes")
    used = {int(row["step"]): row["host_memory/total_gib"] for row in rows if "host_memory/total_gib" in row}
    print({step: round(used[step], 3) for step in sorted(used) if step % 10 == 0})
    assert gain("geometry", rows) >= 0.4
    assert seconds <= MINUTES * 60
    assert used[50] <= used[10] + GROWTH_GIB


def test_nothing_is_learned_of_shuffled_pictures(tmp_path: Path) -> None:
    rows, _ = train(tmp_path, "tasks.options.shuffle_pictures=true")
    assert gain("pictures shuffled among tasks", rows) <= NOISE
