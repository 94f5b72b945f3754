"""Sync of LoRA adapters alone, from a learner into engines, both fakes."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from agentrl.config.learner import LoraConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError, EngineError, LearnerError
from agentrl.inference.base import LoraAdapter
from agentrl.models.weight_checksum import raw_bytes
from agentrl.weight_sync.adapter import AdapterSync, with_adapters
from tests.unit.learner.learners import make_model

LAYER = "base_model.model.model.layers.0.mlp"
CONFIG = LoraConfig(rank=2, alpha=8)


class Learner:
    """Has adapters of ``layers``."""

    def __init__(self, *layers: str) -> None:
        self.layers = layers

    def adapters(self, dtype: str | None = None, policy: str = "main") -> list[tuple[str, torch.Tensor]]:
        names = [f"{LAYER}.{layer}.lora_{matrix}.weight" for layer in self.layers for matrix in "AB"]
        return [(name, torch.full((2, 2), len(policy), dtype=getattr(torch, dtype or "float32"))) for name in names]


class Engine:
    """Of two ranks."""

    def __init__(self, *, refuse: bool = False) -> None:
        self.updates = self.groups = self
        self.refuse = refuse
        self.found: LoraAdapter | None = None
        self.all: Mapping[str, LoraAdapter] = {}
        self.now = 0

    async def ranks(self) -> int:
        return 2

    async def from_adapters(self, adapters: Mapping[str, LoraAdapter], version: int) -> None:
        await asyncio.sleep(0)
        if self.refuse:
            raise EngineError("HTTP 400: LoRA is not enabled")
        self.all, self.now = adapters, version
        self.found = next(iter(adapters.values()))

    async def version(self) -> int:
        return self.now


@pytest.mark.parametrize("dtype", ["bfloat16", None])
def test_engines_get_the_adapters_as_peft_describes_them(dtype: str | None) -> None:
    engines = [Engine(), Engine()]
    sync = AdapterSync(CONFIG, dtype=dtype, check="checksum")
    asyncio.run(sync.sync_weights(Learner("down_proj", "gate_proj", "up_proj"), engines, 3))
    for engine in engines:
        assert engine.now == 3
        assert engine.found.ranks == 2
        assert len(engine.found.tensors) == 6
        expected = {"r": 2, "lora_alpha": 8, "target_modules": ["down_proj", "gate_proj", "up_proj"]}
        assert engine.found.config.items() >= expected.items()
        for name, tensor in engine.found.tensors:
            assert tensor.dtype is getattr(torch, dtype or "float32")
            assert engine.found.checksums[name] == hashlib.sha256(raw_bytes(tensor)).hexdigest()


def test_engines_get_the_adapters_of_all_policies(tmp_path: Path) -> None:
    config, engine = LoraConfig(rank=2, policies=["first", "second"]), Engine()
    sent = asyncio.run(AdapterSync(config).sync_weights(Learner("down_proj"), [engine], 3))
    assert sent.bytes == 2 * 2 * 4 * 4
    assert (
        sent.fingerprint != asyncio.run(AdapterSync(CONFIG).sync_weights(Learner("down_proj"), [engine], 3)).fingerprint
    )
    asyncio.run(AdapterSync(config).sync_weights(Learner("down_proj"), [engine], 3))
    assert {name: float(adapter.tensors[0][1][0, 0]) for name, adapter in engine.all.items()} == {
        "first": 5,
        "second": 6,
    }
    assert [*engine.all] == ["first", "second"]
    made = with_adapters(SamplerConfig(), config, make_model(tmp_path / "model"))
    assert made.sglang["max_loras_per_batch"] == 4


def test_an_engine_that_refuses_is_named() -> None:
    with pytest.raises(EngineError, match=r"engine 1 of 2, adapters of version 3: HTTP 400: LoRA is not enabled"):
        asyncio.run(AdapterSync(CONFIG).sync_weights(Learner("down_proj"), [Engine(), Engine(refuse=True)], 3))


def test_a_learner_without_adapters_sends_nothing() -> None:
    engine = Engine()
    with pytest.raises(LearnerError, match=r"no adapters; set weights\.adapters=merged"):
        asyncio.run(AdapterSync(CONFIG).sync_weights(Learner(), [engine], 3))
    assert engine.found is None


def test_an_engine_of_another_version_is_named() -> None:
    engine = Engine()
    engine.version = lambda: asyncio.sleep(0, 2)  # type: ignore[method-assign]
    with pytest.raises(EngineError, match="samples with version 2, but 3 was sent"):
        asyncio.run(AdapterSync(CONFIG).sync_weights(Learner("down_proj"), [engine], 3))
    asyncio.run(AdapterSync(CONFIG, check="none").sync_weights(Learner("down_proj"), [engine], 3))


def test_part_of_the_layers_that_sglang_joins_is_refused(tmp_path: Path) -> None:
    """SGLang would leave them out, or read them as others."""
    with pytest.raises(
        ConfigError, match=r"gate_proj has an adapter and \S+\.up_proj has none.*weights\.adapters=merged"
    ):
        asyncio.run(AdapterSync(CONFIG).sync_weights(Learner("down_proj", "gate_proj"), [Engine()], 3))
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
