"""A learner with one rank in the calling process, without Ray. For tests, tools and debugging."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from typing_extensions import override

from agentrl.batch.provenance import check_provenance
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.base import CriticGroup, LearnerGroup, LearnerRank, RankGroup, RankOptions, RowLogprobs, RowScores
from agentrl.learner.device import collectives, pick_device
from agentrl.learner.export import WeightExporter
from agentrl.learner.registry import make_backend

if TYPE_CHECKING:
    from agentrl.batch.microbatch import GlobalBatch


class _LocalRank(RankGroup):
    """One rank in this process. A process has one process group: a second rank uses that of the first, and closes before it."""

    def __init__(self, options: RankOptions) -> None:
        config = options.config
        device = pick_device(config, local_rank=0)
        timeout = timedelta(seconds=config.step_timeout_s)
        self._is_second = dist.is_initialized()
        if not self._is_second:
            dist.init_process_group(collectives(device.type), store=HashStore(), rank=0, world_size=1, timeout=timeout)
        try:
            self.rank: LearnerRank = make_backend(config).rank_class()(replace(options, device=device))
        except BaseException:
            if not self._is_second:
                dist.destroy_process_group()
            raise

    @property
    @override
    def shares_prefixes(self) -> bool:
        return self.rank.shares_prefixes

    @override
    def train_step(self, batch: GlobalBatch) -> dict[str, float]:
        check_provenance(batch)
        return self.rank.train_step(batch)

    @override
    def sleep(self) -> None:
        self.rank.sleep()

    @override
    def wake(self) -> None:
        self.rank.wake()

    @override
    def save(self, folder: Path) -> None:
        self.rank.save(folder)

    @override
    def finish_save(self) -> None:
        self.rank.finish_save()

    @override
    def load(self, folder: Path) -> None:
        self.rank.load(folder)

    @override
    def close(self) -> None:
        """Leave the process group."""
        if not self._is_second:
            self.rank.close()


class LocalLearnerGroup(_LocalRank, WeightExporter, LearnerGroup):
    """A learner with one rank in this process."""

    def __init__(
        self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, seed: int, reference: Path | None = None
    ) -> None:
        _LocalRank.__init__(self, RankOptions(folder, config, algo, torch.device("cpu"), seed, reference))
        WeightExporter.__init__(self, self.rank, self.rank.adapters)

    @override
    def logprobs(self, batch: GlobalBatch, policy: str = "main") -> RowLogprobs:
        return self.rank.logprobs(batch, policy)

    @override
    def update_reference(self) -> None:
        self.rank.update_reference()

    @override
    def close(self) -> None:
        """Leave the process group."""
        self.leave_group()
        super().close()


class LocalCritic(_LocalRank, CriticGroup):
    """A critic with one rank in this process."""

    def __init__(self, folder: Path, config: LearnerConfig, algo: AlgoConfig, *, seed: int) -> None:
        super().__init__(RankOptions(folder, config, algo, torch.device("cpu"), seed, role="critic"))

    @override
    def values(self, batch: GlobalBatch) -> RowScores:
        return self.rank.values(batch)
