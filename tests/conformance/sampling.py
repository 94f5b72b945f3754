"""What every engine does with a prompt: ids in and out, log-probabilities, stops and the prefix cache."""

from __future__ import annotations

import asyncio
import math
from typing import Literal

import numpy as np
import pytest
import torch
from conformance.engine import GREEDY, Engine, prompt, sample
from engine_tiny import make_tokenizer

from agentrl.core.types import FinishReason, Generation, SamplingParams
from agentrl.inference.client.sglang_client import SGLangClient


class Sampling:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    @pytest.mark.parametrize("temperature", [0.0, 0.5, 1.0, 1.7])
    def test_ids_in_ids_out_with_logprobs_at_the_temperature(self, engine: Engine, temperature: float) -> None:
        params = SamplingParams(max_new_tokens=24, temperature=temperature)
        generation = engine.drive(lambda client: sample(client, prompt(1), params))
        assert len(generation.token_ids) == 24
        assert generation.finish_reason is FinishReason.LENGTH
        assert generation.versions == ((0, 0),)
        engine.assert_matches(engine.model, prompt(1), generation, temperature)

    @pytest.mark.parametrize("params", [SamplingParams(max_new_tokens=40, top_k=2), SamplingParams(40, top_p=0.3)])
    def test_top_k_and_top_p_restrict_without_renormalising(self, engine: Engine, params: SamplingParams) -> None:
        generation = engine.drive(lambda client: sample(client, prompt(2), params))
        engine.assert_matches(engine.model, prompt(2), generation)
        ids = prompt(2) + list(generation.token_ids)
        with torch.no_grad():
            probabilities = engine.model(torch.tensor([ids])).logits[0].softmax(-1)
        doubt = math.exp(engine.traits.tolerance)
        for at, token in enumerate(generation.token_ids, len(prompt(2)) - 1):
            above = probabilities[at][probabilities[at] > probabilities[at, token] * doubt**2]
            assert len(above) < params.top_k if params.top_k > 0 else float(above.sum()) < params.top_p * doubt

    @pytest.mark.parametrize("mode", ["ids", "logprobs"])
    def test_supports_are_what_was_sampled_from(self, engine: Engine, mode: Literal["ids", "logprobs"]) -> None:
        params = SamplingParams(max_new_tokens=24, temperature=0.7, top_k=20, top_p=0.8, support=mode)
        generation = engine.drive(lambda client: sample(client, prompt(7), params))
        support, ids = generation.support, generation.token_ids
        assert support is not None
        assert support.contains(np.array(ids)).all()
        assert 1 < support.counts.max() <= 20
        with torch.no_grad():
            logits = engine.model(torch.tensor([prompt(7) + list(ids)])).logits[0].float() / 0.7
        doubt, offsets = math.exp(engine.traits.tolerance), support.offsets
        for at, (token, logprob) in enumerate(zip(ids, generation.logprobs, strict=True)):
            kept = torch.from_numpy(support.token_ids[offsets[at] : offsets[at + 1]]).long()
            token_logits = logits[len(prompt(7)) - 1 + at]
            logprobs = token_logits[kept].log_softmax(-1)
            engine.assert_close([logprob], [float(logprobs[kept == token])])
            if support.logprobs is not None:
                engine.assert_close(support.logprobs[offsets[at] : offsets[at + 1]], logprobs.numpy())
            probabilities = token_logits.softmax(-1)
            assert float(probabilities[kept].sum()) * doubt >= params.top_p or len(kept) == params.top_k
            assert float(probabilities[kept].min()) * doubt >= float(probabilities.sort().values[-len(kept)])
        assert (support.logprobs is None) == (mode == "ids")

    def test_greedy_is_the_same_alone_and_in_a_batch(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> list[Generation]:
            alone = await sample(client, prompt(3), GREEDY, "alone")
            samples = [sample(client, prompt(3 + index % 2), GREEDY, f"r{index}") for index in range(16)]
            return [alone, *(await asyncio.gather(*samples))[::2]]

        alone, *batch = engine.drive(play)
        for generation in batch:
            engine.assert_same(alone, generation)
            engine.assert_matches(engine.model, prompt(3), generation, 0.0)

    def test_a_request_with_a_seed_repeats_where_the_engine_says_so(self, engine: Engine) -> None:
        params = SamplingParams(max_new_tokens=24, seed=7)

        async def play(client: SGLangClient) -> list[Generation]:
            return [await sample(client, prompt(4), params, f"r{index}") for index in range(2)]

        first, second = engine.drive(play)
        assert (first.token_ids == second.token_ids) is engine.traits.seeds

    def test_a_stop_string_may_end_inside_a_token_and_ids_stay_whole(self, engine: Engine) -> None:
        tokenizer = make_tokenizer()

        async def play(client: SGLangClient) -> None:
            actual = 0
            for seed in range(20):
                if actual == 3:
                    break
                greedy = SamplingParams(max_new_tokens=40, temperature=0.0)
                free = await engine.sample_greedily(client, prompt(seed), greedy)
                texts = [str(tokenizer.decode([token])) for token in free.token_ids]
                for at, text in enumerate(texts):
                    stop = text[:-1]
                    if at < 2 or len(stop) < 2 or not text.isascii() or any(stop in earlier for earlier in texts[:at]):
                        continue
                    if stop in "".join(texts[:at]):
                        continue
                    params = SamplingParams(max_new_tokens=40, temperature=0.0, stop=("never in there", stop))
                    stopped = await sample(client, prompt(seed), params)
                    assert stopped.token_ids == free.token_ids[: at + 1]
                    assert stopped.finish_reason is FinishReason.STOP
                    actual += 1
                    break
            assert actual == 3

        engine.drive(play)

    def test_a_stop_string_is_cut_from_the_text_alone(self, engine: Engine) -> None:
        ids = prompt(5)
        body = {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 40}}
        engine.post("/generate", body)  # so that the prompt is cached for all that follow
        text = engine.post("/generate", body).json()["text"]
        at = next(at for at in range(5, 40) if text[at : at + 2].isascii() and text.index(text[at : at + 2]) == at)
        stop = text[at : at + 2]
        params = {"temperature": 0, "max_new_tokens": 40, "stop": stop, "skip_special_tokens": False}
        cut = engine.post("/generate", {"input_ids": ids, "sampling_params": params}).json()
        reply = engine.post("/generate", {"input_ids": ids, "sampling_params": {**params, "no_stop_trim": True}}).json()
        assert cut["output_ids"] == reply["output_ids"]
        assert cut["text"] == text[:at]
        assert reply["text"].startswith(text[: at + 2])
        assert cut["meta_info"]["finish_reason"] == {"type": "stop", "matched": stop}

    def test_a_stop_token_ends_the_turn_and_stays(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> tuple[Generation, Generation]:
            free = await engine.sample_greedily(client, prompt(6), GREEDY)
            params = SamplingParams(max_new_tokens=24, temperature=0.0, stop_token_ids=(free.token_ids[5],))
            return free, await sample(client, prompt(6), params)

        free, stopped = engine.drive(play)
        at = free.token_ids.index(free.token_ids[5])
        assert stopped.token_ids == free.token_ids[: at + 1]
        assert stopped.finish_reason is FinishReason.STOP

    def test_no_token_ends_a_turn_with_ignore_eos(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> tuple[Generation, Generation]:
            free = await engine.sample_greedily(client, prompt(6), GREEDY)
            params = SamplingParams(
                max_new_tokens=40, temperature=0.0, stop_token_ids=(free.token_ids[5],), ignore_eos=True
            )
            return free, await sample(client, prompt(6), params)

        free, full_generation = engine.drive(play)
        assert full_generation.token_ids[: len(free.token_ids)] == free.token_ids
        assert (len(full_generation.token_ids), full_generation.finish_reason) == (40, FinishReason.LENGTH)

    def test_later_turns_find_their_prefix_cached(self, engine: Engine) -> None:
        async def play(client: SGLangClient) -> None:
            await client.flush()
            ids = prompt(7, 60)
            first = await sample(client, ids, GREEDY)
            assert first.cached_tokens == 0
            longer = ids + list(first.token_ids) + prompt(8, 10)
            second = await sample(client, longer, GREEDY)
            assert second.cached_tokens >= len(ids) + len(first.token_ids) - 1
            engine.assert_matches(engine.model, longer, second, 0.0)
            other_reply = await sample(client, [*ids[:40], *prompt(9, 20)], GREEDY)
            assert other_reply.cached_tokens >= 40
            await client.flush()
            assert (await sample(client, longer, GREEDY)).cached_tokens == 0

        engine.drive(play)
