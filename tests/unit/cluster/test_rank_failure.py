"""What becomes of the error of a learner's rank on the driver."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ray.exceptions import RayTaskError

from agentrl.cluster.learner_group import RayLearnerGroup


def test_a_full_disk_of_a_rank_is_named_though_the_log_of_ranks_is_on_it() -> None:
    cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/checkpoints/step_000002.partial/learner.json")
    learner = RayLearnerGroup.__new__(RayLearnerGroup)
    learner._log = Path("/dev/full")
    assert learner._failure(RayTaskError("train_step", "the traceback", cause), 0, [], "save") is cause
