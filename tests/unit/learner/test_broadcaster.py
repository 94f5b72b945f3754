"""Rank 0's place in a group, with receivers in threads of this process."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from agentrl.core.errors import EngineError, LearnerError
from agentrl.distributed import flat_bucket
from agentrl.distributed.broadcast_group import BroadcastGroup
from agentrl.distributed.flat_bucket import total_bytes, views
from agentrl.learner.export import NamedTensors, WeightExporter

URLS = ["http://127.0.0.1:9", "http://127.0.0.1:10"]
TIMEOUT_S = 60.0


@pytest.fixture
def threads():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def learner():
    learner = WeightExporter(NamedTensors({"a": torch.arange(4.0), "b": torch.ones(2, 3)}))
    yield learner
    learner.leave_group()


def joined(learner: WeightExporter, threads: ThreadPoolExecutor) -> BroadcastGroup:
    group = learner.open_group(URLS[:1], 2, "gloo", TIMEOUT_S)
    assert (group.host, group.size, group.backend) == ("127.0.0.1", 2, "gloo")
    joining = threads.submit(BroadcastGroup.join, group, 1, timeout_s=TIMEOUT_S)
    learner.join_group(group)
    return joining.result()


def receive(broadcast_group: BroadcastGroup, bucket) -> list[torch.Tensor]:
    flat = torch.zeros(total_bytes(*bucket.specs), dtype=torch.uint8)
    broadcast_group.broadcast([flat])
    return [tensor for _, tensor in views(bucket.specs, flat)]


def test_a_bucket_arrives_whole_and_in_order(learner, threads):
    engine_group = joined(learner, threads)
    for _ in range(2):
        for bucket in learner.buckets(16, "bfloat16"):
            arrived = threads.submit(receive, engine_group, bucket)
            bucket.broadcast()
            expected = [tensor for _, tensor in bucket.tensors()]
            assert all(torch.equal(*pair) for pair in zip(arrived.result(), expected, strict=True))
    learner.leave_group()
    learner.leave_group()
    engine_group.close()


def test_large_weights_arrive_one_by_one(learner, threads, monkeypatch):
    monkeypatch.setattr(flat_bucket, "LARGE_WEIGHTS", 1)
    engine_group = joined(learner, threads)
    [bucket] = learner.buckets(99)
    arriving = [torch.zeros_like(tensor) for _, tensor in bucket.tensors()]
    arrived = threads.submit(engine_group.broadcast, arriving)
    bucket.broadcast()
    arrived.result()
    assert all(torch.equal(mine, sent) for mine, (_, sent) in zip(arriving, bucket.tensors(), strict=True))
    learner.leave_group()
    engine_group.close()


def test_without_a_group_nothing_is_sent(learner):
    learner.leave_group()
    [bucket] = learner.buckets(99)
    with pytest.raises(LearnerError, match="joined no group"):
        bucket.broadcast()


@pytest.mark.parametrize("blocked", ["join", "broadcast"])
def test_leaving_ends_what_another_thread_waits_for(learner, threads, blocked):
    if blocked == "join":
        group = learner.open_group(URLS, 3, "gloo", TIMEOUT_S)
        waits = threads.submit(learner.join_group, group)
    else:
        engine_group = joined(learner, threads)
        learner._source = NamedTensors({"large": torch.zeros(8 << 20)})  # more than sockets hold
        [bucket] = learner.buckets(1)
        waits = threads.submit(bucket.broadcast)
    time.sleep(0.5)
    assert not waits.done()
    begun = time.monotonic()
    threading.Thread(target=learner.leave_group).start()
    with pytest.raises(EngineError):
        waits.result(timeout=TIMEOUT_S / 2)
    assert time.monotonic() - begun < TIMEOUT_S / 4
    if blocked == "broadcast":
        engine_group.close()
    joined(learner, threads).close()


def test_a_group_is_joined_only_while_it_is_open(learner):
    group = learner.open_group(URLS, 3, "gloo", TIMEOUT_S)
    learner.leave_group()
    with pytest.raises(EngineError, match="was left"):
        learner.join_group(group)
