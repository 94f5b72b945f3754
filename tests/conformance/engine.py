"""An engine behind the client with two sets of weights, for the tests that all engines must pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
from engine_tiny import reference_logprobs, save_model
from transformers import PreTrainedModel

from agentrl.models.load import load_model
from agentrl.sampler.client import SGLangClient
from agentrl.sampler.launch import EngineProcess
from agentrl.types import Generation, Prompt, SamplingParams

T = TypeVar("T")
GREEDY = SamplingParams(max_new_tokens=24, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Traits:
    """In what engines differ. The tests hold each to what is declared of it here."""

    seeds: bool
    """A request with a seed samples the same again."""
    refuses_unfit_weights: bool
    """Weights of a name or a shape that the model has not are refused, and nothing has changed then. SGLang takes those
    whose names it knows, and dies of a wrong shape; comparing checksums after an update shows it."""
    shortens_to_context: bool
    """A request for more tokens than fit in the context gets those that fit; otherwise it is refused."""


@dataclass
class Engine:
    url: str
    folder: Path
    other: Path
    model: PreTrainedModel
    other_model: PreTrainedModel
    traits: Traits

    def drive(self, play: Callable[[SGLangClient], Awaitable[T]]) -> T:
        """Run ``play`` with a client; the engine has the first weights, an empty cache and goes on before and after."""

        async def session() -> T:
            client = SGLangClient(self.url, timeout_s=60)
            try:
                return await play(client)
            finally:
                await client.resume()
                await client.update_from_disk(self.folder, 0)
                await client.aclose()

        return asyncio.run(session())

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False)


@contextmanager
def running(start: Callable[[Path, Path], EngineProcess], traits: Traits, root: Path) -> Iterator[Engine]:
    """Start an engine on a tiny model, its context 512 tokens, and end it. ``start`` takes the model and a log file."""
    folder, other = save_model(root / "a", seed=0), save_model(root / "b", seed=1)
    process = start(folder, root / "engine.log")
    try:
        yield Engine(process.url, folder, other, load_model(folder), load_model(other), traits)
        process.check()
    finally:
        process.stop()


def prompt(seed: int, length: int = 30) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 384) for _ in range(length)]


async def sample(client: SGLangClient, ids: list[int], params: SamplingParams, name: str = "r") -> Generation:
    return await client.generate(Prompt(tuple(ids)), params, session_id=name, request_id=name)


def assert_matches(model: PreTrainedModel, ids: list[int], generation: Generation, temperature: float = 1.0) -> None:
    assert len(generation.logprobs) == len(generation.token_ids)
    wanted = reference_logprobs(model, ids, list(generation.token_ids), temperature)
    np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-4)
