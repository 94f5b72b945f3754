"""A group's broadcast ends in time, whatever torch's process group does."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from threading import Event

import pytest
import torch
from deadlines import wait_until

from agentrl.core.errors import EngineError
from agentrl.distributed.base import WeightGroup
from agentrl.distributed.broadcast_group import BroadcastGroup, open_store

GROUP = WeightGroup("g", "127.0.0.1", 1, 2, "nccl")


class DeafBackend:
    """Blocks as NCCL does where another rank never comes: aborting it changes nothing."""

    def __init__(self) -> None:
        self.release = Event()
        self.ended: list[str] = []

    def broadcast(self, tensor: torch.Tensor, root: int) -> None:
        self.release.wait()

    def abort(self) -> None:
        self.ended.append("abort")

    def shutdown(self) -> None:
        self.ended.append("shutdown")


def test_a_broadcast_without_receivers_ends_in_time_and_leaves_the_group() -> None:
    backend = DeafBackend()
    group = BroadcastGroup(backend, GROUP, timeout_s=0.05)
    with pytest.raises(EngineError, match=r"took longer than 0\.05 s"):
        group.broadcast([torch.ones(2)])
    assert backend.ended == ["abort", "shutdown"]
    with pytest.raises(EngineError, match="the group was left"):
        group.broadcast([torch.ones(2)])
    group.close()
    assert backend.ended == ["abort", "shutdown"]
    backend.release.set()


def test_leaving_ends_a_broadcast_at_once() -> None:
    backend = DeafBackend()
    group = BroadcastGroup(backend, GROUP, timeout_s=60)
    with ThreadPoolExecutor() as pool:
        sending = pool.submit(group.broadcast, [torch.ones(2)])
        begun = time.monotonic()
        wait_until(sending.running)
        group.close()
        with pytest.raises(EngineError, match="the group was left"):
            sending.result(timeout=30)
    assert time.monotonic() - begun < 30
    backend.release.set()


def test_a_rank_that_is_slow_fails_and_what_it_waits_for_ends() -> None:
    store = open_store("127.0.0.1", 10)
    group = WeightGroup("slow", "127.0.0.1", store.port, 2, "gloo")
    with ThreadPoolExecutor() as pool:
        joining = pool.submit(BroadcastGroup.join, group, 1, timeout_s=10)
        ours = BroadcastGroup.join(group, 0, timeout_s=10, store=store)
        theirs = joining.result(timeout=30)
        receiving = pool.submit(theirs.broadcast, [received := torch.zeros(3)])
        ours.broadcast([torch.ones(3)])
        receiving.result(timeout=30)
        assert received.tolist() == [1, 1, 1]
        receiving = pool.submit(theirs.broadcast, [torch.zeros(3)])
        ours.close()
        with pytest.raises(EngineError, match="broke off"):
            receiving.result(timeout=30)
        theirs.close()
