"""SmolLM2: learner and engine have one GPU in sharing. After the other tests, which use the GPU too."""

from __future__ import annotations

import asyncio
import gc
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from conformance.agreement import OneEngine, agreement, batch_of, in_float32, sample_rows

from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.obs.progress import Stopwatch
from agentrl.train.engine_weights import GpuTimeSharing
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport

pytestmark = pytest.mark.gpu

_log = logging.getLogger(__name__)
MOST_KL = 1e-3
TOKENS = 64


def held_by_others(learner: LocalLearnerGroup) -> int:
    """Return the bytes of this process's tensors on the GPU, of other tests, that are not what an awake learner offloads."""
    gc.collect()
    torch.cuda.ipc_collect()
    with torch.no_grad():
        own_bytes = sum(tensor.untyped_storage().nbytes() for tensor in learner.rank._state())
    return torch.cuda.memory_allocated() - own_bytes


def test_learner_and_engine_have_the_gpu_in_turns(
    near_engine: EngineProcess,
    learner: LocalLearnerGroup,
    prompts: list[list[int]],
    figures: list[str],
    tmp_path: Path,
) -> None:
    """Whoever does not work holds next to nothing; an engine that lost its weights gets them from a learner that sleeps."""

    async def run() -> None:
        client = SGLangClient(near_engine.url, timeout_s=120)
        fleet: Any = OneEngine(client)
        sharing, watch = GpuTimeSharing(fleet), Stopwatch()
        ipc = make_transport("ipc", TransportOptions(bucket_bytes=64 << 20, folder=tmp_path, dtype="bfloat16"))
        tensor = make_transport("tensor", TransportOptions(bucket_bytes=64 << 20, folder=tmp_path, dtype="bfloat16"))
        try:
            _log.warning("sync and sample")
            other_bytes = held_by_others(learner)
            await ipc.sync_weights(learner, [client], 50)
            rows = await sample_rows(client, prompts, tokens=TOKENS, version=50)
            learner.sleep()
            remaining_bytes, free = torch.cuda.memory_allocated() - other_bytes, torch.cuda.mem_get_info()[0]
            await client.memory.release()
            freed_bytes = torch.cuda.mem_get_info()[0] - free
            figures.append(
                f"the engine gave {freed_bytes >> 20} MiB back, the learner kept {remaining_bytes >> 20} MiB"
            )
            assert remaining_bytes < 200 << 20
            assert freed_bytes > 1 << 30
            for version in (51, 52):
                _log.warning("train to version %d", version)
                await sharing.switch_to_learner(learner, watch)
                learner.train_step(batch_of(rows))
                await sharing.switch_to_engines(
                    learner, lambda version=version: ipc.sync_weights(learner, [client], version), watch
                )
                rows = await sample_rows(client, prompts, tokens=TOKENS, version=version)
                await sharing.switch_to_learner(learner, watch)
                with in_float32(learner):
                    actual_agreement = agreement(learner, rows)
                figures.append(f"log-probabilities after turn {version}: {actual_agreement}")
                assert actual_agreement.k3 < MOST_KL
            _log.warning("tensors of a sleeping learner")
            await sharing.switch_to_engines(learner, lambda: ipc.sync_weights(learner, [client], 52), watch)
            await tensor.sync_weights(learner, [client], 53)
            rows = await sample_rows(client, prompts, tokens=TOKENS, version=53)
            await sharing.switch_to_learner(learner, watch)
            with in_float32(learner):
                actual_agreement = agreement(learner, rows)
            figures.append(f"log-probabilities after tensors of a sleeping learner: {actual_agreement}")
            assert actual_agreement.k3 < MOST_KL
            await sharing.switch_to_engines(learner, lambda: ipc.sync_weights(learner, [client], 54), watch)
            figures.append(f"seconds of 4 turns: {watch.metrics()}")
        finally:
            learner.wake()
            await ipc.aclose()
            await client.aclose()

    asyncio.run(run())
