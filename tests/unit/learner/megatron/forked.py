"""Ranks of process groups as forks of one process, so that Megatron-Core is imported once.

`main` with the arguments ``MODULE FOLDER FUNCTION:RANKS…`` calls functions of a module here on so many ranks, one function
after the other, with the folder.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import preloaded

REPOSITORY = Path(__file__).parents[4]
LIMIT = timedelta(seconds=120)


class Found:
    """What functions returned on rank 0."""

    def __init__(self, folder: Path, errors: str) -> None:
        self.folder = folder
        self.errors = errors

    def __getitem__(self, function: str) -> Any:
        import torch

        path = self.folder / f"{function}.pt"
        assert path.exists(), self.errors
        return torch.load(path, weights_only=False)


def run_ranks(folder: Path, preloaded_children: str, module: str = "cases", **ranks: int) -> Found:
    """Call ``MODULE.NAME(folder)`` for every ``NAME=RANKS``, with a gloo group and in Megatron-Core's CPU context.

    A function for 0 ranks is called in one process without them. The process is a fork of the one that has imported
    Megatron-Core for all files of tests, if there is one (see `conftest`), or of the preloaded one.
    """
    words = [module, str(folder), *(f"{function}:{count}" for function, count in ranks.items())]
    with (folder / "stderr").open("w") as errors:
        files = {1: errors.fileno(), 2: errors.fileno()}
        request = preloaded.Request(f"{__name__}:main", words, str(REPOSITORY), dict(os.environ), files)
        process = preloaded.Forked(request, os.environ.get(preloaded.MEGATRON, preloaded_children))
        try:
            process.wait(timeout=200)
        finally:
            process.end()
    return Found(folder, (folder / "stderr").read_text())


def main() -> None:
    """Fork the ranks of each function and wait; if a rank fails, the function's others end."""
    import_module(f"{__package__}.imports")
    cases = import_module(f"{__package__}.{sys.argv[1]}")
    gc.freeze()
    folder = Path(sys.argv[2])
    for word in sys.argv[3:]:
        function, _, ranks = word.partition(":")
        running = set()
        for rank in range(int(ranks) or 1):
            child = os.fork()
            if child == 0:
                status = run_rank(getattr(cases, function), folder, rank, int(ranks))
                sys.stderr.flush()
                os._exit(status)  # the end of the interpreter would take two seconds
            running.add(child)
        while running:
            child, status = os.wait()
            running.discard(child)
            if status:
                for process in running:
                    os.kill(process, signal.SIGKILL)


def run_rank(function: Callable[[Path], Any], folder: Path, rank: int, ranks: int) -> int:
    """Be a rank; return the exit status."""
    import torch
    import torch.distributed as dist

    from tests.unit.learner.megatron import cases

    torch.set_num_threads(1)
    try:
        if not ranks:
            torch.save(function(folder), folder / f"{function.__name__}.pt")
            return 0
        store = dist.FileStore(str(folder / f"{function.__name__}.store"), ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=LIMIT)
        with cases.computing_on(cases.CPU):
            result = function(folder)
        dist.barrier()
        if rank == 0:
            torch.save(result, folder / f"{function.__name__}.pt")
        dist.destroy_process_group()
    except BaseException:
        traceback.print_exc()
        return 1
    return 0
