"""A learner with one rank in the calling process, without Ray. For tests, tools and debugging."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from agentrl.batch.provenance import check_provenance
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.base import RowLogprobs
from agentrl.learner.device import collectives, pick_device
from agentrl.learner.export.exporter import WeightExporter
from agentrl.learner.registry import make_rank

if TYPE_CHECKING:
    from agentrl.batch.microbatch import GlobalBatch


class LocalLearnerGroup(WeightExporter):
    """Implements `agentrl.learner.base.LearnerGroup` with one rank in this process."""

    def __init__(
        self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, seed: int, reference: Path | None = None
    ) -> None:
        device = pick_device(config, local_rank=0)
        timeout = timedelta(seconds=config.step_timeout_s)
        dist.init_process_group(collectives(device.type), store=HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            self.rank = make_rank(folder, config, algo, device=device, seed=seed, reference=reference)
        except BaseException:
            dist.destroy_process_group()
            raise
        super().__init__(self.rank)

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step; see `LearnerGroup.train_step`."""
        check_provenance(batch)
        return self.rank.train_step(batch)

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return log-probabilities by row; see `LearnerGroup.logprobs`."""
        return self.rank.logprobs(batch, policy)

    def update_reference(self) -> None:
        """Copy the policy into the reference; see `LearnerGroup.update_reference`."""
        self.rank.update_reference()

    def sleep(self) -> None:
        """Release the device's memory; see `LearnerGroup.sleep`."""
        self.rank.sleep()

    def wake(self) -> None:
        """Restore the device's memory; see `LearnerGroup.wake`."""
        self.rank.wake()

    def save(self, folder: Path) -> None:
        """Write the state; see `LearnerGroup.save`."""
        self.rank.save(folder)

    def load(self, folder: Path) -> None:
        """Read the state; see `LearnerGroup.load`."""
        self.rank.load(folder)

    def close(self) -> None:
        """Leave the process group."""
        self.leave_group()
        self.rank.close()
