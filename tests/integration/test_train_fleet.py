"""A training run whose engines are killed and stopped in mid-rollout, through the command line."""

import signal
from pathlib import Path

import pytest
from fault_injection import whole_run

pytestmark = pytest.mark.long
"""The fleet alone, under the same faults, is in `test_fleet`."""


def test_engines_killed_and_stopped_in_mid_rollout(tmp_path: Path) -> None:
    """The run ends with the same number of steps, every sample is there once, and the tokens say who sampled them."""
    settings = {
        "sampler.engines": 2,
        "sampler.max_running": 16,
        "sampler.stall_timeout_s": 2,
        "sampler.update_timeout_s": 2,
        "sampler.health_interval_s": 0.5,
    }
    rows = whole_run(tmp_path, settings, steps=3, prompts=16, strikes={1: signal.SIGKILL, 2: signal.SIGSTOP})
    assert all(0.2 < row["rollout/cache_hit"] < 1 for row in rows)
