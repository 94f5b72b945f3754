"""Packed batches of demonstrations, prefetched by processes."""

from __future__ import annotations

import multiprocessing
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch.utils.data import DataLoader

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import PackOptions, pack
from agentrl.config.schema import Config
from agentrl.core.child_process import init_worker_process
from agentrl.learner.registry import make_backend
from agentrl.sft.demonstrations import Demonstrations, StepDemonstrations


def batches(config: Config, data: Demonstrations) -> Iterator[GlobalBatch]:
    """Yield the packed batch of every step in order, prefetched by ``sft.workers`` processes."""
    workers = config.sft.workers
    # This process has threads: a forked one could hang in a lock that a thread held.
    processes = multiprocessing.get_context("forkserver")
    processes.set_forkserver_preload([__name__])  # torch is imported once, not by each worker
    loader: DataLoader[bytes] = DataLoader(
        data,  # type: ignore[arg-type]
        batch_size=None,
        collate_fn=Packer(config, data.renderer.pad_token_id),
        num_workers=workers,
        multiprocessing_context=processes if workers else None,
        worker_init_fn=init_worker_process if workers else None,
    )
    for packed in loader:
        yield from pickle.loads(packed)


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs the demonstrations of steps into one batch per step; runs in the workers."""

    config: Config
    pad_id: int

    def __call__(self, steps: list[StepDemonstrations]) -> bytes:
        """Return the pickled batches: plain bytes need no shared memory file per tensor."""
        return pickle.dumps([self._pack(step) for step in steps])

    def _pack(self, step: StepDemonstrations) -> GlobalBatch:
        options = PackOptions(
            tokens_per_micro=self.config.batch.tokens_per_micro,
            data_parallel_size=make_backend(self.config.learner).data_parallel_size,
            pad_id=self.pad_id,
            context_weight=self.config.sft.context_weight,
        )
        batch = pack(step.rows, options, kind="sft")
        return replace(batch, metrics={**batch.metrics, "sft/reward": step.reward})
