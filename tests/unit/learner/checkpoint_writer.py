"""Writes one checkpoint after the other until it is killed, and prints the step of each that is complete."""

import sys
from pathlib import Path

from agentrl.learner.checkpoints import Checkpoints


class Learner:
    """Saves twenty files."""

    def save(self, folder: Path) -> None:
        folder.mkdir()
        for number in range(20):
            (folder / f"part_{number}").write_bytes(bytes([number]) * 50_000)

    def finish_save(self) -> None:
        pass


def main() -> int:
    """Write into the folder that the command line names."""
    checkpoints, learner, step = Checkpoints(Path(sys.argv[1]), keep=2), Learner(), 0
    while True:
        step += 1
        checkpoints.save(step, learner, {"step": step})
        checkpoints.finish()
        print(step, flush=True)
