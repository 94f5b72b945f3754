"""Four Megatron-Core ranks in Ray actors, two stages of two expert-parallel ranks, of which each sends its own weights."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file

from agentrl.cluster.learner_group import RayLearnerGroup, start_learners
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import EngineError
from agentrl.testing import FakeEngine
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport
from tests.algo_config import make_algo
from tests.unit.learner.megatron.models import EP, PP, make_model

pytestmark = [pytest.mark.usefixtures("forked_workers"), pytest.mark.long]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "deepseek_v3", "deepseek_v3")


@pytest.fixture(scope="module")
def group(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayLearnerGroup]:
    config = LearnerConfig(
        backend="megatron", precision="float32", ranks=4, device="cpu", threads=1, megatron=PP | EP, step_timeout_s=120
    )
    run = tmp_path_factory.mktemp("run")
    group = start_learners(model, config, make_algo(), seed=0, run_dir=run, cluster=RayRuntime(cpus=6))
    yield group
    group.close()


@pytest.mark.parametrize("transport", ["distributed", "tensor", "delta", "disk"])
def test_engines_get_all_weights_from_the_ranks_that_have_them(
    group: RayLearnerGroup, model: Path, tmp_path: Path, transport: str
) -> None:
    engines = [FakeEngine(0), FakeEngine(1, refuse="model.norm.weight")]
    sync = make_transport(transport, TransportOptions(20_000, tmp_path, check="checksum", timeout_s=60))

    async def play() -> None:
        with pytest.raises(EngineError, match="no parameter" if transport != "disk" else "HTTP 400"):
            await sync.sync_weights(group, engines, 1)
        engines[1].refuse = None
        for version in (2, 3):
            await sync.sync_weights(group, engines, version)
        await sync.aclose()

    asyncio.run(play())
    expected = {name: weight.tolist() for name, weight in load_file(model / "model.safetensors").items()}
    for engine in engines:
        assert engine.weights == expected
        assert engine.sampled_version == 3


def test_each_rank_sends(group: RayLearnerGroup) -> None:
    senders = [bucket.sender for bucket in group.buckets_by_sender(20_000)]
    assert {*senders} == {0, 1, 2, 3}
    assert len({*senders[:4]}) > 2, "they take turns"
    assert {bucket.sender for bucket in group.buckets(20_000)} == {0}
