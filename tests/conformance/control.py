"""What every engine does with many requests at once, with those it is to stop, and with bad ones."""

from __future__ import annotations

import asyncio

import pytest
from conformance.engine import GREEDY, Engine, prompt, sample, until_sampling

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.client.control import EngineLoad
from agentrl.inference.client.sglang_client import SGLangClient


class Control:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    def test_an_aborted_request_keeps_its_tokens(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> Generation:
            params = SamplingParams(max_new_tokens=160)
            task = asyncio.create_task(sample(client, prompt(10, 20), params, "long"))
            other_task = asyncio.create_task(sample(client, prompt(11, 20), params, "longer"))
            await until_sampling(client, [task, other_task])
            await client.abort("long")
            assert len((await other_task).token_ids) == 160, "an id that begins like the aborted one is another"
            return await task

        generation = engine.drive(play)
        assert generation.finish_reason is FinishReason.ABORT
        assert len(generation.token_ids) < 160
        engine.assert_matches(engine.model, prompt(10, 20), generation)

    def test_a_caller_that_goes_away_frees_its_place(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> None:
            tasks = [
                asyncio.create_task(
                    sample(client, prompt(100 + index, 20), SamplingParams(max_new_tokens=480), f"r{index}")
                )
                for index in range(80)
            ]
            await asyncio.sleep(0.1)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            # Without a free place, 80 requests of 480 tokens would stand before this one and outlast the pause's drain.
            await client.updates.from_disk(engine.other, 1)
            assert (await sample(client, prompt(12), GREEDY)).versions == ((0, 1),)

        engine.drive(play)

    def test_requests_in_progress_are_in_its_load(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> EngineLoad:
            params = SamplingParams(max_new_tokens=240)
            tasks = [asyncio.create_task(sample(client, prompt(30 + index), params, f"r{index}")) for index in range(3)]
            load = await until_sampling(client, tasks)
            await asyncio.gather(*(client.abort(f"r{index}") for index in range(3)), *tasks)
            return load

        load = engine.drive(play)
        assert (load.running, load.waiting, load.retracted) == (3, 0, 0)
        assert 0 < load.used_share < 1

    @pytest.mark.parametrize("mode", ["abort", "retract", "in_place"])
    def test_paused_requests_end_as_if_nothing_had_been(self, engine: Engine, mode: str) -> None:
        params = SamplingParams(max_new_tokens=200, temperature=0.0)
        prompts = [prompt(20 + index) for index in range(3)]

        async def play(client: SGLangClient) -> list[Generation]:
            if not engine.undisturbed:
                undisturbed = await asyncio.gather(*(sample(client, ids, params, f"u{ids[0]}") for ids in prompts))
                engine.undisturbed.update(zip(map(tuple, prompts), undisturbed, strict=True))
            tasks = [asyncio.create_task(sample(client, ids, params, f"r{index}")) for index, ids in enumerate(prompts)]
            await until_sampling(client, tasks)
            await client.pause(mode)
            await asyncio.sleep(0.3)
            assert not any(task.done() for task in tasks)
            await client.resume()
            return await asyncio.gather(*tasks)

        for ids, generation in zip(prompts, engine.drive(play), strict=True):
            engine.assert_same(engine.undisturbed[tuple(ids)], generation)
            engine.assert_matches(engine.model, ids, generation, 0.0)

    def test_bad_requests_are_refused_in_the_engines_words(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> None:
            with pytest.raises(SamplerError, match=r"600.*longer than the model's context"):
                await sample(client, prompt(60, 600), GREEDY)
            with pytest.raises(SamplerError, match="temperature"):
                await sample(client, prompt(60), SamplingParams(temperature=-1.0))
            with pytest.raises(SamplerError, match="policy='other'"):
                await client.generate(Prompt((5,)), GREEDY, session_id="s", request_id="r", policy="other")
            assert len((await sample(client, prompt(60), GREEDY)).token_ids) == GREEDY.max_new_tokens

        engine.drive(play)

    def test_the_context_limits_what_is_sampled(self, engine: Engine) -> None:
        params = SamplingParams(max_new_tokens=100)
        with pytest.raises(SamplerError, match=r"maximum context length of 512 tokens.*600 tokens"):
            engine.drive(lambda client: sample(client, prompt(61, 500), params))

    @pytest.mark.parametrize("answer", [1, 9])
    def test_what_fits_max_tokens_is_sampled_as_a_whole(self, engine: Engine, answer: int) -> None:
        async def play(client: SGLangClient) -> None:
            most = await client.max_tokens()
            assert 500 < most <= 512
            params = SamplingParams(max_new_tokens=answer, ignore_eos=True)
            generation = await sample(client, prompt(62, most - answer), params)
            assert generation.finish_reason is FinishReason.LENGTH
            assert len(generation.token_ids) == answer

        engine.drive(play)

    def test_a_batch_of_prompts_in_one_request(self, engine: Engine) -> None:
        body = {
            "input_ids": [prompt(70), prompt(71)],
            "sampling_params": [{"temperature": 0, "max_new_tokens": 5}, {"temperature": 0, "max_new_tokens": 7}],
            "return_logprob": True,
            "rid": ["a", "b"],
        }
        first, second = engine.post("/generate", body).json()
        assert [first["meta_info"]["id"], second["meta_info"]["id"]] == ["a", "b"]
        assert [first["meta_info"]["completion_tokens"], second["meta_info"]["completion_tokens"]] == [5, 7]
        assert [entry[1] for entry in second["meta_info"]["output_token_logprobs"]] == second["output_ids"]
        assert second["meta_info"]["prompt_tokens"] == 30

    def test_300_concurrent_requests(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> list[Generation]:
            shared = prompt(80, 20)
            calls = (
                sample(client, shared + prompt(index, 10), SamplingParams(12), f"r{index}") for index in range(300)
            )
            return await asyncio.gather(*calls)

        generations = engine.drive(play)
        assert {len(generation.token_ids) for generation in generations} == {12}
        for index in range(0, 300, 25):
            engine.assert_matches(engine.model, prompt(80, 20) + prompt(index, 10), generations[index])
