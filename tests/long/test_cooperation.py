"""Roles that work together learn, with the shipped configurations: about ten minutes each on two cores."""

import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "integration"))
from shared_runs import agentrl, metrics

pytestmark = [pytest.mark.long, pytest.mark.timeout(3600)]

MINUTES = 15


@pytest.mark.parametrize(("config", "accuracy"), [("solver_critic", "last_right"), ("proposer_solver", "solved")])
def test_the_solver_learns_on_held_out_problems(tmp_path: Path, config: str, accuracy: str) -> None:
    start = time.monotonic()
    words = ["--config", f"self_play/{config}", "run.dir=run", "obs.progress=plain"]
    done = agentrl("train", *words, cwd=tmp_path, timeout=3000, forks=False)
    seconds = time.monotonic() - start
    assert done.returncode == 0, done.stderr
    actual_metrics = [row[f"eval/{accuracy}"] for row in metrics(tmp_path / "run") if f"eval/{accuracy}" in row]
    print(
        f"{config}: {accuracy} {', '.join(f'{one:.3f}' for one in actual_metrics)} in {seconds / 60:.1f} minutes",
        flush=True,
    )
    assert actual_metrics[-1] >= actual_metrics[0] + 0.2
    assert seconds <= MINUTES * 60
