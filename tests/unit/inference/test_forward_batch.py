import numpy as np
import torch

from agentrl.inference.embedded.forward_batch import ForwardBatch, Segment


def segment(slot: int, start: int, count: int) -> Segment:
    return Segment(slot, start, np.arange(count, dtype=np.int32) + 100 * slot)


def test_decoding_requests_come_first_by_slot_and_nothing_is_padded() -> None:
    batch = ForwardBatch([segment(3, 0, 3), segment(2, 7, 1), segment(0, 4, 1)])
    assert batch.order == [2, 1, 0]
    assert batch.token_ids.tolist() == [0, 200, 300, 301, 302]
    assert batch.positions.tolist() == [4, 7, 0, 1, 2]
    assert batch.slots.tolist() == [0, 2, 3, 3, 3]
    assert batch.kept.tolist() == [0, 1, 4]
    assert batch.decoding == 2


def test_small_gaps_are_bridged_and_large_ones_split() -> None:
    batch = ForwardBatch([segment(slot, 9, 1) for slot in (0, 1, 4, 8, 9)])
    assert [(run.first, run.last) for run in batch.runs] == [(0, 5), (8, 10)]
    assert batch.decode_rows.tolist() == [0, 1, 4, 5, 6]
    assert not batch.dense
    assert batch.runs[0].lengths.tolist() == [10, 10, 1, 1, 10]


def test_a_query_sees_its_own_key_and_those_before_it_in_its_window() -> None:
    batch = ForwardBatch([segment(0, 2, 1), segment(1, 4, 1), segment(2, 1, 2)])
    seen = torch.isfinite(batch.mask(0, None))[:, 0, 0]
    assert seen.tolist() == [[True, True, True, False, False], [True] * 5]
    assert torch.isfinite(batch.mask(0, 2))[1, 0, 0].tolist() == [False, False, False, True, True]
    assert batch.mask(1, None).tolist() == [[True, True, False], [True, True, True]]
    assert batch.mask(1, 1).tolist() == [[False, True, False], [False, False, True]]
