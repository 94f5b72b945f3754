"""Rate of building, packing and checking rows; for ``agentrl bench masks``."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.batch.provenance import check_provenance
from agentrl.core.types import Row


@dataclass(frozen=True, slots=True)
class MaskTimes:
    """Results of `bench_masks`; all rates are tokens per second of CPU time in this thread."""

    tokens: int
    build_tokens_per_s: float
    """From generations to rows with masks."""
    pack_tokens_per_s: float
    """From rows to packed tensors with weights."""
    check_tokens_per_s: float
    """The learner's provenance check."""
    tokens_per_s: float
    """All three."""


def bench_masks(build_rows: Callable[[], Sequence[Row]], *, tokens_per_micro: int) -> MaskTimes:
    """Build rows, pack and check them once each."""
    start = time.thread_time()
    rows = build_rows()
    built = time.thread_time()
    advantages = {row.key: np.ones(len(row.token_ids), np.float32) for row in rows}
    batch = pack(rows, PackOptions(tokens_per_micro, data_parallel_size=2), RowSignals(advantages))
    packed = time.thread_time()
    check_provenance(batch)
    checked = time.thread_time()
    tokens = sum(len(row.token_ids) for row in rows)
    return MaskTimes(
        tokens=tokens,
        build_tokens_per_s=tokens / (built - start),
        pack_tokens_per_s=tokens / (packed - built),
        check_tokens_per_s=tokens / (checked - packed),
        tokens_per_s=tokens / (checked - start),
    )
