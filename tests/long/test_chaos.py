"""200 random kills over all kinds of processes of training runs: nothing is lost, left, or hangs. See `chaos`."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.long, pytest.mark.timeout(3 * 3600)]

KILLS = 200


def test_random_kills(tmp_path: Path) -> None:
    words = ["--kills", f"{KILLS}", "--parallel", f"{max(1, (os.cpu_count() or 2) // 2)}", "--seconds", "9000"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.long.chaos", *words, "--out", str(tmp_path / "runs")],
        cwd=Path(__file__).parents[2],
        check=False,
    )
    report = json.loads((tmp_path / "runs" / "report.json").read_text())
    assert report["faults"] == []
    assert (report["lost groups"], report["duplicated groups"], report["hangs"]) == (0, 0, 0)
    assert report["kills"] == KILLS
    assert {"main", "engine", "runner", "learner rank", "tool server", "engine host", "raylet", "gcs"} <= report[
        "by kind"
    ].keys()
    assert done.returncode == 0
