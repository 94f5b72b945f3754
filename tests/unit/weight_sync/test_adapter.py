"""Sync of LoRA adapters alone, from a learner into engines, both fakes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from agentrl.config.learner import LoraConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError, EngineError, LearnerError
from agentrl.models.weight_checksum import raw_bytes
from agentrl.testing import FakeEngine, FakeLearner
from agentrl.weight_sync.adapter import AdapterSync, with_adapters
from tests.unit.learner.learners import make_model

LAYER = "base_model.model.model.layers.0.mlp"
CONFIG = LoraConfig(rank=2, alpha=8)


def learner_of(*layers: str, policies: Sequence[str] = ("main",)) -> FakeLearner:
    """A learner with adapters of ``layers``, which hold the length of their policy's name."""
    names = [f"{LAYER}.{layer}.lora_{matrix}.weight" for layer in layers for matrix in "AB"]
    adapters = {policy: {name: torch.full((2, 2), float(len(policy))) for name in names} for policy in policies}
    return FakeLearner(adapters=adapters)


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_engines_get_the_adapters_as_peft_describes_them(dtype: str | None) -> None:
    engines = [FakeEngine(ranks=2), FakeEngine(ranks=2)]
    sync = AdapterSync(CONFIG, dtype=dtype, check="checksum")
    asyncio.run(sync.sync_weights(learner_of("down_proj", "gate_proj", "up_proj"), engines, 3))
    for engine in engines:
        adapter = engine.adapters["main"]
        assert engine.sampled_version == 3
        assert adapter.ranks == 2
        assert len(adapter.tensors) == 6
        expected = {"r": 2, "lora_alpha": 8, "target_modules": ["down_proj", "gate_proj", "up_proj"]}
        assert adapter.config.items() >= expected.items()
        for name, tensor in adapter.tensors:
            assert tensor.dtype is getattr(torch, dtype or "float32")
            assert adapter.checksums[name] == hashlib.sha256(raw_bytes(tensor)).hexdigest()


def test_engines_get_the_adapters_of_all_policies(tmp_path: Path) -> None:
    config, engine = LoraConfig(rank=2, policies=["first", "second"]), FakeEngine()
    learner = learner_of("down_proj", policies=["main", "first", "second"])
    sent = asyncio.run(AdapterSync(config).sync_weights(learner, [engine], 3))
    assert sent.bytes == 2 * 2 * 4 * 4
    assert sent.fingerprint != asyncio.run(AdapterSync(CONFIG).sync_weights(learner, [engine], 3)).fingerprint
    asyncio.run(AdapterSync(config).sync_weights(learner, [engine], 3))
    assert {name: float(adapter.tensors[0][1][0, 0]) for name, adapter in engine.adapters.items()} == {
        "first": 5,
        "second": 6,
    }
    assert [*engine.adapters] == ["first", "second"]
    made = with_adapters(SamplerConfig(), config, make_model(tmp_path / "model"))
    assert made.sglang["max_loras_per_batch"] == 4


def test_an_engine_that_refuses_is_named() -> None:
    engines = [FakeEngine(), FakeEngine(refuse="any")]
    with pytest.raises(EngineError, match=r"engine 1 of 2, adapters of version 3: HTTP 400: no adapters"):
        asyncio.run(AdapterSync(CONFIG).sync_weights(learner_of("down_proj"), engines, 3))


def test_a_learner_without_adapters_sends_nothing() -> None:
    engine = FakeEngine()
    with pytest.raises(LearnerError, match=r"no adapters; set weights\.adapters=merged"):
        asyncio.run(AdapterSync(CONFIG).sync_weights(learner_of(), [engine], 3))
    assert engine.adapters == {}


def test_an_engine_of_another_version_is_named() -> None:
    engine = FakeEngine(stuck=True)
    with pytest.raises(EngineError, match="samples with version 0, but 3 was sent"):
        asyncio.run(AdapterSync(CONFIG).sync_weights(learner_of("down_proj"), [engine], 3))
    asyncio.run(AdapterSync(CONFIG, check="none").sync_weights(learner_of("down_proj"), [engine], 3))


def test_part_of_the_layers_that_sglang_joins_is_refused(tmp_path: Path) -> None:
    """SGLang would leave them out, or read them as others."""
    with pytest.raises(
        ConfigError, match=r"gate_proj has an adapter and \S+\.up_proj has none.*weights\.adapters=merged"
    ):
        asyncio.run(AdapterSync(CONFIG).sync_weights(learner_of("down_proj", "gate_proj"), [FakeEngine()], 3))
    folder = make_model(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"v_proj has an adapter and \S+\.q_proj has none"):
        with_adapters(SamplerConfig(), LoraConfig(target=["*.v_proj"]), folder)


def test_started_engines_have_room_for_the_adapters(tmp_path: Path) -> None:
    folder = make_model(tmp_path / "model")
    sampler = SamplerConfig(sglang={"max-lora-rank": 64, "tp_size": 2})
    sglang = with_adapters(sampler, LoraConfig(rank=8, target=["*.self_attn.*"]), folder).sglang
    assert sglang == {
        "max-lora-rank": 64,
        "tp_size": 2,
        "enable_lora": True,
        "lora_target_modules": ["k_proj", "o_proj", "q_proj", "v_proj"],
        "max_loras_per_batch": 2,
        "lora_strict_loading": True,
    }
