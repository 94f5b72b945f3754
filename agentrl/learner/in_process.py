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
from agentrl.learner.base import LearnerRank, Role, RowLogprobs, RowScores
from agentrl.learner.device import collectives, pick_device
from agentrl.learner.export.exporter import WeightExporter
from agentrl.learner.registry import make_backend

if TYPE_CHECKING:
    from agentrl.batch.microbatch import GlobalBatch


class _LocalRank:
    """One rank in this process. A process has one process group: a second rank uses that of the first, and closes before it."""

    def __init__(
        self, folder: Path, config: LearnerConfig, algo: AlgoConfig, seed: int, reference: Path | None, role: Role
    ) -> None:
        device = pick_device(config, local_rank=0)
        timeout = timedelta(seconds=config.step_timeout_s)
        self._shares_group = dist.is_initialized()
        if not self._shares_group:
            dist.init_process_group(collectives(device.type), store=HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            rank_class = make_backend(config).rank_class()
            self.rank: LearnerRank = rank_class(
                folder, config, algo, device=device, seed=seed, reference=reference, role=role
            )
        except BaseException:
            if not self._shares_group:
                dist.destroy_process_group()
            raise

    @property
    def shares_prefixes(self) -> bool:
        """Whether batches may share prefixes; see `LearnerGroup.shares_prefixes`."""
        return self.rank.shares_prefixes

    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        """Take one optimizer step; see `LearnerGroup.train_step`."""
        check_provenance(batch)
        return self.rank.train_step(batch)

    def sleep(self) -> None:
        """Release the device's memory; see `LearnerGroup.sleep`."""
        self.rank.sleep()

    def wake(self) -> None:
        """Restore the device's memory; see `LearnerGroup.wake`."""
        self.rank.wake()

    def save(self, folder: Path) -> None:
        """Begin to write the state; see `LearnerGroup.save`."""
        self.rank.save(folder)

    def finish_save(self) -> None:
        """Wait until it is written; see `LearnerGroup.finish_save`."""
        self.rank.finish_save()

    def load(self, folder: Path) -> None:
        """Read the state; see `LearnerGroup.load`."""
        self.rank.load(folder)

    def close(self) -> None:
        """Leave the process group."""
        if not self._shares_group:
            self.rank.close()


class LocalLearnerGroup(_LocalRank, WeightExporter):
    """Implements `agentrl.learner.base.LearnerGroup` with one rank in this process."""

    def __init__(
        self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, seed: int, reference: Path | None = None
    ) -> None:
        _LocalRank.__init__(self, folder, config, algo, seed, reference, "policy")
        WeightExporter.__init__(self, self.rank, self.rank.adapters)

    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        """Return log-probabilities by row; see `LearnerGroup.logprobs`."""
        return self.rank.logprobs(batch, policy)

    def update_reference(self) -> None:
        """Copy the policy into the reference; see `LearnerGroup.update_reference`."""
        self.rank.update_reference()

    def close(self) -> None:
        """Leave the process group."""
        self.leave_group()
        super().close()


class LocalCritic(_LocalRank):
    """Implements `agentrl.learner.base.CriticGroup` with one rank in this process."""

    def __init__(self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, seed: int) -> None:
        super().__init__(folder, config, algo, seed, None, "critic")

    def values(self, batch: GlobalBatch) -> RowScores:
        """Return values by row; see `CriticGroup.values`."""
        return self.rank.values(batch)
