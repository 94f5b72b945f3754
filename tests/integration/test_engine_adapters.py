"""The embedded engine with adapters of several policies; `tests/conformance` says what it must do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
import torch
from conformance.adapters import Adapters, Policies, two_policies
from requires import requires

from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.errors import EngineError
from agentrl.inference.base import LoraAdapter
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import launch_embedded

pytestmark = requires("peft")


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Policies]:
    with two_policies(tmp_path_factory.mktemp("policies")) as policies:
        yield policies


@pytest.fixture(scope="module")
def url(policies: Policies, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    log = tmp_path_factory.mktemp("engine") / "engine.log"
    process = launch_embedded(policies.folder, EmbeddedConfig(slots=16, context=512, threads=1), log=log)
    yield process.url
    process.stop()


class TestAdapters(Adapters):
    pass


LAYER = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.mark.parametrize(
    ("config", "tensors", "sums", "message"),
    [
        ({"r": 4}, {"lora_A.weight": (4, 48), "lora_B.weight": (96, 4)}, {}, "numbers r and lora_alpha"),
        ({"r": 4, "lora_alpha": 8}, {"lora_A.weight": (4, 48)}, {}, "not both of lora_A and lora_B"),
        ({"r": 4, "lora_alpha": 8}, {"lora_A.weight": (4, 47), "lora_B.weight": (96, 4)}, {}, "do not fit"),
        (
            {"r": 4, "lora_alpha": 8},
            {"lora_A.weight": (4, 48), "lora_B.weight": (96, 4)},
            {f"{LAYER}.lora_A.weight": "0"},
            "its checksum is not the expected one",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(config, tensors, sums, message, url):
    named = [(f"{LAYER}.{name}", torch.zeros(shape)) for name, shape in tensors.items()]

    async def play() -> None:
        client = SGLangClient(url, timeout_s=60)
        with pytest.raises(EngineError, match=message):
            await client.updates.from_adapters({"main": LoraAdapter(config, named, checksums=sums)}, 3)
        await client.aclose()

    asyncio.run(play())
