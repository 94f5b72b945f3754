"""The command line with its learner in the same process: a target of `preloaded.Forked` that ends itself at a given moment.

A moment is a number of file operations since the first checkpoint was complete. What SIGKILL leaves of a run are its files,
so each of them is a moment that differs, and the same number is about the same moment on a slow machine.

The learner writes into the run folder what a test compares: ``batches.jsonl``, the rows of each optimizer step, and
``loaded/``, its state after it has loaded a checkpoint.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import in_process_learner

from agentrl.batch.microbatch import GlobalBatch

KILL_AT = "AGENTRL_TEST_KILL_AT"
"""Environment variable with the moment at which the run ends; without it, the run counts them."""
MOMENTS = "moments"
"""The file, in the working directory, with their number."""
_OPERATIONS = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir")


class Moments:
    """Counts file operations (an audit hook), and kills this process at one."""

    def __init__(self, kill_at: int | None) -> None:
        self.count, self.kill_at = -1, kill_at

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event not in _OPERATIONS:
            return
        if self.count >= 0 or (event == "os.rename" and Path(str(arguments[1])).name == "step_000001"):
            self.count += 1
        if self.count == self.kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self) -> None:
        """Write the number of moments."""
        Path(MOMENTS).write_text(str(self.count), encoding="utf-8")


class RecordingLearner(in_process_learner.InProcessLearner):
    """Writes what it computes, and what it has loaded."""

    folder: Path
    """Of the run."""

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step."""
        with (self.folder / "batches.jsonl").open("a", encoding="utf-8") as file:
            rank: Any = self.rank
            rows = [[key.rollout_id, key.row] for micro in batch.micro[0] for key in micro.keys]
            file.write(json.dumps({"step": sum(rank.steps.values()), "lr_scale": batch.lr_scale, "rows": rows}) + "\n")
        return super().train_step(batch)

    def load(self, folder: Path) -> None:
        """Read the state, and write it again."""
        super().load(folder)
        self.save(self.folder / "loaded")
        self.finish_save()


def start_learners(*arguments: Any, run_dir: Path, **options: Any) -> RecordingLearner:
    """Load the learner; takes the place of `in_process_learner.start_learners`."""
    model, learner, algo = arguments
    recording_learner = RecordingLearner(model, learner, algo, seed=options["seed"], reference=options["reference"])
    recording_learner.folder = run_dir
    return recording_learner


def main() -> int:
    """Run the command line."""
    kill_at = os.environ.get(KILL_AT)
    moments = Moments(None if kill_at is None else int(kill_at))
    sys.addaudithook(moments)
    in_process_learner.start_learners = start_learners
    code = in_process_learner.main()
    moments.write()
    return code
