"""A training run whose learner and engine have the same place in turns, through the command line."""

import signal
from pathlib import Path

import pytest
from fault_injection import whole_run

TURNS = ("time/wake_s", "time/sync_s", "time/sleep_s")


@pytest.mark.long
def test_an_engine_killed_and_stopped_while_the_learner_sleeps(tmp_path: Path) -> None:
    """It is started again in its turn, gets the weights of the learner that sleeps, and the run goes on."""
    settings = {
        "placement.mode": "colocate",
        "weights.transport": "disk",
        "sampler.max_running": 16,
        "sampler.stall_timeout_s": 2,
        "sampler.update_timeout_s": 2,
        "sampler.health_interval_s": 0.5,
    }
    rows = whole_run(tmp_path, settings, steps=3, prompts=8, strikes={1: signal.SIGKILL, 2: signal.SIGSTOP})
    assert all(row[key] > 0 for row in rows for key in TURNS)
