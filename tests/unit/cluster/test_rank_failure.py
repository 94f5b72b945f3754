"""What becomes of the error of a learner's rank on the driver."""

from __future__ import annotations

import errno
import os
from pathlib import Path

from ray.exceptions import RayError, RayTaskError

from agentrl.cluster.learner_group import RayLearnerGroup


def test_a_full_disk_of_a_rank_is_named_though_the_log_of_ranks_is_on_it() -> None:
    cause = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "run/checkpoints/step_000002.partial/learner.json")
    learner = RayLearnerGroup.__new__(RayLearnerGroup)
    learner._log = Path("/dev/full")
    assert learner._failure(RayTaskError("train_step", "the traceback", cause), 0, [], "save") is cause


def test_an_error_that_ray_cannot_pickle_is_named_by_its_traceback(tmp_path: Path) -> None:
    """Such are the errors of torch.compile."""
    traceback = """Traceback (most recent call last):
  File "rank.py", line 11, in train_step
    raise InductorError(text)
    ^^^^^^^^^^^^^^^^^^^^^^^^^
torch._inductor.exc.InductorError: FileNotFoundError: kernel.so

Set TORCHDYNAMO_VERBOSE=1
"""
    text = f"Exception InductorError isn't serializable: cannot pickle '_Ops' object.\nOriginal exception details:\n{traceback}"
    learner = RayLearnerGroup.__new__(RayLearnerGroup)
    learner._log, learner._actors = tmp_path / "learner.log", [object()]
    error = learner._failure(RayTaskError("train_step", traceback, RayError(text)), 0, [], "train_step")
    assert "failed in train_step: torch._inductor.exc.InductorError: FileNotFoundError: kernel.so (see" in str(error)
