"""Ranks of process groups as forks of one process, so that Megatron-Core is imported once.

``python -m tests.unit.learner.megatron.forked FOLDER FUNCTION:RANKS…`` calls functions of `cases` on so many ranks, one
function after the other, with the folder.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).parents[4]
LIMIT = timedelta(seconds=120)


class Found:
    """What functions returned on rank 0."""

    def __init__(self, folder: Path, errors: str) -> None:
        self.folder = folder
        self.errors = errors

    def __getitem__(self, function: str) -> Any:
        path = self.folder / f"{function}.pt"
        assert path.exists(), self.errors
        return torch.load(path, weights_only=False)


def run_ranks(folder: Path, **ranks: int) -> Found:
    """Call ``cases.NAME(folder)`` for every ``NAME=RANKS``, with a gloo group and in Megatron-Core's CPU context."""
    words = [f"{function}:{count}" for function, count in ranks.items()]
    command = [sys.executable, "-W", "ignore", "-m", __name__, str(folder), *words]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=400)
    return Found(folder, done.stderr)


def main() -> None:
    """Fork the ranks of each function and wait; if a rank fails, the function's others end."""
    from tests.unit.learner.megatron import cases

    folder = Path(sys.argv[1])
    for word in sys.argv[2:]:
        function, _, ranks = word.partition(":")
        running = set()
        for rank in range(int(ranks)):
            child = os.fork()
            if child == 0:
                os._exit(run_rank(getattr(cases, function), folder, rank, int(ranks)))
            running.add(child)
        while running:
            child, status = os.wait()
            running.discard(child)
            if status:
                for other in running:
                    os.kill(other, signal.SIGKILL)


def run_rank(function: Callable[[Path], Any], folder: Path, rank: int, ranks: int) -> int:
    """Be a rank; return the exit status."""
    import torch.distributed as dist

    from agentrl.learner.megatron.cpu import computing_on

    try:
        store = dist.FileStore(str(folder / f"{function.__name__}.store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        with computing_on(torch.device("cpu")):
            found = function(folder)
        dist.barrier()
        if rank == 0:
            torch.save(found, folder / f"{function.__name__}.pt")
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    main()
