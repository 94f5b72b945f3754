"""Weights of both learners, of a dense model and of one with experts: after a sync an engine computes what they compute."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from conformance.agreement import agreement, local, sample_rows

from agentrl.config.learner import LearnerConfig
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport
from tests.algo_config import make_algo

pytestmark = pytest.mark.gpu

Backend = Literal["fsdp", "megatron"]
MOST_KL = {"dense": 1e-3, "experts": 2e-3}
"""Per token; see `tests.gpu.test_logprobs`. A rounded router may choose another expert."""


def parameters(learner: LocalLearnerGroup) -> list[torch.Tensor]:
    rank: Any = learner.rank
    models = rank.trained.model.chunks if hasattr(rank, "trained") else [rank.model]
    return [local(parameter) for model in models for parameter in model.parameters()]


@torch.no_grad()
def round_weights(learner: LocalLearnerGroup) -> None:
    """Let a learner in float32 have weights that an engine in bfloat16 has."""
    for parameter in parameters(learner):
        parameter.copy_(parameter.bfloat16())


@contextmanager
def nudged(learner: LocalLearnerGroup) -> Iterator[None]:
    """Change all weights by about as much as several values that bfloat16 has between them."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        weights_before = [(parameter, parameter.clone()) for parameter in parameters(learner)]
        for parameter, _ in weights_before:
            parameter += 3e-3 * torch.randn(parameter.shape, generator=generator).to(parameter.device)
    yield
    with torch.no_grad():
        for parameter, state_before in weights_before:
            parameter.copy_(state_before)


async def syncs(url: str, learner: LocalLearnerGroup, prompts: list[list[int]], most: float, first: int) -> list[str]:
    """Send and compare, twice; the second time with other weights."""
    client, report = SGLangClient(url, timeout_s=120), []
    sync = make_transport(
        "ipc", TransportOptions(bucket_bytes=64 << 20, folder=Path(), dtype="bfloat16", check="version", timeout_s=60)
    )
    try:
        for version in (first, first + 1):
            round_weights(learner)
            await sync.sync_weights(learner, [client], version)
            rows = await sample_rows(client, prompts, tokens=128, version=version)
            actual_agreement = agreement(learner, rows)
            report.append(f"version {version}: {actual_agreement}")
            assert actual_agreement.k3 < most
            with nudged(learner):
                assert agreement(learner, rows).k3 > 5 * actual_agreement.k3, (
                    "so a sync that does nothing would be seen"
                )
            with torch.no_grad():
                for parameter in parameters(learner):
                    parameter *= 1.01
    finally:
        await sync.aclose()
        await client.aclose()
    return report


def check(
    folder: Path, engine: EngineProcess, backend: Backend, kind: str, prompts: list[list[int]], first: int
) -> str:
    config = LearnerConfig(device="cuda", precision="float32", backend=backend)
    learner = LocalLearnerGroup(folder, config, make_algo(), seed=0)
    try:
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("highest")
        result = asyncio.run(syncs(engine.url, learner, prompts, MOST_KL[kind], first))
        torch.set_float32_matmul_precision(precision)
    finally:
        learner.close()
    return f"{backend}, {kind}: {'; '.join(result)}"


@pytest.mark.parametrize(("backend", "first"), [("fsdp", 61), ("megatron", 71)])
def test_an_engine_agrees_with_a_dense_model(
    smollm2: Path,
    near_engine: EngineProcess,
    prompts: list[list[int]],
    figures: list[str],
    backend: Backend,
    first: int,
) -> None:
    figures.append(check(smollm2, near_engine, backend, "dense", prompts, first))


@pytest.mark.parametrize(("backend", "first"), [("fsdp", 81), ("megatron", 91)])
def test_an_engine_agrees_with_experts(
    moe_engine: tuple[Path, EngineProcess],
    prompts: list[list[int]],
    figures: list[str],
    backend: Backend,
    first: int,
) -> None:
    """Qwen3-MoE with random weights: the engine's fused experts are those of either learner."""
    figures.append(check(*moe_engine, backend, "experts", prompts, first))
