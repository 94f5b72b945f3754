"""Scores of packed rows by row. Layout of a micro-batch: rows of different lengths one after the other, then padding."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.batch.microbatch import MicroBatch
from agentrl.learner.rank import by_row, score_positions
from tests.batches import pack_rows
from tests.unit.batch.test_packing import row


class Work(TorchDispatchMode):
    """Counts the elements that torch's operations return."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        results = result if isinstance(result, list | tuple) else [result]
        self.elements += sum(tensor.numel() for tensor in results if isinstance(tensor, torch.Tensor))
        return result


def micro_batch(count: int) -> MicroBatch:
    """A micro-batch of ``count`` rows of 4 to 10 tokens."""
    rows = [row(number, [0, *[1] * (3 + number % 7)]) for number in range(count)]
    [[micro]] = pack_rows(rows, {each.key: 1.0 for each in rows}, tokens_per_micro=100 * count).micro
    return micro


def test_scores_of_many_rows_are_those_of_each_row() -> None:
    micro = micro_batch(300)
    at_N = score_positions(micro)
    scores_N = torch.arange(1.0, len(at_N) + 1)
    flat = np.zeros(micro.row_L.numel(), np.float32)
    flat[at_N.numpy()] = scores_N.numpy()
    scores = by_row(micro, at_N, scores_N)
    assert list(scores) == list(micro.keys)
    for number, key in enumerate(micro.keys):
        np.testing.assert_array_equal(scores[key], flat[micro.row_L.numpy() == number])
        assert scores[key][0] == 0
    assert by_row(pack_rows([], {}, tokens_per_micro=8).micro[0][0], at_N[:0], scores_N[:0]) == {}


def test_the_work_for_scores_by_row_is_linear_in_rows_and_tokens() -> None:
    work = {}
    for count in (128, 512):
        micro = micro_batch(count)
        at_N = score_positions(micro)
        with Work() as counted:
            by_row(micro, at_N, torch.ones(len(at_N)))
        work[count] = counted.elements
    assert work[512] < 4.2 * work[128]
