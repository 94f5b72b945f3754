"""What every engine does with a prompt to score: a teacher's log-probabilities of given tokens."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

import pytest
from conformance.engine import GREEDY, Engine, prompt, sample
from engine_tiny import reference_logprobs

from agentrl.core.errors import EngineError
from agentrl.inference.client.scoring import ScoringClient
from agentrl.inference.client.sglang_client import SGLangClient

T = TypeVar("T")


class Scoring:
    """The tests of this module; a subclass named ``Test…`` runs them against its module's ``engine``."""

    def score(self, engine: Engine, play: Callable[[ScoringClient], Awaitable[T]]) -> T:
        async def session() -> T:
            client = ScoringClient(engine.url, "teacher 'a'", timeout_s=60, vocabulary_size=384)
            try:
                return await play(client)
            finally:
                await client.aclose()

        return asyncio.run(session())

    @pytest.mark.parametrize("start", [1, 17, 39])
    def test_tokens_are_scored_at_temperature_1_whatever_is_cached(self, engine: Engine, start: int) -> None:
        ids = [*prompt(31, 39), 383]  # the last one of the vocabulary

        async def play(client: ScoringClient) -> None:
            for _ in range(2):
                actual = await client.score(ids, start)
                engine.assert_close(actual, reference_logprobs(engine.model, ids[:start], ids[start:]))

        self.score(engine, play)

    def test_prompts_are_scored_beside_others_that_share_them_and_generations(self, engine: Engine) -> None:
        ids = prompt(32, 200)
        ends = range(60, 201, 20)

        async def play(client: SGLangClient) -> None:
            scorer = ScoringClient(engine.url, "teacher 'a'", timeout_s=60, vocabulary_size=384)
            sampled = [sample(client, ids[:end], GREEDY, f"s{end}") for end in ends]
            scored = [scorer.score(ids[:end], 1 + end // 2) for end in ends]
            generations, scores = await asyncio.gather(asyncio.gather(*sampled), asyncio.gather(*scored))
            await scorer.aclose()
            for end, generation, score in zip(ends, generations, scores, strict=True):
                engine.assert_matches(engine.model, ids[:end], generation, 0.0)
                start = 1 + end // 2
                engine.assert_close(score, reference_logprobs(engine.model, ids[:start], ids[start:end]))

        engine.drive(play)

    def test_a_prompt_that_does_not_fit_is_refused(self, engine: Engine) -> None:
        async def play(client: ScoringClient) -> None:
            most = (await client.info())["max_req_input_len"]
            with pytest.raises(EngineError, match=r"teacher 'a' refuses.*4"):
                await client.score([5] * (most + 1), 3)

        self.score(engine, play)
