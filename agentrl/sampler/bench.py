"""How fast an engine is, seen through the client: decoding and prefill in tokens a second."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass

from agentrl.sampler.client import SGLangClient
from agentrl.types import Prompt, SamplingParams


@dataclass(frozen=True, slots=True)
class EngineSpeed:
    """What one batch size gives."""

    batch: int
    """Concurrent requests."""
    decode_tokens_s: float
    """Sampled tokens a second, after short prompts."""
    prefill_tokens_s: float
    """Prompt tokens a second, of prompts that share nothing, with one token sampled each."""
    client_cpu_ms: float
    """CPU time of the calling process a request, in milliseconds: what the HTTP client costs."""


async def bench_engine(
    url: str,
    vocabulary: int,
    *,
    batches: Sequence[int] = (64, 256),
    prompt_tokens: int = 256,
    new_tokens: int = 64,
    seed: int = 0,
) -> list[EngineSpeed]:
    """Measure an engine with random prompts over ids ``[0, vocabulary)``.

    A model that ends its turns early decodes less than ``new_tokens``; only what it sampled is counted.
    """
    client = SGLangClient(url)
    try:
        return [await _measure(client, vocabulary, batch, prompt_tokens, new_tokens, seed) for batch in batches]
    finally:
        await client.aclose()


async def _measure(
    client: SGLangClient, vocabulary: int, batch: int, prompt_tokens: int, new_tokens: int, seed: int
) -> EngineSpeed:
    source = random.Random(seed * 1000 + batch)
    # The first requests open connections and take memory for the first time.
    await _round(client, _prompts(source, vocabulary, batch, prompt_tokens), 2)
    cpu = time.process_time()
    prompts = _prompts(source, vocabulary, batch, prompt_tokens)
    seconds, _ = await _round(client, prompts, 1)
    cpu = time.process_time() - cpu
    prefill = batch * prompt_tokens / seconds
    # Once more with the prompts in the cache: what is left is decoding.
    seconds, sampled = await _round(client, prompts, new_tokens)
    return EngineSpeed(batch, sampled / seconds, prefill, cpu / batch * 1e3)


def _prompts(source: random.Random, vocabulary: int, batch: int, count: int) -> list[Prompt]:
    return [Prompt(tuple(source.randrange(vocabulary) for _ in range(count))) for _ in range(batch)]


async def _round(client: SGLangClient, prompts: Sequence[Prompt], new_tokens: int) -> tuple[float, int]:
    params = SamplingParams(max_new_tokens=new_tokens)
    begun = time.perf_counter()
    generations = await asyncio.gather(
        *(
            client.generate(prompt, params, session_id=str(index), request_id=f"bench-{index}")
            for index, prompt in enumerate(prompts)
        )
    )
    return time.perf_counter() - begun, sum(len(generation.token_ids) for generation in generations)
