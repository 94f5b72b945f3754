import numpy as np
import torch

from agentrl.inference.embedded.forward_batch import Segment, Step


def segment(slot: int, start: int, count: int) -> Segment:
    return Segment(slot, start, np.arange(count, dtype=np.int32) + 100 * slot)


def test_decoding_requests_come_first_by_slot_and_nothing_is_padded() -> None:
    step = Step([segment(3, 0, 3), segment(2, 7, 1), segment(0, 4, 1)])
    assert step.order == [2, 1, 0]
    assert step.token_ids.tolist() == [0, 200, 300, 301, 302]
    assert step.positions.tolist() == [4, 7, 0, 1, 2]
    assert step.slots.tolist() == [0, 2, 3, 3, 3]
    assert step.last.tolist() == [0, 1, 4]
    assert step.decoding == 2


def test_small_gaps_are_bridged_and_large_ones_split() -> None:
    step = Step([segment(slot, 9, 1) for slot in (0, 1, 4, 8, 9)])
    assert [(run.first, run.last) for run in step.runs] == [(0, 5), (8, 10)]
    assert step.place.tolist() == [0, 1, 4, 5, 6]
    assert not step.dense
    assert step.runs[0].lengths.tolist() == [10, 10, 1, 1, 10]


def test_a_query_sees_its_own_key_and_those_before_it_in_its_window() -> None:
    step = Step([segment(0, 2, 1), segment(1, 4, 1), segment(2, 1, 2)])
    seen = torch.isfinite(step.mask(0, None))[:, 0, 0]
    assert seen.tolist() == [[True, True, True, False, False], [True] * 5]
    assert torch.isfinite(step.mask(0, 2))[1, 0, 0].tolist() == [False, False, False, True, True]
    assert step.mask(1, None).tolist() == [[True, True, False], [True, True, True]]
    assert step.mask(1, 1).tolist() == [[False, True, False], [False, False, True]]
