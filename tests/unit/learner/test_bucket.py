import math
from dataclasses import replace

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.distributed.base import TensorSpec
from agentrl.distributed.flat_bucket import ALIGNMENT, total_bytes, views
from agentrl.learner.export.bucket import plan_buckets

DTYPES = ("float32", "bfloat16", "uint8", "int64")
specs = st.lists(
    st.builds(
        TensorSpec,
        st.just("w"),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=12,
)


@given(specs, st.integers(1, 500))
def test_buckets_hold_every_weight_once_and_in_order(specs: list[TensorSpec], limit: int) -> None:
    specs = [replace(spec, name=f"w{number}") for number, spec in enumerate(specs)]
    plans = plan_buckets(specs, limit)
    rest = list(specs)
    for plan in plans:
        assert set(plan.specs) == set(rest[: len(plan.specs)]), "buckets follow each other in the order of the weights"
        assert [s for s in plan.specs if total_bytes(s) % ALIGNMENT == 0] == [
            s for s in rest[: len(plan.specs)] if total_bytes(s) % ALIGNMENT == 0
        ], "and so do weights of usual sizes in a bucket"
        rest = rest[len(plan.specs) :]
    assert rest == []
    assert [plan.last for plan in plans] == [False] * (len(plans) - 1) + [True] * bool(plans)
    assert all(plan.size <= limit or len(plan.specs) == 1 for plan in plans)


@given(specs)
def test_weights_follow_each_other_without_padding_and_are_aligned(specs: list[TensorSpec]) -> None:
    for plan in plan_buckets(specs, 200):
        flat = torch.zeros(plan.size, dtype=torch.uint8)
        end = flat.data_ptr()
        for number, (_, view) in enumerate(views(plan.specs, flat)):
            if view.numel():
                assert view.data_ptr() == end
                end += view.nbytes
                alignment = ALIGNMENT if view.nbytes % ALIGNMENT == 0 else view.itemsize
                assert (view.data_ptr() - flat.data_ptr()) % alignment == 0
            view.fill_(number)
        assert end == flat.data_ptr() + plan.size
        for number, (spec, (_, view)) in enumerate(zip(plan.specs, views(plan.specs, flat), strict=True)):
            assert (view.shape, str(view.dtype)) == (spec.shape, f"torch.{spec.dtype}")
            assert view.numel() == math.prod(spec.shape)
            assert bool((view == number).all())
