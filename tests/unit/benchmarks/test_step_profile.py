from __future__ import annotations

from dataclasses import dataclass

import pytest
from torch.autograd import DeviceType

from benchmarks.step_profile import read_events


@dataclass
class Range:
    start: float
    end: float


@dataclass
class Event:
    name: str
    device_type: DeviceType
    time_range: Range


def test_idle_time_is_what_no_kernel_covers() -> None:
    host, gpu = DeviceType.CPU, DeviceType.CUDA
    events = [
        Event("aten::mm", host, Range(0, 1e6)),
        Event("cudaStreamSynchronize", host, Range(7e6, 10e6)),
        Event("mm", gpu, Range(1e6, 4e6)),
        Event("copy", gpu, Range(3e6, 5e6)),
        Event("mm", gpu, Range(8e6, 9e6)),
    ]
    actual_events = read_events(events, top=1)
    assert (actual_events.wall_s, actual_events.busy_s) == pytest.approx((10.0, 5.0))
    assert (actual_events.kernels, actual_events.waits, actual_events.waited_s) == (3, 1, pytest.approx(3.0))
    assert actual_events.by_name == (("mm", 2, pytest.approx(4.0)),)
