"""An engine behind the client with two sets of weights, for the tests that all engines must pass."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import httpx
import numpy as np
import numpy.typing as npt
import torch
from engine_tiny import reference_logprobs, save_model
from transformers import PreTrainedModel

from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.control import EngineLoad
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.launch.processes import EngineProcess
from agentrl.models.load import load_model

T = TypeVar("T")
GREEDY = SamplingParams(max_new_tokens=12, temperature=0.0)


@dataclass(frozen=True, slots=True)
class Traits:
    """In what engines differ. The tests hold each to what is declared of it here."""

    seeds: bool
    """A request with a seed samples the same again."""
    refuses_unfit_weights: bool
    """Weights of a name or a shape that the model has not are refused, and nothing has changed then. SGLang takes those
    whose names it knows, and dies of a wrong shape; comparing checksums after an update shows it."""
    tolerance: float = 1e-4
    """How far log-probabilities may lie from those of a float32 forward pass with the weights that it has."""
    dtype: torch.dtype = torch.float32
    """Of its weights: what it is sent is rounded to it."""
    check: str = "checksum"
    """What ``weights.check`` may be."""
    changes_beside_held: bool = True
    """Weights change while a pause keeps requests in the engine; otherwise the client refuses to try."""
    exact: bool = True
    """Greedy sampling says the same whatever is sampled beside it and was cached before; on a GPU near ties turn over."""


@dataclass
class Engine:
    url: str
    folder: Path
    other: Path
    model: PreTrainedModel
    other_model: PreTrainedModel
    traits: Traits
    undisturbed: dict[tuple[int, ...], Generation] = field(default_factory=dict, kw_only=True)
    """What was sampled greedily of prompts with the first weights, for tests that compare with it."""

    def client(self) -> SGLangClient:
        return SGLangClient(self.url, timeout_s=60)

    def drive(self, play: Callable[[SGLangClient], Awaitable[T]]) -> T:
        """Run ``play`` with a client; the engine has the first weights, an empty cache and goes on before and after."""

        async def session() -> T:
            client = self.client()
            try:
                return await play(client)
            finally:
                for tag in ("weights", "kv_cache"):
                    await client.memory.resume(tag)
                await client.resume()
                await client.updates.from_disk(self.folder, 0)
                await client.aclose()

        return asyncio.run(session())

    async def sample_greedily(self, client: SGLangClient, ids: list[int], params: SamplingParams) -> Generation:
        """Sample what is sampled again when the same is asked anew."""
        assert params.temperature == 0
        if not self.traits.exact:
            await sample(client, ids, params)  # so that the prompt is cached then and now
        return await sample(client, ids, params)

    def assert_same(self, generation: Generation, other_generation: Generation) -> None:
        """Two greedy generations, sampled beside different others, say the same where the engine is exact."""
        assert len(generation.token_ids) == len(other_generation.token_ids)
        assert generation.token_ids == other_generation.token_ids or not self.traits.exact

    def assert_matches(
        self, model: PreTrainedModel, ids: list[int], generation: Generation, temperature: float = 1.0
    ) -> None:
        assert len(generation.logprobs) == len(generation.token_ids)
        expected = reference_logprobs(model, ids, list(generation.token_ids), temperature)
        self.assert_close(generation.logprobs, expected)

    def assert_close(
        self, actual: Sequence[float] | npt.NDArray[Any], expected: Sequence[float] | npt.NDArray[Any]
    ) -> None:
        np.testing.assert_allclose(actual, expected, atol=self.traits.tolerance)

    def post(self, path: str, body: Any) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60, trust_env=False)


def running(
    start: Callable[[Path, Path], EngineProcess], traits: Traits, root: Path, **sizes: Any
) -> AbstractContextManager[Engine]:
    """Start an engine on a tiny model, its context 512 tokens, and end it. ``start`` takes the model and a log file.

    The models are made by this call, not when the engine starts in a thread: transformers changes torch's modules while it
    loads a model, also for the other threads.
    """
    folders = save_model(root / "a", seed=0, **sizes), save_model(root / "b", seed=1, **sizes)
    return _started(start, traits, root, folders, (load_model(folders[0]), load_model(folders[1])))


@contextmanager
def _started(
    start: Callable[[Path, Path], EngineProcess],
    traits: Traits,
    root: Path,
    folders: tuple[Path, Path],
    models: tuple[PreTrainedModel, PreTrainedModel],
) -> Iterator[Engine]:
    process = start(folders[0], root / "engine.log")
    try:
        yield Engine(process.url, *folders, *models, traits)
        process.check()
    finally:
        process.stop()


def prompt(seed: int, length: int = 30) -> list[int]:
    source = random.Random(seed)
    return [source.randrange(2, 384) for _ in range(length)]


async def sample(client: SGLangClient, ids: list[int], params: SamplingParams, name: str = "r") -> Generation:
    return await client.generate(Prompt(tuple(ids)), params, session_id=name, request_id=name)


async def until_sampling(client: SGLangClient, tasks: Sequence[asyncio.Task[Generation]]) -> EngineLoad:
    """Wait until the engine samples for all ``tasks``, its only requests, and return its load; none may have ended."""
    while (load := await client.control.load()) is None or load.running < len(tasks):
        assert not any(task.done() for task in tasks)
        await asyncio.sleep(0.01)
    return load
