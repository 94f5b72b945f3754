"""SmolLM2: after every kind of sync an engine in bfloat16 computes what the learner computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
from conformance.agreement import agreement, in_float32, local, sample_rows

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport

pytestmark = pytest.mark.gpu

MOST_KL = 1e-3
"""Per token, of the engine's distribution from that of a learner in float32. One under autocast rounds too, other numbers
than the engine: that is noted beside it.
"""
TOKENS = 128


@torch.no_grad()
def nudge(learner: LocalLearnerGroup, sign: int) -> None:
    """Change all weights by about as much as several values that bfloat16 has between them, or back again."""
    generator = torch.Generator().manual_seed(0)
    for tensor in map(local, learner.rank.model.parameters()):
        noise = torch.randn(tensor.shape, generator=generator).to(tensor.device)
        tensor += sign * 3e-3 * noise


async def after_syncs(
    client: SGLangClient,
    learner: LocalLearnerGroup,
    prompts: list[list[int]],
    figures: list[str],
    folder: Path,
    transport: str,
    first: int,
) -> None:
    """Twice: send, sample and compare; the second time with other weights."""
    sync = make_transport(
        transport,
        TransportOptions(
            bucket_bytes=64 << 20, folder=folder, dtype="bfloat16", check="version", backend="nccl", timeout_s=60
        ),
    )
    try:
        for version in (first, first + 1):
            await sync.sync_weights(learner, [client], version)
            rows = await sample_rows(client, prompts, tokens=TOKENS, version=version)
            rounded = agreement(learner, rows)
            with in_float32(learner):
                actual_agreement = agreement(learner, rows)
            figures.append(
                f"log-probabilities after {transport}, version {version}: {actual_agreement}; autocast: {rounded}"
            )
            assert actual_agreement.k3 < MOST_KL
            nudge(learner, 1 if version == first else -1)
            with in_float32(learner):
                changed = agreement(learner, rows)
            assert changed.k3 > 5 * actual_agreement.k3, "so a sync that does nothing would be seen"
    finally:
        await sync.aclose()


@pytest.mark.parametrize(("transport", "first"), [("ipc", 11), ("disk", 21), ("tensor", 31)])
def test_log_probabilities_agree_after_every_sync(
    near_engine: EngineProcess,
    learner: LocalLearnerGroup,
    prompts: list[list[int]],
    figures: list[str],
    tmp_path: Path,
    transport: str,
    first: int,
) -> None:
    async def run() -> None:
        client = SGLangClient(near_engine.url, timeout_s=120)
        try:
            await after_syncs(client, learner, prompts, figures, tmp_path, transport, first)
        finally:
            await client.aclose()

    asyncio.run(run())


def test_log_probabilities_agree_after_a_broadcast(
    far_engine: EngineProcess,
    learner: LocalLearnerGroup,
    prompts: list[list[int]],
    figures: list[str],
    tmp_path: Path,
) -> None:
    """Through NCCL, from one GPU to another."""

    async def run() -> None:
        client = SGLangClient(far_engine.url, timeout_s=120)
        try:
            await after_syncs(client, learner, prompts, figures, tmp_path, "distributed", 41)
        finally:
            await client.aclose()

    asyncio.run(run())
