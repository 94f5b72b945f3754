"""Weight syncs of 16 and 64 learner ranks, counted and held against the count on paper; see `many_ranks`."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.cluster import learner_group, rank_actors
from agentrl.core.errors import EngineError
from agentrl.learner.streams import order_in_waves
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport
from tests.unit.weight_sync.many_ranks import (
    Engine,
    FakeRay,
    Layout,
    ManyRanks,
    Network,
    count_buckets,
    driver_calls,
    make_weights,
)

LAYOUTS = {
    "16 ranks": Layout(16, tensor=2, stages=2, experts=4, senders=4),
    "64 ranks": Layout(64, tensor=2, stages=4, experts=8, senders=4),
    "64 ranks, all gather": Layout(64, tensor=64, experts=64),
}
WEIGHTS = make_weights(layers=4, experts=8)


@pytest.fixture(autouse=True)
def fake_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (learner_group, rank_actors):
        monkeypatch.setattr(module, "ray", FakeRay)


@contextmanager
def learner_of(layout: Layout, network: Network) -> Iterator[ManyRanks]:
    learner = ManyRanks(layout, WEIGHTS, network)
    try:
        yield learner
    finally:
        learner.close()


@pytest.mark.parametrize("name", LAYOUTS)
def test_driver_calls_and_bytes_are_those_of_the_count_on_paper(name: str) -> None:
    layout, network, bucket_bytes = LAYOUTS[name], Network(), 100
    engines = [Engine(number, [*WEIGHTS], network) for number in range(2)]
    parts = layout.parts(WEIGHTS)
    buckets, senders = count_buckets(parts, bucket_bytes), {ranks[0] for ranks in parts}
    sync = make_transport("distributed", TransportOptions(bucket_bytes, Path(), backend="nccl", timeout_s=30))

    async def play(learner: ManyRanks) -> None:
        await sync.sync_weights(learner, engines, 1)
        assert learner.calls.total() == driver_calls(layout.ranks, [*parts], buckets) + 2 * len(senders)
        learner.calls.clear()
        network.sent.clear()
        network.commands.clear()
        await sync.sync_weights(learner, engines, 2)
        assert learner.calls.total() == driver_calls(layout.ranks, [*parts], buckets), "groups are kept"
        await sync.aclose()

    with learner_of(layout, network) as learner:
        asyncio.run(play(learner))
    expected = dict.fromkeys(senders, 0)
    for ranks, part in parts.items():
        expected[ranks[0]] += sum(weight.nbytes for weight in part.values())
    assert dict(network.sent) == expected, "each sender sends its part once"
    assert sum(expected.values()) == sum(weight.nbytes for weight in WEIGHTS.values())
    for ranks, commands in network.commands.items():
        assert commands == count_buckets({ranks: parts[ranks]}, bucket_bytes) + 2, "and one more, and the end"
    for engine in engines:
        assert engine.groups_joined == len(senders)
        assert engine.sampled_version == 2
        assert engine.weights == {name: weight.tolist() for name, weight in WEIGHTS.items()}


@pytest.mark.parametrize("transport", ["distributed", "tensor", "delta"])
def test_what_a_loader_joins_has_one_sender_and_one_bucket_of_every_size(transport: str) -> None:
    """Of changes, too, when one half has changed."""
    layout, network = LAYOUTS["16 ranks"], Network()
    smallest, largest = min(weight.nbytes for weight in WEIGHTS.values()), 8 * 300

    async def play(learner: ManyRanks) -> None:
        size = smallest
        while size < 2 * largest:
            engine = Engine(0, [*WEIGHTS], network)
            sync = make_transport(transport, TransportOptions(size, Path(), backend="nccl", timeout_s=30))
            await sync.sync_weights(learner, [engine], 1)
            assert engine.loader.names == WEIGHTS.keys(), size
            engine.loader.names.clear()
            changed = "model.layers.3.self_attn.kv_a_proj_with_mqa.weight"
            WEIGHTS[changed].add_(1)
            await sync.sync_weights(learner, [engine], 2)
            pair = {changed, changed.replace("kv_a_proj_with_mqa", "q_a_proj")}
            assert engine.loader.names == (pair if transport == "delta" else WEIGHTS.keys()), size
            assert engine.weights[changed] == WEIGHTS[changed].tolist()
            await sync.aclose()
            size *= 6

    with learner_of(layout, network) as learner:
        asyncio.run(play(learner))


def test_after_a_refusal_all_senders_join_new_groups() -> None:
    layout, network = LAYOUTS["16 ranks"], Network()
    engines = [Engine(number, [*WEIGHTS], network) for number in range(2)]
    engines[1].refuse = "model.layers.3.mlp.gate.weight"
    sync = make_transport("distributed", TransportOptions(100, Path(), backend="nccl", timeout_s=30))

    async def play(learner: ManyRanks) -> None:
        with pytest.raises(EngineError, match=r"engine 1 of 2 .*, bucket \d+: HTTP 400: no parameter"):
            await sync.sync_weights(learner, engines, 1)
        assert all(engine.events.count("leave") == engine.groups_joined for engine in engines)
        engines[1].refuse = None
        await sync.sync_weights(learner, engines, 2)
        assert [engine.sampled_version for engine in engines] == [2, 2]
        await sync.aclose()

    with learner_of(layout, network) as learner:
        asyncio.run(play(learner))


def test_a_pass_that_stopped_early_leaves_no_rank_waiting() -> None:
    with learner_of(LAYOUTS["16 ranks"], Network()) as learner:
        for gather in (learner.buckets, learner.buckets_by_sender):
            next(iter(gather(100)))
        names = [spec.name for bucket in learner.buckets_by_sender(100) for spec in bucket.specs]
        assert sorted(names) == sorted(WEIGHTS)


def test_only_the_last_bucket_of_all_senders_is_the_last() -> None:
    with learner_of(LAYOUTS["64 ranks"], Network()) as learner:
        for size in (1, 50, 10_000):
            buckets = [(bucket.last, bucket.sender) for bucket in learner.buckets_by_sender(size)]
            assert [last for last, _ in buckets] == [False] * (len(buckets) - 1) + [True]
            assert len({sender for _, sender in buckets[:4]}) == 4, "senders take turns"


STREAMS = st.lists(
    st.tuples(st.integers(0, 12), st.integers(1, 5)).map(lambda place: tuple(range(place[0], sum(place)))), unique=True
)


@given(STREAMS)
def test_ranks_take_part_in_a_stream_at_a_time_and_all_in_the_same_order(streams: list[tuple[int, ...]]) -> None:
    waves = order_in_waves(streams)
    assert sorted(ranks for wave in waves for ranks in wave) == sorted(streams)
    for wave in waves:
        assert wave
        ranks = [rank for stream in wave for rank in stream]
        assert len(ranks) == len({*ranks})
    order = [ranks for wave in waves for ranks in wave]
    for rank in range(20):
        own = [ranks for ranks in order if rank in ranks]
        assert own == sorted(own, key=lambda ranks: (-len(ranks), ranks))
