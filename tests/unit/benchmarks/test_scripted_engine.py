"""The scripted engine: its HTTP replies are those of its sampler."""

import asyncio
from pathlib import Path

from aiohttp.test_utils import TestServer

from agentrl.core.types import FinishReason, Prompt, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient
from benchmarks.scripted_engine import ScriptedSampler, make_app


def test_a_reply_over_http_is_a_turn_of_the_sampler():
    sampler = ScriptedSampler(vocabulary=100, delay_s=0.0)

    async def sample():
        async with TestServer(make_app(sampler)) as server:
            client = SGLangClient(str(server.make_url("")))
            assert await client.healthy()
            params = SamplingParams(max_new_tokens=7)
            result = await client.generate(Prompt((1, 2, 3)), params, session_id="s", request_id="r")
            await client.aclose()
        return result

    result = asyncio.run(sample())
    assert (result.token_ids, result.logprobs) in sampler.outputs(7)
    assert (len(result.token_ids), result.finish_reason) == (7, FinishReason.LENGTH)
    assert max(result.token_ids) < 100


def test_turns_have_the_version_of_the_weights_that_were_sent_last():
    async def sample():
        async with TestServer(make_app(ScriptedSampler(vocabulary=100, delay_s=0.0))) as server:
            client = SGLangClient(str(server.make_url("")))
            await client.updates.from_disk(Path("weights"), 3)
            result = await client.generate(
                Prompt((1,)), SamplingParams(max_new_tokens=2), session_id="s", request_id="r"
            )
            await client.aclose()
        return result.versions

    assert asyncio.run(sample())[0][1] == 3
