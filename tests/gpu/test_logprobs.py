"""SmolLM2: after every kind of sync an engine in bfloat16 computes what the learner computes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from conformance.agreement import agreement, batch_of, sample_rows

from agentrl.learner.local import LocalLearnerGroup
from agentrl.sampler.client import SGLangClient
from agentrl.sampler.launch import EngineProcess
from agentrl.weights import make_sync

pytestmark = pytest.mark.gpu

MOST_KL = 1e-3
"""Per token, of the engine's distribution from the learner's."""
TOKENS = 64


async def after_syncs(
    client: SGLangClient,
    learner: LocalLearnerGroup,
    prompts: list[list[int]],
    figures: list[str],
    folder: Path,
    transport: str,
    first: int,
) -> None:
    """Twice: send, sample, compare, and learn from it."""
    sync = make_sync(
        transport, bucket_bytes=64 << 20, folder=folder, dtype="bfloat16", check="version", backend="nccl", timeout_s=60
    )
    try:
        for version in (first, first + 1):
            await sync.push(learner, [client], version)
            rows = await sample_rows(client, prompts, tokens=TOKENS, version=version)
            found = agreement(learner, rows)
            figures.append(f"log-probabilities after {transport}, version {version}: {found}")
            assert found.k3 < MOST_KL
            learner.train_step(batch_of(rows))
            changed = agreement(learner, rows)
            assert changed.k3 > 3 * found.k3, "so a sync that does nothing would be seen"
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
