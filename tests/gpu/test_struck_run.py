"""An engine on a GPU that is killed and stopped in mid-rollout, in a run through the command line."""

from __future__ import annotations

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def test_killed_and_stopped_in_mid_rollout(struck_run: list[dict[str, float]], figures: list[str]) -> None:
    """`faults.whole_run` has held that no step and no sample is lost or doubled."""
    for row in struck_run:
        times = {key: round(value, 2) for key, value in row.items() if key.startswith("time/")}
        figures.append(f"struck run, step {row['step']:g}: {times}")
        assert "train/skipped" not in row
        assert all(row[key] > 0 for key in ("time/wake_s", "time/sync_s", "time/sleep_s", "time/train_s"))
