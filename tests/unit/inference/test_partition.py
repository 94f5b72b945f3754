import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from agentrl.inference.embedded.forward_batch import Segment
from agentrl.inference.embedded.model import _partition


def segments(sizes: list[int], starts: list[int]) -> list[Segment]:
    return [
        Segment(slot, start, np.zeros(size, np.int32))
        for slot, (size, start) in enumerate(zip(sizes, starts, strict=True))
    ]


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 500)), min_size=1, max_size=60), st.integers(1, 8))
def test_every_request_is_computed_once(shapes: list[tuple[int, int]], threads: int) -> None:
    parts = _partition(segments([size for size, _ in shapes], [start for _, start in shapes]), threads)
    assert sorted(index for batch_part in parts for index in batch_part) == list(range(len(shapes)))
    assert 1 <= len(parts) <= threads


def test_work_is_shared_evenly_and_slots_stay_together() -> None:
    first, second = _partition(segments([1] * 100, [200] * 100), 2)
    assert (first, second) == (list(range(50)), list(range(50, 100)))
    parts = _partition(segments([400] + [1] * 90, [0] + [10] * 90), 2)
    assert [len(batch_part) for batch_part in parts] == [90, 1]


def test_little_work_is_not_divided() -> None:
    assert len(_partition(segments([1] * 20, [100] * 20), 2)) == 1
