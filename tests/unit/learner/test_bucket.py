import math

import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.distributed.base import TensorSpec
from agentrl.learner.export.bucket import ALIGNMENT, plan_buckets, views

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
    plans = plan_buckets(specs, limit)
    assert [spec for plan in plans for spec in plan.specs] == specs
    assert [plan.last for plan in plans] == [False] * (len(plans) - 1) + [True] * bool(plans)
    assert all(plan.size <= limit or len(plan.specs) == 1 for plan in plans)


@given(specs)
def test_weights_lie_apart_and_aligned(specs: list[TensorSpec]) -> None:
    for plan in plan_buckets(specs, 200):
        flat = torch.zeros(plan.size, dtype=torch.uint8)
        for number, (_, view) in enumerate(views(plan.specs, flat)):
            assert view.numel() == 0 or (view.data_ptr() - flat.data_ptr()) % ALIGNMENT == 0
            view.fill_(number)
        for number, (spec, (_, view)) in enumerate(zip(plan.specs, views(plan.specs, flat), strict=True)):
            assert (view.shape, str(view.dtype)) == (spec.shape, f"torch.{spec.dtype}")
            assert view.numel() == math.prod(spec.shape)
            assert bool((view == number).all())
