"""One engine and one learner in turns: what is computed stays the same, whatever gave its memory back in between."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from conformance.agreement import OneEngine, agreement, batch_of, sample_rows
from engine_tiny import save_model

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.errors import LearnerError
from agentrl.core.types import Prompt, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import launch_embedded
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.obs.progress import Stopwatch
from agentrl.train.engine_weights import GpuTimeSharing
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport
from tests.algo_config import make_algo

PROMPTS = [[random.Random(number // 2).randrange(2, 384) for _ in range(30)] for number in range(8)]


@pytest.mark.parametrize("transport", ["tensor", "disk"])
def test_engine_and_learner_agree_turn_by_turn(tmp_path: Path, transport: str) -> None:
    """After every turn log-probabilities agree to 1e-4; before, those of the step before do not."""
    folder = save_model(tmp_path / "model")
    config = LearnerConfig(precision="float32", device="cpu", threads=1, optimizer=OptimizerConfig(lr=1e-2))
    learner = LocalLearnerGroup(folder, config, make_algo(), seed=0)
    engine = launch_embedded(folder, EmbeddedConfig(slots=16, context=256, threads=1), log=tmp_path / "log")

    async def run() -> None:
        client = SGLangClient(engine.url, timeout_s=60)
        fleet: Any = OneEngine(client)
        sharing, watch = GpuTimeSharing(fleet), Stopwatch()
        sync = make_transport(
            transport, TransportOptions(bucket_bytes=40_000, folder=tmp_path / "weights", check="checksum")
        )
        rows = await sample_rows(client, PROMPTS, tokens=16, version=0)
        try:
            for version in (1, 2):
                await sharing.switch_to_learner(learner, watch)
                late = asyncio.ensure_future(sample_rows(client, PROMPTS[:1], tokens=4, version=version))
                await asyncio.sleep(0.1)
                assert not late.done(), "an engine without memory samples nothing"
                learner.train_step(batch_of(rows))
                await sharing.switch_to_engines(
                    learner, lambda version=version: sync.sync_weights(learner, [client], version), watch
                )
                await late
                with pytest.raises(LearnerError, match="sleep"):
                    learner.train_step(batch_of(rows))
                state_before, rows = rows, await sample_rows(client, PROMPTS, tokens=16, version=version)
                learner.wake()
                assert agreement(learner, rows).largest < 1e-4
                assert agreement(learner, state_before).largest > 1e-2
                learner.sleep()
            await sync.sync_weights(learner, [client], 3)  # as after a restart: the learner sleeps
            reply = await client.generate(Prompt((5, 6)), SamplingParams(4), session_id="s", request_id="r")
            assert reply.versions == ((0, 3),)
        finally:
            await sync.aclose()
            await client.aclose()

    try:
        asyncio.run(run())
    finally:
        engine.stop()
        learner.close()
