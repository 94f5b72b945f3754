"""Packed batches of rows, prefetched by processes."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch.utils.data import DataLoader

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.schema import Config
from agentrl.core.child_process import init_worker_process
from agentrl.core.errors import DataError
from agentrl.learner.registry import make_backend
from agentrl.sft.base import SftData, StepRows
from agentrl.sft.workers import sft_processes


def batches(config: Config, data: SftData, first_step: int = 0) -> Iterator[GlobalBatch]:
    """Return the packed batch of every step from ``first_step`` on, in order; ``sft.workers`` processes start now.

    Raises:
        DataError: a worker process died; raised by the iterator.
    """
    workers = config.sft.workers
    first_item, skipped = divmod(first_step, data.steps_per_item)
    loader: DataLoader[bytes] = DataLoader(
        data,  # type: ignore[arg-type]
        sampler=range(first_item, len(data)),
        batch_size=None,
        collate_fn=Packer(config, data.renderer.pad_token_id),
        num_workers=workers,
        multiprocessing_context=sft_processes() if workers else None,
        worker_init_fn=init_worker_process if workers else None,
        generator=torch.Generator(),  # the default one is the run's
    )
    packed_items = iter(loader)  # starts the processes
    return itertools.islice(_unpack(packed_items, workers), skipped, None)


def _unpack(packed_items: Iterator[bytes], workers: int) -> Iterator[GlobalBatch]:
    try:
        for packed in packed_items:
            yield from pickle.loads(packed)
    except RuntimeError as error:
        if "exited unexpectedly" not in str(error):
            raise
        raise DataError(
            f"a worker process (sft.workers={workers}) was killed or crashed. If memory is short, lower sft.workers"
        ) from error


@dataclass(frozen=True, slots=True)
class Packer:
    """Packs the rows of steps into one batch per step; runs in the workers."""

    config: Config
    pad_id: int

    def __call__(self, steps: list[StepRows]) -> bytes:
        """Return the pickled batches: plain bytes need no shared memory file per tensor."""
        batches = [(self.pack(step), step.metrics) for step in steps]
        return pickle.dumps([replace(batch, metrics={**batch.metrics, **metrics}) for batch, metrics in batches])

    def pack(self, step: StepRows) -> GlobalBatch:
        """Return the batch of a step."""
        assert self.config.sft.context_weight is not None, "the configuration has resolved it"
        options = PackOptions(
            tokens_per_micro=self.config.batch.micro_tokens,
            data_parallel_size=make_backend(self.config.learner).data_parallel_size,
            pad_id=self.pad_id,
            context_weight=self.config.sft.context_weight,
        )
        return pack(step.rows, options, RowSignals(images=step.images), kind="sft")
