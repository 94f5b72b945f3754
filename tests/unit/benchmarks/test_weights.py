"""What a weight benchmark counts, and what it refuses."""

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

import pytest
import torch
from aiohttp.test_utils import TestServer

from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError
from agentrl.inference.launch.launcher import EngineSpec
from agentrl.models.random_models import SHAPES
from benchmarks.scripted_engine import ScriptedSampler, make_app
from benchmarks.weights import Devices, RandomLearner, Stopwatch, SyncTimes, WeightsBench, measure_weights


def test_gathering_and_sending_are_told_apart() -> None:
    learner = RandomLearner(SHAPES["tiny"], torch.device("cpu"), seed=1)
    sizes = []
    for bucket in learner.buckets(100_000, "bfloat16"):
        sizes.append(sum(tensor.nbytes for _, tensor in bucket.tensors()))
        time.sleep(0.01)
    assert sum(sizes) == 2 * learner.numbers == 2 * SHAPES["tiny"].parameters
    assert len(sizes) > 2
    first = learner.watch
    assert first.buckets == len(sizes)
    assert 0.01 * len(sizes) + first.pack_s <= first.send_s
    assert first.gather_s > 0
    assert first.pack_s > 0
    list(learner.buckets(100_000))
    assert learner.watch.send_s < first.send_s, "each pass is counted by itself"
    assert learner.watch.pack_s == 0


def test_calls_at_the_same_time_are_counted_once() -> None:
    watch, both = Stopwatch(), threading.Barrier(2)
    begun = time.perf_counter()
    with ThreadPoolExecutor(2) as pool:
        waits = [pool.submit(watch.packing(lambda: (both.wait(), time.sleep(0.02), both.wait()))) for _ in range(2)]
        for wait in waits:
            wait.result()
    assert 0.02 <= watch.pack_s <= time.perf_counter() - begun


def test_weights_are_random_and_the_same_for_a_seed() -> None:
    def weights(seed: int) -> dict[str, torch.Tensor]:
        learner = RandomLearner(SHAPES["tiny"], torch.device("cpu"), seed)
        return {name: tensor.clone() for bucket in learner.buckets(1 << 20) for name, tensor in bucket.tensors()}

    first_weights, again, other_weights = weights(1), weights(1), weights(2)
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(first_weights[name], again[name])
    assert not torch.equal(first_weights[name], other_weights[name])
    assert "lm_head.weight" not in first_weights, "tied"
    assert first_weights[name].std() == pytest.approx(0.02, rel=0.1)


def test_the_rate_leaves_gathering_out() -> None:
    times = SyncTimes(
        "tiny", "disk", 1, 100, seconds=4.0, gather_s=1.0, send_s=2.0, pack_s=0.5, request_s=0.25, plain=None
    )
    assert times.rate == 50.0
    assert times.load_s == 1.25


@pytest.mark.parametrize(
    ("size", "transport", "override", "message"),
    [
        ("tiny", "ipc", "", r"--transports=ipc: it is for engines on a GPU"),
        ("tiny", "pigeon", "", r"--transports: pigeon is none of tensor, disk, distributed, ipc"),
        ("7b", "disk", "", r"size '7b': there are tiny, 0\.6b, 4b, 8b"),
        ("tiny", "disk", "sampler.url=http://127.0.0.1:1", r"sampler\.url=.*starts its own engines"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    size: str, transport: str, override: str, message: str
) -> None:
    config = load_config(None, ["sampler.backend=embedded", *([override] if override else [])])
    bench = WeightsBench([size], [transport], [1], 1, None)

    async def run() -> None:
        async for _ in measure_weights(config, bench, lambda text: None):
            raise AssertionError("nothing is measured")

    with pytest.raises(ConfigError, match=message):
        asyncio.run(run())


@dataclass
class StandIn:
    """An engine process; what happens to it is noted."""

    url: str
    size: str
    events: list[str]

    def stop(self) -> None:
        self.events.append(f"{self.size} stops")


@pytest.mark.parametrize("has_memory", [True, False])
def test_each_figure_is_there_before_the_next_engine_is_needed(
    monkeypatch: pytest.MonkeyPatch, has_memory: bool
) -> None:
    """The smallest model is the first, and its engine ends before the next one is used, which may have started meanwhile."""
    events: list[str] = []
    monkeypatch.setattr(Devices, "hold", lambda *_: has_memory)
    config = load_config(None, ["sampler.backend=embedded"])
    bench = WeightsBench(["tiny-moe", "tiny"], ["tensor"], [1], 1, None)

    async def run() -> None:
        async with TestServer(make_app(ScriptedSampler(vocabulary=100, delay_s=0.0))) as server:
            url = str(server.make_url(""))

            def start(spec: EngineSpec, number: int, *, gpus: Sequence[str]) -> StandIn:
                assert (number, gpus) == (0, ())
                events.append(f"{spec.model.name} starts")
                return StandIn(url, spec.model.name, events)

            monkeypatch.setattr(EngineSpec, "start", start)
            async with aclosing(measure_weights(config, bench, lambda text: None)) as measured:
                async for times in measured:
                    events.append(f"{times.size} is measured")

    asyncio.run(run())
    early = ["tiny-moe starts"] * has_memory
    late = ["tiny-moe starts"] * (not has_memory)
    tiny, following = ["tiny is measured", "tiny stops"], ["tiny-moe is measured", "tiny-moe stops"]
    assert events == ["tiny starts", *early, *tiny, *late, *following]


def test_the_learner_has_the_gpu_of_the_engine_or_another_one() -> None:
    devices = Devices(["4", "5"], [["5"]])
    assert [str(devices.learner(transport)) for transport in ("distributed", "ipc")] == ["cuda:0", "cuda:1"]
    assert Devices([], [()]).learner("distributed").type == "cpu"


def test_engines_have_the_last_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.weights.visible_gpus", lambda: ["0", "1", "2", "3"])

    def find(*overrides: str, transport: str = "distributed") -> Sequence[Sequence[str]]:
        sampler = load_config(None, ["sampler.backend=sglang", *overrides]).sampler
        return Devices.find(sampler, [transport]).engines

    assert find() == [["3"]]
    assert find("sampler.engines=3") == [["1"], ["2"], ["3"]]
    assert find("sampler.sglang.tp_size=2") == [["2", "3"]]
    with pytest.raises(ConfigError, match=r"sampler\.engines=3 of 2 GPUs each: this machine has 4"):
        find("sampler.engines=3", "sampler.sglang.tp_size=2")
    with pytest.raises(ConfigError, match=r"--transports=distributed: .* all 4 are theirs"):
        find("sampler.engines=4")
    with pytest.raises(ConfigError, match=r"--transports=ipc: .* and engines have 2"):
        find("sampler.engines=2", transport="ipc")
