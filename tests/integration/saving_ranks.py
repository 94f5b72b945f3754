"""A learner rank in a separate process. Two ranks train and save; two with offloaded optimizer states load that and train on;
three load it and save it again.

Arguments are the folder, which has ``model`` and ``batch.pt``, and the rank. The third rank only loads.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist

from agentrl.config.learner import LearnerConfig
from agentrl.learner.base import RankOptions
from agentrl.learner.fsdp.rank import FsdpRank
from tests.algo_config import make_algo
from tests.integration.two_ranks import batch_of_share

CONFIG = LearnerConfig(precision="float32", device="cpu", threads=1)


def join(folder: Path, number: int, ranks: int, config: LearnerConfig = CONFIG) -> FsdpRank:
    """Return a rank in a new process group."""
    store = dist.FileStore(str(folder / f"store_of_{ranks}_{config.cpu_offload}"), ranks)
    dist.init_process_group("gloo", store=store, rank=number, world_size=ranks)
    return FsdpRank(RankOptions(folder / "model", config, make_algo(), device=torch.device("cpu"), seed=0))


def main() -> int:
    """Train, save, load, save."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    if number < 2:
        rank = join(folder, number, 2)
        batch = batch_of_share(torch.load(folder / "batch.pt", weights_only=False), rank.data_parallel_rank)
        rank.train_step(batch)
        rank.save(folder / "of_two")
        rank.train_step(batch)  # what is written is the state before it
        rank.finish_save()
        rank.sleep()
        rank.save(folder / "asleep")
        rank.finish_save()
        rank.close()
        rank = join(folder, number, 2, CONFIG.model_copy(update={"cpu_offload": "optimizer"}))
        rank.load(folder / "of_two")
        rank.train_step(batch)
        rank.save(folder / "offloaded")
        rank.finish_save()
        rank.close()
    rank = join(folder, number, 3)
    rank.load(folder / "of_two")
    rank.save(folder / "of_three")
    rank.finish_save()
    rank.close()
    return 0
