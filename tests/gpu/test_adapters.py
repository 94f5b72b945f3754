"""SmolLM2 with LoRA: after a sync of adapters alone an engine in bfloat16 computes what the learner computes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from conformance.agreement import agreement, in_float32, local, sample_rows

from agentrl.config.learner import LearnerConfig, LoraConfig, OptimizerConfig
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.weight_sync.adapter import AdapterSync
from tests.algo_config import make_algo

pytestmark = pytest.mark.gpu

MOST_KL = 1e-3
"""Per token; see `tests.gpu.test_logprobs`."""


@pytest.fixture(scope="module")
def adapted(smollm2: Path, lora: LoraConfig) -> Iterator[LocalLearnerGroup]:
    config = LearnerConfig(device="cuda", precision="bfloat16", lora=lora, optimizer=OptimizerConfig(lr=3e-4))
    learner = LocalLearnerGroup(smollm2, config, make_algo(), seed=0)
    yield learner
    learner.close()


@torch.no_grad()
def nudge(learner: LocalLearnerGroup) -> None:
    """Change the adapters, whose products begin as zeros."""
    generator = torch.Generator().manual_seed(0)
    for name, adapter in learner.rank.merged.adapters.items():
        if ".lora_B." in name:
            weight = local(adapter)
            weight += 0.02 * torch.randn(weight.shape, generator=generator).to(weight.device)


def test_log_probabilities_agree_after_every_sync_of_adapters(
    adapter_engine: EngineProcess,
    adapted: LocalLearnerGroup,
    lora: LoraConfig,
    prompts: list[list[int]],
    figures: list[str],
) -> None:
    async def run() -> None:
        client, sync = (
            SGLangClient(adapter_engine.url, timeout_s=120),
            AdapterSync(lora, dtype="bfloat16", check="checksum"),
        )
        for version in (51, 52, 53):
            begun = time.perf_counter()
            await sync.sync_weights(adapted, [client], version)
            seconds = time.perf_counter() - begun
            rows = await sample_rows(client, prompts, tokens=128, version=version)
            with in_float32(adapted):
                actual_agreement = agreement(adapted, rows)
            figures.append(
                f"log-probabilities after adapters, version {version}: {actual_agreement}; sync {seconds:.2f} s"
            )
            assert actual_agreement.k3 < MOST_KL
            nudge(adapted)
            with in_float32(adapted):
                changed = agreement(adapted, rows)
            assert changed.k3 > 5 * actual_agreement.k3, "so a sync that does nothing would be seen"
        await client.aclose()

    asyncio.run(run())
