"""Where an optimizer step's time goes on a GPU: kernels by name, the share in which the GPU is idle, and waits of the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_WAITS = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "cudaMemcpy")
_WIDTH = 100


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step; times in seconds."""

    wall_s: float
    """From the first to the last event of host or GPU."""
    busy_s: float
    """In which a kernel or a copy ran."""
    kernels: int
    """Kernels and copies."""
    waits: int
    """Calls in which the host waited for the GPU."""
    waited_s: float
    """In these calls."""
    by_name: tuple[tuple[str, int, float], ...]
    """Names, counts and seconds of kernels, from the longest on."""


def profile_step(step: Callable[[], object], *, top: int) -> StepProfile:
    """Take a step under torch's profiler.

    Args:
        step: computes on the current GPU.
        top: names of kernels.
    """
    # Without events of the host's operations, which would make it several times slower, and the GPU idle.
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return read_events(profiler.events() or (), top=top)


def read_events(events: Iterable[Any], *, top: int) -> StepProfile:
    """Return the profile of the events of torch's profiler."""
    on_gpu, begins, ends = [], [], []
    seconds, counts = Counter[str](), Counter[str]()
    waits = list[float]()
    for event in events:
        start, end = event.time_range.start / 1e6, event.time_range.end / 1e6
        if event.device_type.name == "CUDA":
            on_gpu.append((start, end))
            seconds[event.name[:_WIDTH]] += end - start
            counts[event.name[:_WIDTH]] += 1
        elif event.name in _WAITS:
            waits.append(end - start)
        begins.append(start)
        ends.append(end)
    by_name = tuple((name, counts[name], spent) for name, spent in seconds.most_common(top))
    wall = max(ends, default=0.0) - min(begins, default=0.0)
    return StepProfile(wall, _union(on_gpu), len(on_gpu), len(waits), sum(waits), by_name)


def _union(intervals: list[tuple[float, float]]) -> float:
    """Return the time that intervals cover together."""
    covered, until = 0.0, float("-inf")
    for start, end in sorted(intervals):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
