"""Weight sync by changes, from a learner with real weights into engines that are fakes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from agentrl.core.errors import LearnerError
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import (
    Changes,
    ReceivedWeights,
    WeightChangesError,
    encode,
    encode_changes,
    load_changes,
    positions,
    read,
)
from agentrl.inference.embedded.weights import read_named
from agentrl.testing import FakeEngine
from agentrl.weight_sync.base import SyncedWeights, TransportOptions
from agentrl.weight_sync.registry import make_transport
from tests.unit.weight_sync.test_sync import BucketLearner


@given(st.sets(st.integers(0, 3000), min_size=1, max_size=40))
def test_the_places_of_changes_are_read_as_they_were_written(indices: set[int]) -> None:
    old = torch.zeros(3001, dtype=torch.bfloat16)
    new = old.clone()
    new[sorted(indices)] = 1.0
    entry, pieces = encode("w", new, old)
    assert positions(pieces[0]).tolist() == sorted(indices)
    [(same, at, values)] = read([entry], torch.cat(pieces))
    assert (same, at.tolist(), values.tolist()) == (entry, sorted(indices), [1.0] * len(indices))


def test_a_weight_is_left_out_sent_in_part_or_whole() -> None:
    old = torch.zeros(4, 100)
    (same, nothing) = encode("w", old.clone(), old)
    assert (same.places, same.changed, nothing) == (0, 0, [])
    partly_changed, most = old.clone(), old + 1
    partly_changed[2, 50] = 3.0
    (partial_entry, pieces), (full_entry, flat) = encode("w", partly_changed, old), encode("w", most, old)
    assert (partial_entry.places, partial_entry.changed, sum(map(len, pieces))) == (
        1,
        1,
        5,
    )  # 250 unchanged numbers before it
    assert (full_entry.places, full_entry.changed, sum(map(len, flat))) == (None, 400, 1600)
    partly_changed[0, 0] = float("inf")
    with pytest.raises(WeightChangesError, match="the weight w has a number that is not finite"):
        encode("w", partly_changed, old)


class Fused(nn.Module):
    """Loads two weights into one parameter, and has one of a number, as SGLang's models do."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.fused = nn.Parameter(torch.zeros(4, 3).to(dtype), requires_grad=False)
        self.scale = nn.Parameter(torch.zeros(1), requires_grad=False)

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        for name, weight in weights:
            if name == "scale":
                self.scale.data.fill_(weight.item())
            else:
                self.fused.data.narrow(0, 2 * (name == "up"), 2).copy_(weight)


class Threaded(Fused):
    """Loads in threads what is on a CPU, as SGLang's loader of DeepSeek V3 does."""

    def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
        with ThreadPoolExecutor(1) as threads:
            for name, weight in weights:
                if getattr(weight, "_sglang_runai_streamer_tensor", False):
                    super().load_weights([(name, weight)])
                else:
                    threads.submit(super().load_weights, [(name, weight)])


def entry(
    new: dict[str, torch.Tensor], old: dict[str, torch.Tensor], base: str | None, name_held: str
) -> list[tuple[str, torch.Tensor]]:
    encoded = [encode(name, new[name], old.get(name)) for name in new]
    entries = [weight for weight in encoded if weight[0].changed]
    changes = Changes([entry for entry, _ in entries], torch.cat([piece for _, pieces in entries for piece in pieces]))
    return read_named([encode_changes(changes, base=base, held=name_held, number=0, last=True).first])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("model_class", [Fused, Threaded])
