"""What every engine does that shares its GPU in turns: memory given back, and taken again with new weights."""

from __future__ import annotations

import asyncio
from typing import Literal

import pytest
from conformance.engine import GREEDY, Engine, prompt, sample, until_sampling

from agentrl.core.errors import EngineError, SamplerError
from agentrl.core.types import FinishReason, Generation, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient


class Memory:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    def test_generations_wait_for_memory_and_new_weights(self, engine: Engine) -> None:
        """Twice, and giving back or taking again a second time changes nothing."""
        named = list(engine.other_model.state_dict().items())

        async def play(client: SGLangClient) -> list[Generation]:
            actual = []
            for version in (3, 4):
                running = asyncio.create_task(sample(client, prompt(60), SamplingParams(max_new_tokens=100), "running"))
                await until_sampling(client, [running])
                await client.memory.release()
                await client.memory.release()
                assert (await running).finish_reason is FinishReason.LENGTH
                late = asyncio.create_task(sample(client, prompt(61), GREEDY, "late"))
                assert await client.healthy()
                await client.memory.resume("weights")
                await client.memory.resume("weights")
                await client.updates.from_tensors(named[:3], version, last=False)
                await client.updates.from_tensors(named[3:], version, last=True)
                assert await client.version() == version
                assert await client.healthy()
                await asyncio.sleep(0.1)
                assert not late.done()
                await client.memory.resume("kv_cache")
                actual.append(await late)
            return actual

        for version, late in enumerate(engine.drive(play), 3):
            assert late.versions == ((0, version),)
            assert late.cached_tokens == 0
            engine.assert_matches(engine.other_model, prompt(61), late, 0.0)

    @pytest.mark.parametrize("mode", ["abort", "restart"])
    def test_generations_that_are_cut_go_on_with_the_new_weights(
        self, engine: Engine, mode: Literal["abort", "restart"]
    ) -> None:
        named = list(engine.model.state_dict().items())

        async def play(client: SGLangClient) -> list[Generation]:
            await client.updates.from_tensors(named, 7, last=True)
            many = SamplingParams(max_new_tokens=180, ignore_eos=True)
            running = [asyncio.create_task(sample(client, prompt(64), many, f"cut{number}")) for number in range(3)]
            await until_sampling(client, running)
            late = asyncio.create_task(sample(client, prompt(64), many, "late"))
            await asyncio.sleep(0)  # its request is on the way
            await client.memory.release(mode)
            assert client.unanswered == 0
            assert not any(row.done() for row in running)
            await client.memory.resume("weights")
            await client.updates.from_tensors(named, 8, last=True)
            await client.memory.resume("kv_cache")
            return await asyncio.gather(*running, late)

        actual = engine.drive(play)
        assert [len(row.token_ids) for row in actual] == [180] * 4
        versions = [[version for _, version in row.versions] for row in actual]
        assert versions[:3] == [[7, 8] if mode == "abort" else [8]] * 3
        assert versions[3][-1] == 8

    def test_without_new_weights_nothing_is_sampled(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> Generation:
            named = list(engine.model.state_dict().items())
            await client.memory.release()
            for use in (client.updates.from_tensors(named, 5, last=True), client.checksums()):
                with pytest.raises(EngineError, match="has released the memory of its weights"):
                    await use
            await client.memory.resume("weights")
            await client.memory.resume("kv_cache")
            with pytest.raises(
                SamplerError, match="has released the memory of its weights, and got no whole update since"
            ):
                await sample(client, prompt(62), GREEDY)
            await client.updates.from_tensors(named[:3], 5, last=False)
            await client.updates.cancel()
            with pytest.raises(SamplerError, match="it samples nothing"):
                await sample(client, prompt(62), GREEDY)
            await client.updates.from_tensors(named, 6, last=True)
            return await sample(client, prompt(62), GREEDY)

        engine.assert_matches(engine.model, prompt(62), engine.drive(play), 0.0)

    def test_a_paused_engine_keeps_its_memory(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> None:
            await client.pause("abort")
            with pytest.raises(EngineError, match="paused or gets weights"):
                await client.memory.release()
            await client.resume()
            await sample(client, prompt(63), GREEDY)

        engine.drive(play)
