"""Learner ranks in processes of the test's interpreter."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import preloaded

_ROOT = Path(__file__).parents[2]
STEP_TIMEOUT_S = 600.0
"""``learner.step_timeout_s`` of tests that look at the limits of groups; torch's own is 1,800 s."""


def check_timeouts() -> None:
    """Check that all groups of this rank have the limit ``learner.step_timeout_s``, if that is `STEP_TIMEOUT_S`.

    That of all ranks, which the test makes, and those of commands are left out.
    """
    import torch
    import torch.distributed as dist

    groups = [group for group in dist.distributed_c10d._world.pg_map if group is not dist.group.WORLD]
    limits = [(group.group_desc, group._get_backend(torch.device("cpu")).options._timeout) for group in groups]
    expected = (timedelta(seconds=STEP_TIMEOUT_S), timedelta(days=1))
    assert [(name, str(limit)) for name, limit in limits if limit not in expected] == []


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