def test_sglangs_loader_writes_only_what_has_changed(model_class: type[Fused], dtype: torch.dtype) -> None:
    model = model_class(dtype)
    first = {"gate": torch.randn(2, 3).to(dtype), "up": torch.randn(2, 3).to(dtype), "scale": torch.ones(1)}
    load_changes(model, entry(first, {}, None, "a"))
    second = {name: tensor.clone() for name, tensor in first.items()}
    second["up"][1, 2] = 7.0
    changes = entry(second, first, "a", "b")
    assert len(dict(changes)["payload"]) == 1 + dtype.itemsize, "a place and a number"
    load_changes(model, changes)
    expected = torch.cat([second["gate"], second["up"]])
    assert torch.equal(model.fused.view(torch.uint8), expected.view(torch.uint8))
    third = second | {"scale": torch.full((1,), 2.0)}
    load_changes(model, entry(third, second, "b", "c"))
    assert model.scale.item() == 2.0
    assert torch.equal(model.fused.view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(
    ("held", "sent"), [(torch.bfloat16, torch.float8_e4m3fn), (torch.float8_e4m3fn, torch.bfloat16)]
)
def test_sglangs_loader_refuses_float8_for_other_weights_and_others_for_float8(
    held: torch.dtype, sent: torch.dtype
) -> None:
    with pytest.raises(WeightChangesError, match=f"a parameter of {held} cannot take changes of {sent}"):
        load_changes(Fused(held), entry({"up": torch.ones(2, 3).to(sent)}, {}, None, "a"))


def test_sglangs_loader_refuses_changes_to_other_weights_and_damaged_ones() -> None:
    model, weights = Fused(), {"up": torch.randn(2, 3)}
    changed = {"up": weights["up"].clone()}
    changed["up"][0, 0] = 3.0
    with pytest.raises(WeightChangesError, match="changes are to the weights a, and here are None"):
        load_changes(model, entry(changed, weights, "a", "b"))
    load_changes(model, entry(weights, {}, None, "a"))
    damaged = dict(entry(changed, weights, "a", "b"))
    damaged["payload"][-1] += 1
    with pytest.raises(WeightChangesError, match="another SHA-256 sum"):
        load_changes(model, [*damaged.items()])
    load_changes(model, entry(changed, weights, "a", "b"))
    assert model.fused[2, 0] == 3.0


def test_sglangs_loader_refuses_a_model_that_does_not_copy() -> None:
    class Replacing(Fused):
        def load_weights(self, weights: Sequence[tuple[str, torch.Tensor]]) -> None:
            for _, weight in weights:
                self.fused.data = torch.cat([weight, weight])

    model, weights = Replacing(), {"up": torch.randn(2, 3)}
    load_changes(model, entry(weights, {}, None, "a"))
    changed = {"up": weights["up"].clone()}
    changed["up"][0, 0] = 3.0
    with pytest.raises(WeightChangesError, match=r"set weights\.transport=tensor"):
        load_changes(model, entry(changed, weights, "a", "b"))


class Large(BucketLearner):
    """Three weights of 1,000 numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.named = {f"w{number}": torch.zeros(1000) for number in range(3)}
        self._source.tensors = self.named  # type: ignore[attr-defined]


def test_only_changes_are_sent_to_engines_that_have_the_last_weights() -> None:
    learner, engines = Large(), [FakeEngine(), FakeEngine()]
    sync = make_transport("delta", TransportOptions(bucket_bytes=9, folder=Path()))

    def check(*which: FakeEngine) -> None:
        for engine in which:
            assert engine.weights == {name: tensor.tolist() for name, tensor in learner.named.items()}

    async def sync_weights(version: int, *which: FakeEngine) -> SyncedWeights:
        sent = await sync.sync_weights(learner, which, version)  # type: ignore[arg-type]
        check(*which)
        return sent

    async def play() -> None:
        assert (await sync_weights(1, *engines)).bytes == 12_000
        learner.named["w1"][500] = 1.0
        assert (await sync_weights(2, *engines)).bytes == 2 + 4, "two bytes for the place"
        # A restarted engine gets all weights of the same version, and the others still get changes.
        engines[1] = FakeEngine()
        assert (await sync_weights(2, engines[1])).bytes == 12_000
        learner.named["w2"][0] = 2.0
        assert (await sync_weights(3, *engines)).bytes == 1 + 4
        # An engine that reports another version was restarted at the same address.
        engines[0].sampled_version, engines[0].received_name = 0, None
        learner.named["w0"][0] = 3.0
        assert (await sync_weights(4, *engines)).bytes == 12_000
        learner.named["w0"][0] = 4.0
        assert (await sync_weights(5, *engines)).bytes == 1 + 4

    asyncio.run(play())


def test_an_engine_with_other_weights_is_an_error_and_gets_all_of_them_next() -> None:
    learner, engine = Large(), FakeEngine()
    sync = make_transport("delta", TransportOptions(bucket_bytes=9, folder=Path()))

    async def play() -> None:
        await sync.sync_weights(learner, [engine], 1)  # type: ignore[arg-type]
        engine.received_name = "others"
        learner.named["w0"][0] = 1.0
        with pytest.raises(WeightChangesError, match="send all weights first"):
            await sync.sync_weights(learner, [engine], 2)  # type: ignore[arg-type]
        assert (await sync.sync_weights(learner, [engine], 2)).bytes == 12_000  # type: ignore[arg-type]
        learner.named["w0"][0] = float("nan")
        with pytest.raises(LearnerError, match="w0 has a number that is not finite"):
            await sync.sync_weights(learner, [engine], 3)  # type: ignore[arg-type]

    asyncio.run(play())


def test_other_weights_of_the_same_version_are_sent_whole_until_a_new_version() -> None:
    learner, engines = Large(), [FakeEngine(), FakeEngine()]
    sync = make_transport("delta", TransportOptions(bucket_bytes=9, folder=Path()))

    async def play() -> None:
        await sync.sync_weights(learner, engines[:1], 1)  # type: ignore[arg-type]
        learner.named["w0"][0] = 1.0
        await sync.sync_weights(learner, engines[1:], 1)  # type: ignore[arg-type]
        learner.named["w0"][1] = 1.0
        assert (await sync.sync_weights(learner, engines, 2)).bytes == 12_000  # type: ignore[arg-type]
        for engine in engines:
            assert engine.weights["w0"] == learner.named["w0"].tolist()

    asyncio.run(play())


def test_a_bucket_of_another_sync_is_refused() -> None:
    received_weights = ReceivedWeights()
    full_tensor, [_, pieces] = torch.ones(3), encode("w", torch.ones(3), None)
    changes = Changes([encode("w", full_tensor, None)[0]], torch.cat(pieces))  # type: ignore[index]

    def bucket(name: str, number: int, *, last: bool) -> list[tuple[str, torch.Tensor]]:
        return read_named([encode_changes(changes, base=None, held=name, number=number, last=last).first])

    received_weights.name = received_weights.receive(bucket("a", 0, last=False))[1]
    with pytest.raises(WeightChangesError, match="send all weights first"):
        received_weights.receive(bucket("b", 1, last=True))
    received_weights.name = received_weights.receive(bucket("a", 0, last=False))[1]
    received_weights.name = received_weights.receive(bucket("a", 1, last=True))[1]
    assert received_weights.name == "a"
