"""The embedded engine as a process: how it ends turns, and how it ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from deadlines import wait_until
from engine_tiny import save_model

from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.errors import EngineError, SamplerError
from agentrl.core.types import FinishReason, Prompt, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import launch_embedded
from agentrl.models.load import load_model


def test_the_models_own_end_token_ends_a_turn_and_a_broken_model_ends_the_engine(
    tmp_path: Path,
) -> None:
    folder = save_model(tmp_path / "model", end=17)
    broken = {name: tensor * float("nan") for name, tensor in load_model(folder).state_dict().items()}
    engine = launch_embedded(folder, EmbeddedConfig(slots=16, context=256, threads=1), log=tmp_path / "log", version=4)

    async def play() -> None:
        client = SGLangClient(engine.url, timeout_s=30)
        try:
            assert await client.version() == 4
            params = SamplingParams(max_new_tokens=200)
            turns = [client.generate(Prompt((5, at)), params, session_id="s", request_id=f"r{at}") for at in range(16)]
            for generation in await asyncio.gather(*turns):
                ends = [at for at, token in enumerate(generation.token_ids) if token == 17]
                stopped = generation.finish_reason is FinishReason.STOP
                assert ends == ([len(generation.token_ids) - 1] if stopped else [])
                assert generation.versions == ((0, 4),)
            engine.check()
            await client.updates.from_tensors(list(broken.items()), 5, last=True)
            with pytest.raises(SamplerError, match="logits are not finite"):
                await client.generate(Prompt((5,)), params, session_id="s", request_id="r")
        finally:
            await client.aclose()

    try:
        asyncio.run(play())
        wait_until(lambda: not engine.child.alive(), 20)
        with pytest.raises(EngineError, match=r"(?s)exit status 1.*logits are not finite"):
            engine.check()
    finally:
        engine.stop()
