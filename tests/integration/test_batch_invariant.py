"""Engine and learner with batch-invariant kernels give the same log-probabilities, bit for bit."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch
from engine_tiny import save_model

from agentrl.batch.packing import PackOptions, RowSignals, pack
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.core.types import MaskReason, Provenance, Row, RowKey
from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import GenerateInput, SamplingOptions
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.load import load_tokenizer

TEMPERATURE = 0.7
Episode = tuple[list[int], list[bool], list[float]]
"""Token ids of an episode, whether each was sampled, and the engine's log-probabilities."""


async def episode(scheduler: Scheduler, number: int) -> Episode:
    """Play two turns beside others: prompts and answers of several lengths, cached prefixes, more requests than slots."""
    rng = np.random.default_rng(number)
    ids, sampled, logprobs = list[int](), list[bool](), list[float]()
    for turn in range(2):
        observation = rng.integers(2, 384, int(rng.integers(1, 40))).tolist()
        ids, sampled = ids + observation, sampled + [False] * len(observation)
        logprobs = logprobs + [0.0] * len(observation)
        options = SamplingOptions(
            max_new_tokens=int(rng.integers(1, 13)), temperature=TEMPERATURE, sampling_seed=number
        )
        request = scheduler.submit(GenerateInput(ids, options, f"{number}-{turn}", logprobs=True))
        await request.done
        ids, logprobs = ids + request.output, logprobs + request.logprobs
        sampled = sampled + [True] * len(request.output)
    return ids, sampled, logprobs


def play(folder: Path, *, batch_invariant: bool) -> list[Episode]:
    model = Model(folder, torch.float32, 5, 400, 2, batch_invariant=batch_invariant)
    scheduler = Scheduler(model, StopMatcher(load_tokenizer(folder), model.vocabulary), 5, 0, "0")

    async def run() -> list[Episode]:
        loop = asyncio.create_task(scheduler.run())
        try:
            return await asyncio.gather(*(episode(scheduler, number) for number in range(7)))
        finally:
            loop.cancel()

    return asyncio.run(run())


def score(folder: Path, episodes: list[Episode], *, batch_invariant: bool) -> list[list[float]]:
    """Return the learner's log-probabilities of episodes, which it packs into micro-batches."""
    rows = []
    for number, (ids, sampled, logprobs) in enumerate(episodes):
        is_sampled = np.array(sampled)
        rows.append(
            Row(
                key=RowKey("task", f"{number}"),
                token_ids=np.array(ids, np.int32),
                provenance=np.where(is_sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
                mask=is_sampled.astype(np.uint8),
                mask_reason=np.where(is_sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
                logprobs=np.array(logprobs, np.float32),
                versions=np.where(is_sampled, 0, -1).astype(np.int32),
                requests=np.where(is_sampled, 0, -1).astype(np.int32),
                request_ids=("request",),
                temperature=TEMPERATURE,
            )
        )
    config = LearnerConfig(device="cpu", threads=1, precision="float32", batch_invariant=batch_invariant)
    learner = LocalLearnerGroup(folder, config, AlgoConfig(), seed=0)
    try:
        assert learner.shares_prefixes is not batch_invariant
        packing = PackOptions(1000, temperature=TEMPERATURE)
        zeros = {row.key: np.zeros(len(row.token_ids), np.float32) for row in rows}
        scores = learner.logprobs(pack(rows, packing, RowSignals(advantages=zeros)))
        return [scores[row.key].tolist() for row in rows]
    finally:
        learner.close()


def largest_difference(episodes: list[Episode], scores: list[list[float]]) -> float:
    return max(
        abs(engine - learner)
        for (_, sampled, logprobs), row in zip(episodes, scores, strict=True)
        for is_sampled, engine, learner in zip(sampled, logprobs, row, strict=True)
        if is_sampled
    )


SIZES = {"hidden_size": 96, "intermediate_size": 384}


@pytest.mark.parametrize("family", ["qwen3", "llama", "mistral"])
def test_engine_and_learner_agree_bit_for_bit(family: str, tmp_path: Path) -> None:
    folder = save_model(tmp_path, family, **SIZES)
    episodes = play(folder, batch_invariant=True)
    assert largest_difference(episodes, score(folder, episodes, batch_invariant=True)) == 0


def test_usual_products_do_not(tmp_path: Path) -> None:
    folder = save_model(tmp_path, **SIZES)
    episodes = play(folder, batch_invariant=False)
    assert 0 < largest_difference(episodes, score(folder, episodes, batch_invariant=False)) < 1e-3
