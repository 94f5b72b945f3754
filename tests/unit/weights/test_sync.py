"""Weights from a learner into engines, both fakes that remember what happened."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.errors import EngineError, LearnerError
from agentrl.weights import TRANSPORTS, make_sync


class BucketLearner:
    """Reuses its buffer from bucket to bucket, as a learner may; one tensor a bucket."""

    def __init__(self, count: int = 3, fail_at: int | None = None) -> None:
        self.count, self.fail_at = count, fail_at
        self.asked: list[int] = []

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        self.asked.append(bucket_bytes)
        buffer = torch.zeros(2)
        for number in range(self.count):
            if number == self.fail_at:
                raise LearnerError("rank 1 died")
            buffer.fill_(number + 1)
            yield [(f"w{number}", buffer)]
        buffer.fill_(-1)


class RecordingEngine:
    """Takes weights over and counts; refuses where told to."""

    def __init__(self, refuse: str | None = None, stuck: bool = False) -> None:
        self.refuse, self.stuck = refuse, stuck
        self.weights: dict[str, list[float]] = {}
        self.events: list[str] = []
        self.now = 0

    async def update_from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        await asyncio.sleep(0)
        if self.refuse in [name for name, _ in named]:
            raise EngineError(f"HTTP 400: no parameter {self.refuse}")
        self.weights |= {name: tensor.tolist() for name, tensor in named}
        self.events.append(f"{','.join(name for name, _ in named)}{' last' if last else ''}")
        if last and not self.stuck:
            self.now = version

    async def update_from_disk(self, folder: Path, version: int) -> None:
        if self.refuse:
            raise EngineError("HTTP 400: cannot read")
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        for name, file in index["weight_map"].items():
            self.weights[name] = load_file(folder / file)[name].tolist()
        self.events.append("disk")
        if not self.stuck:
            self.now = version

    async def version(self) -> int:
        self.events.append("version")
        return self.now


WANTED = {"w0": [1.0, 1.0], "w1": [2.0, 2.0], "w2": [3.0, 3.0]}


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_every_engine_gets_every_tensor_and_is_asked_its_version(tmp_path, transport):
    learner, engines = BucketLearner(), [RecordingEngine(), RecordingEngine()]
    asyncio.run(make_sync(transport, bucket_bytes=99, folder=tmp_path).push(learner, engines, 7))
    assert learner.asked == [99]
    for engine in engines:
        assert engine.weights == WANTED
        assert engine.now == 7
        assert engine.events[-1] == "version"
    assert not list(tmp_path.iterdir())


def test_only_the_last_bucket_is_flagged():
    engine = RecordingEngine()
    asyncio.run(make_sync("tensor", bucket_bytes=9, folder=Path()).push(BucketLearner(), [engine], 1))
    assert engine.events == ["w0", "w1", "w2 last", "version"]


@pytest.mark.parametrize(
    ("transport", "phase"), [("tensor", r"weights of version 3, bucket 2"), ("disk", r"weights of version 3 from")]
)
def test_a_refusal_names_engine_and_phase(tmp_path, transport, phase):
    engines = [RecordingEngine(), RecordingEngine(refuse="w1")]
    sync = make_sync(transport, bucket_bytes=9, folder=tmp_path)
    with pytest.raises(EngineError, match=rf"engine 1 of 2, {phase}.*HTTP 400"):
        asyncio.run(sync.push(BucketLearner(), engines, 3))
    assert engines[0].weights["w0"] == [1.0, 1.0]  # the healthy one was waited for
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_an_engine_that_still_samples_with_old_weights_is_found(tmp_path, transport):
    engines = [RecordingEngine(), RecordingEngine(stuck=True)]
    sync = make_sync(transport, bucket_bytes=9, folder=tmp_path)
    with pytest.raises(EngineError, match=r"engine 1 of 2, .*version 0, but 4 was sent"):
        asyncio.run(sync.push(BucketLearner(), engines, 4))


@pytest.mark.parametrize("transport", sorted(TRANSPORTS))
def test_a_learner_that_fails_in_between_leaves_the_version_as_it_was(tmp_path, transport):
    engine = RecordingEngine()
    with pytest.raises(LearnerError, match="rank 1 died"):
        asyncio.run(make_sync(transport, bucket_bytes=9, folder=tmp_path).push(BucketLearner(fail_at=2), [engine], 5))
    assert engine.now == 0
    assert not any("last" in event for event in engine.events)
    assert not list(tmp_path.iterdir())
