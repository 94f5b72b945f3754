"""Samples of the engine are a function of prompt, weights and seed, so no random state needs to be saved."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_tiny import make_tokenizer, save_model

from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import GenerateInput, Request, SamplingOptions
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher

NEW_TOKENS = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeds"))


def started(folder: Path, seed: int = 0) -> Scheduler:
    model = Model(folder, torch.float32, 8, 256)
    return Scheduler(model, StopMatcher(make_tokenizer(), model.vocabulary), 8, seed, "0")


def generate_input(number: int, seed: int | None) -> GenerateInput:
    source = random.Random(number)
    ids = [source.randrange(2, 384) for _ in range(5 + number)]
    return GenerateInput(ids, SamplingOptions(max_new_tokens=NEW_TOKENS, sampling_seed=seed), f"r{number}", True)


async def sample(scheduler: Scheduler, generate_inputs: Sequence[GenerateInput], together: int) -> list[list[int]]:
    """Run all requests, ``together`` at a time, and return what they sampled."""
    engine = asyncio.create_task(scheduler.run())
    try:
        outputs: list[list[int]] = []
        for at in range(0, len(generate_inputs), together):
            requests = [scheduler.submit(generate_input) for generate_input in generate_inputs[at : at + together]]
            await asyncio.gather(*(request.done for request in requests))
            outputs += [request.output for request in requests]
        return outputs
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)


def test_seeded_requests_repeat_in_any_batch_and_after_a_restart(folder: Path) -> None:
    generate_inputs = [generate_input(number, seed=100 + number) for number in range(12)]
    batched = asyncio.run(sample(started(folder, seed=1), generate_inputs, together=12))
    again = asyncio.run(sample(started(folder, seed=2), generate_inputs[::-1], together=3))
    assert again[::-1] == batched
    assert len({tuple(output) for output in batched}) == 12


def test_one_prompt_with_two_seeds_gives_two_answers(folder: Path) -> None:
    first, second, third = asyncio.run(
        sample(started(folder), [generate_input(0, 5), generate_input(0, 6), generate_input(0, 5)], together=3)
    )
    assert first == third != second


def test_requests_without_a_seed_differ_and_depend_on_the_engines(folder: Path) -> None:
    same_inputs = [generate_input(0, None)] * 6
    result, same, other = (asyncio.run(sample(started(folder, seed), same_inputs, together=6)) for seed in (0, 0, 1))
    assert result == same != other
    assert len({tuple(output) for output in result}) == 6


@pytest.mark.parametrize("state_after", [1, 9, NEW_TOKENS - 1])
def test_an_aborted_request_continues_with_the_same_tokens(folder: Path, state_after: int) -> None:
    """As the client does it: prompt and tokens so far, the same seed, fewer new tokens; here in a new engine."""
    first = generate_input(3, seed=9)
    ((full_row, _),) = [asyncio.run(sample(started(folder), [first, generate_input(4, 1)], together=2))]
    begun = asyncio.run(cut(started(folder), first, state_after))
    assert begun == full_row[: len(begun)]
    assert state_after <= len(begun) < NEW_TOKENS
    remaining_options = SamplingOptions(max_new_tokens=NEW_TOKENS - len(begun), sampling_seed=9)
    continued = GenerateInput([*first.token_ids, *begun], remaining_options, "r", True)
    ((tail,),) = [asyncio.run(sample(started(folder), [continued], together=1))]
    assert begun + tail == full_row


async def cut(scheduler: Scheduler, generate_input: GenerateInput, state_after: int) -> list[int]:
    engine = asyncio.create_task(scheduler.run())
    try:
        request: Request = scheduler.submit(generate_input)
        while len(request.output) < state_after:  # noqa: ASYNC110
            await asyncio.sleep(0)
        scheduler.abort(lambda other: other is request)
        await request.done
        return request.output
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
