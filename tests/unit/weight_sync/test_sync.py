"""Weights from a learner into engines, both fakes that remember what happened."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from agentrl.core.errors import EngineError, LearnerError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.distributed.flat_bucket import serialize_tensors
from agentrl.inference.embedded.weights import read_bucket
from agentrl.learner.base import WeightBucket
from agentrl.learner.export import NamedTensors, RankBucket, WeightExporter
from agentrl.models.weight_checksum import fingerprint, tensor_checksum
from agentrl.testing import FakeEngine
from agentrl.weight_sync.base import SyncedWeights, TransportOptions
from agentrl.weight_sync.engines import Checksums
from agentrl.weight_sync.registry import TRANSPORTS, make_transport


def by_value(bucket: RankBucket) -> WeightBucket:
    """Has the bucket share its weights by value: on a CPU there are no handles."""
    bucket.ipc_handles = lambda: [serialize_tensors(bucket.tensors())] * 2  # type: ignore[method-assign]
    return bucket


class BucketLearner(WeightExporter):
    """One rank with one tensor a bucket, all in the same memory."""

    def __init__(self, count: int = 3, fail_at: int | None = None) -> None:
        super().__init__(NamedTensors({f"w{number}": torch.full((2,), number + 1.0) for number in range(count)}))
        self.fail_at = fail_at
        self.requested: list[tuple[int, str | None]] = []

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        self.requested.append((bucket_bytes, dtype))
        for number, bucket in enumerate(super().buckets(9, dtype)):
            if number == self.fail_at:
                raise LearnerError("rank 1 died")
            yield by_value(bucket)


WANTED = {"w0": [1.0, 1.0], "w1": [2.0, 2.0], "w2": [3.0, 3.0]}


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_every_engine_gets_every_tensor_and_reports_its_version(tmp_path, transport):
    learner, engines = BucketLearner(), [FakeEngine(), FakeEngine()]
    asyncio.run(
        make_transport(transport, TransportOptions(bucket_bytes=99, folder=tmp_path)).sync_weights(learner, engines, 7)
    )
    assert learner.requested == [(99, None)]
    for engine in engines:
        assert engine.weights == WANTED
        assert engine.sampled_version == 7
        assert engine.events[-1] == "version"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_what_was_sent_has_another_fingerprint_if_one_weight_changes(tmp_path, transport):
    learner, weight = BucketLearner(), torch.tensor([1.0, 2.0])

    async def play() -> list[SyncedWeights]:
        sync, actual = make_transport(transport, TransportOptions(bucket_bytes=99, folder=tmp_path)), []
        for values in ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0001]):
            weight.copy_(torch.tensor(values))
            actual.append(await sync.sync_weights(learner, [FakeEngine()], 7))
        await sync.aclose()
        return actual

    learner._source.tensors["w1"] = weight
    first, same, other = asyncio.run(play())
    assert first == same
    assert first.fingerprint != other.fingerprint
    assert first.bytes == other.bytes == 3 * 2 * 4


@given(st.binary(max_size=40), st.lists(st.tuples(st.integers(0, 39), st.integers(1, 255)), min_size=1, max_size=3))
def test_a_fingerprint_differs_if_bytes_differ(data, changes):
    changed = bytearray(data)
    for at, value in changes:
        if at < len(data):
            changed[at] = changed[at] + value & 255
    flats = [torch.tensor(list(content), dtype=torch.uint8) for content in (data, changed)]
    same = sorted(words(data)) == sorted(words(changed))
    assert (fingerprint(flats[0]) == fingerprint(flats[1])) == same


def words(data) -> list[bytes]:
    return [bytes(data[at : at + 8]) for at in range(0, len(data), 8)]


def test_only_the_last_bucket_is_flagged():
    engine = FakeEngine()
    asyncio.run(
        make_transport("tensor", TransportOptions(bucket_bytes=9, folder=Path())).sync_weights(
            BucketLearner(), [engine], 1
        )
    )
    assert engine.events == ["w0", "w1", "w2 last", "version"]


@pytest.mark.parametrize(
    ("transport", "phase"),
    [
        ("tensor", r"weights of version 3, bucket 2"),
        ("ipc", r"weights of version 3, bucket 2"),
        ("delta", r"changes of version 3, bucket 2"),
        ("disk", r"weights of version 3 from"),
        ("distributed", r"\(http://127.0.0.1:9\), weights of version 3, bucket 2"),
    ],
)
def test_a_refusal_names_engine_and_phase(tmp_path, transport, phase):
    engines = [FakeEngine(), FakeEngine(refuse="w1")]
    sync = make_transport(transport, TransportOptions(bucket_bytes=9, folder=tmp_path))
    with pytest.raises(EngineError, match=rf"engine 1 of 2,? {phase}.*HTTP 400"):
        asyncio.run(sync.sync_weights(BucketLearner(), engines, 3))
    assert engines[0].weights["w0"] == [1.0, 1.0]  # the healthy one was waited for
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_an_engine_that_still_samples_with_old_weights_is_found(tmp_path, transport):
    engines = [FakeEngine(), FakeEngine(stuck=True)]
    sync = make_transport(transport, TransportOptions(bucket_bytes=9, folder=tmp_path))
    with pytest.raises(EngineError, match=r"engine 1 of 2, .*version 0, but 4 was sent"):
        asyncio.run(sync.sync_weights(BucketLearner(), engines, 4))


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_a_learner_that_fails_in_between_leaves_the_version_as_it_was(tmp_path, transport):
    engine = FakeEngine()
    with pytest.raises(LearnerError, match="rank 1 died"):
        asyncio.run(
            make_transport(transport, TransportOptions(bucket_bytes=9, folder=tmp_path)).sync_weights(
                BucketLearner(fail_at=2), [engine], 5
            )
        )
    assert engine.sampled_version == 0
    assert not any("last" in event for event in engine.events)
    assert not list(tmp_path.iterdir())


def test_a_group_is_kept_until_the_engines_change_or_a_push_fails():
    engines = [FakeEngine(), FakeEngine()]
    sync = make_transport("distributed", TransportOptions(bucket_bytes=9, folder=Path(), timeout_s=10))

    learner = BucketLearner()

    async def play() -> None:
        await sync.sync_weights(learner, engines, 1)
        first = engines[0].group
        await sync.sync_weights(learner, engines, 2)
        assert engines[0].group is first
        await sync.sync_weights(learner, engines[:1], 3)
        second = engines[0].group
        assert second is not first
        learner.fail_at = 2
        with pytest.raises(LearnerError):
            await sync.sync_weights(learner, engines[:1], 4)
        learner.fail_at = None
        await sync.sync_weights(learner, engines[:1], 5)
        assert engines[0].group is not second
        await sync.aclose()
        await sync.aclose()

    asyncio.run(play())
    assert [engine.sampled_version for engine in engines] == [5, 2]
    assert engines[0].events[-1] == "leave"


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_weights_are_cast_before_they_are_sent(tmp_path, transport):
    class Noting(FakeEngine):
        dtypes: ClassVar[set[str]] = set()

        async def from_tensors(self, named, version, *, last, ranks=1):
            self.dtypes |= {str(tensor.dtype) for _, tensor in named}
            await super().from_tensors(named, version, last=last)

        async def from_disk(self, folder: Path, version: int) -> None:
            self.dtypes |= {
                str(load_file(file)[name].dtype) for file in folder.glob("*.safetensors") for name in load_file(file)
            }
            await super().from_disk(folder, version)

    engine = Noting()
    sync = make_transport(
        transport, TransportOptions(bucket_bytes=9, folder=tmp_path, dtype="bfloat16", check="checksum")
    )
    asyncio.run(sync.sync_weights(BucketLearner(), [engine], 2))  # the engine holds them in float32
    assert engine.dtypes == {"torch.bfloat16"}
    assert engine.weights == WANTED


def test_each_rank_of_an_engine_gets_the_handle_of_the_learners_rank_on_its_gpu():
    class Ranked(BucketLearner):
        def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
            for bucket in super().buckets(bucket_bytes, dtype):
                bucket.ipc_handles = lambda: [serialize_tensors([(f"rank{rank}", torch.ones(1))]) for rank in range(4)]
                yield bucket

    class Two(FakeEngine):
        async def ranks(self) -> int:
            return 2

    engines = [Two(), Two()]
    engines[0].number = 1  # the engine of number 0 is lost
    sync = make_transport("ipc", TransportOptions(bucket_bytes=9, folder=Path(), check="none"))
    asyncio.run(sync.sync_weights(Ranked(), engines[:1], 1))
    assert [read_bucket([handle])[0][0] for handle in engines[0].handles] == ["rank2", "rank3"]
    engines[1].number = 2
    with pytest.raises(EngineError, match=r"2 GPUs from the learner's rank 4 on, which has 4.*placement.mode=colocate"):
        asyncio.run(sync.sync_weights(Ranked(), engines[1:], 1))


def test_a_learner_of_one_rank_shares_its_gpu_with_all_engines():
    class OneRank(BucketLearner):
        def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
            for bucket in super().buckets(bucket_bytes, dtype):
                handle = serialize_tensors(bucket.tensors())
                bucket.ipc_handles = partial(list, [handle])
                yield bucket

    engines = [FakeEngine(), FakeEngine()]
    engines[1].number = 1
    sync = make_transport("ipc", TransportOptions(bucket_bytes=9, folder=Path(), check="version"))
    asyncio.run(sync.sync_weights(OneRank(), engines, 1))
    assert [engine.weights for engine in engines] == [WANTED, WANTED]


def test_a_learner_that_cannot_send_is_what_is_blamed():
    class Sleeping(BucketLearner):
        def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
            for bucket in super().buckets(bucket_bytes, dtype):
                bucket.broadcast = self.refuse
                yield bucket

        def refuse(self) -> None:
            raise LearnerError("it sleeps")

    engines = [FakeEngine(), FakeEngine()]
    sync = make_transport("distributed", TransportOptions(bucket_bytes=9, folder=Path(), timeout_s=10))
    with pytest.raises(LearnerError, match="it sleeps"):
        asyncio.run(sync.sync_weights(Sleeping(), engines, 1))
    assert [engine.events for engine in engines] == [["leave", "cancel"]] * 2


def test_an_engine_that_fails_before_the_learner_begins_to_send_is_what_is_blamed():
    """The learner has left the group when it sends, and says so; this is no cause."""

    class Late(BucketLearner):
        sending, left = threading.Event(), threading.Event()

        def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
            for bucket in super().buckets(bucket_bytes, dtype):
                bucket.broadcast = partial(self.send_late, bucket.broadcast)
                yield bucket

        def send_late(self, send: Callable[[], None]) -> None:
            self.sending.set()
            self.left.wait(10)
            send()

        def leave_group(self) -> None:
            super().leave_group()
            self.left.set()

    class Failing(FakeEngine):
        async def from_group(
            self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool
        ) -> None:
            await asyncio.to_thread(learner.sending.wait, 10)
            raise EngineError("cannot load w0")

    learner = Late()
    sync = make_transport("distributed", TransportOptions(bucket_bytes=9, folder=Path(), timeout_s=10))
    with pytest.raises(EngineError, match=r"engine 0 of 1 .*, bucket 1: cannot load w0"):
        asyncio.run(sync.sync_weights(learner, [Failing()], 1))


class LargeLearner(WeightExporter):
    """Three buckets of 65 MiB, so large that rank 0 has sent one only when all engines receive it."""

    def __init__(self) -> None:
        super().__init__(NamedTensors({f"w{number}": torch.full((65 << 18,), number + 1.0) for number in range(3)}))

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        yield from super().buckets(65 << 20, dtype)


class SlowEngine(FakeEngine):
    """Has loaded a bucket only when the next one is announced; fails to load ``fail``."""

    def __init__(self, fail: str | None = None) -> None:
        super().__init__()
        self.fail = fail
        self.announced = [asyncio.Event() for _ in range(4)]

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        name, number = specs[0].name, int(specs[0].name[1:])
        self.announced[number].set()
        tensor = torch.empty(specs[0].shape)
        await asyncio.to_thread(self.group.broadcast, [tensor])
        if not last:
            async with asyncio.timeout(10):
                await self.announced[number + 1].wait()
        if name == self.fail:
            raise EngineError(f"cannot load {name}")
        self.weights[name] = [float(tensor[0]), float(tensor[-1])]
        self.sampled_version = version if last else self.sampled_version


def test_a_large_bucket_is_announced_while_engines_load_the_one_before():
    engines = [SlowEngine(), SlowEngine()]
    sync = make_transport("distributed", TransportOptions(bucket_bytes=9, folder=Path(), timeout_s=10))

    async def play() -> None:
        await sync.sync_weights(LargeLearner(), engines, 1)
        await sync.aclose()

    asyncio.run(play())
    assert all(engine.weights == WANTED for engine in engines)


def test_a_bucket_that_fails_while_the_next_one_is_sent_is_named():
    engines = [SlowEngine(), SlowEngine(fail="w1")]
    sync = make_transport("distributed", TransportOptions(bucket_bytes=9, folder=Path(), timeout_s=10))
    with pytest.raises(EngineError, match=r"engine 1 of 2 .*, bucket 2: cannot load w1"):
        asyncio.run(sync.sync_weights(LargeLearner(), engines, 1))


@pytest.mark.parametrize(
    ("check", "checks", "kind"),
    [("none", 0, "sha256"), ("version", 1, "sha256"), ("checksum", 1, "sha256"), ("checksum", 1, "words")],
)
def test_checks(check, checks, kind):
    engine = FakeEngine(checksum_kind=kind)
    sync = make_transport("tensor", TransportOptions(bucket_bytes=9, folder=Path(), check=check))
    asyncio.run(sync.sync_weights(BucketLearner(), [engine], 1))
    assert engine.events.count("version") == checks
    engine.weights["w1"] = [2.0, 2.5]

    async def keep(named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1) -> None:
        engine.sampled_version = version

    engine.from_tensors = keep  # type: ignore[method-assign]
    if check != "checksum":
        asyncio.run(sync.sync_weights(BucketLearner(), [engine], 2))
        return
    with pytest.raises(EngineError, match=r"engine 0 of 1, check of the weights: .*1 of 3 weights differ: w1"):
        asyncio.run(sync.sync_weights(BucketLearner(), [engine], 2))


def test_checksums_know_how_engines_keep_weights():
    """An engine of SGLang's: bfloat16, query, key and value in one, the vocabulary filled up to 64 rows."""
    torch.manual_seed(0)
    sent = [
        ("m.embed_tokens.weight", torch.randn(10, 4)),
        *(
            (f"m.layers.0.attn.{projection}_proj.{kind}", torch.randn(4, 4))
            for projection in "qkv"
            for kind in ("weight", "bias")
        ),
        ("m.layers.0.attn.o_proj.weight", torch.randn(4, 4)),
    ]
    sums = Checksums(["sha256"])
    sums.add(sent[:3])
    sums.add(sent[3:])
    named = dict(sent)
    joined_qkv = {
        kind: torch.cat([named[f"m.layers.0.attn.{projection}_proj.{kind}"] for projection in "qkv"])
        for kind in ("weight", "bias")
    }
    values = {
        "m.embed_tokens.weight": torch.cat([sent[0][1], torch.zeros(54, 4)]),
        "m.layers.0.attn.qkv_proj.weight": joined_qkv["weight"],
        "m.layers.0.attn.qkv_proj.bias": joined_qkv["bias"],
        "m.layers.0.attn.o_proj.weight": sent[-1][1],
    }
    for dtype in (torch.float32, torch.bfloat16):
        actual = {name: tensor_checksum(tensor.to(dtype)) for name, tensor in values.items()}
        assert sums.difference(actual) is None
        wrong = actual | {"m.layers.0.attn.qkv_proj.bias": actual["m.layers.0.attn.o_proj.weight"]}
        assert sums.difference(wrong) == "1 of 4 weights differ: m.layers.0.attn.qkv_proj.bias"
        assert sums.difference(actual | {"x": "0"}) == "1 of 5 weights were never sent: x"
        del actual["m.layers.0.attn.o_proj.weight"]
        assert sums.difference(actual) == "1 of 3 weights are not there: m.layers.0.attn.o_proj.weight"


@pytest.mark.parametrize(
    ("transport", "mib", "expected"),
    [("ipc", None, 4096), ("distributed", None, 4096), ("tensor", None, 512), ("disk", None, 512), ("ipc", 64, 64)],
)
def test_the_default_size_of_a_bucket_depends_on_the_transport(transport, mib, expected):
    assert TRANSPORTS[transport].bucket_bytes(mib) == expected << 20


def test_the_first_weights_that_differ_are_named_in_the_order_of_layers() -> None:
    sums = Checksums(["sha256"])
    names = [f"m.layers.{layer}.mlp.down_proj.weight" for layer in (11, 2, 10, 9)]
    sums.add([(name, torch.ones(2)) for name in names])
    difference = sums.difference(dict.fromkeys(names, "0"))
    first = ", ".join(f"m.layers.{layer}.mlp.down_proj.weight" for layer in (2, 9, 10))
    assert difference == f"4 of 4 weights differ: {first}"
