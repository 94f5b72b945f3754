"""What the engine samples is a function of prompt, weights and seed: nothing of it needs to be saved."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from engine_tiny import make_tokenizer, save_model

from agentrl.inference.embedded.model import Model
from agentrl.inference.embedded.request import Asked, Options, Request
from agentrl.inference.embedded.scheduler import Scheduler
from agentrl.inference.embedded.stop_strings import StopMatcher

NEW_TOKENS = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("seeds"))


def started(folder: Path, seed: int = 0) -> Scheduler:
    model = Model(folder, torch.float32, 8, 256)
    return Scheduler(model, StopMatcher(make_tokenizer(), model.vocabulary), 8, seed, "0")


def asked(number: int, seed: int | None) -> Asked:
    source = random.Random(number)
    ids = [source.randrange(2, 384) for _ in range(5 + number)]
    return Asked(ids, Options(max_new_tokens=NEW_TOKENS, sampling_seed=seed), f"r{number}", True, False)


async def sample(scheduler: Scheduler, some: Sequence[Asked], together: int) -> list[list[int]]:
    """Run all requests, ``together`` at a time, and return what they sampled."""
    engine = asyncio.create_task(scheduler.run())
    try:
        outputs: list[list[int]] = []
        for at in range(0, len(some), together):
            requests = [scheduler.submit(one) for one in some[at : at + together]]
            await asyncio.gather(*(request.done for request in requests))
            outputs += [request.output for request in requests]
        return outputs
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)


def test_seeded_requests_repeat_in_any_company_and_after_a_restart(folder: Path) -> None:
    some = [asked(number, seed=100 + number) for number in range(12)]
    beside = asyncio.run(sample(started(folder, seed=1), some, together=12))
    again = asyncio.run(sample(started(folder, seed=2), some[::-1], together=3))
    assert again[::-1] == beside
    assert len({tuple(output) for output in beside}) == 12


def test_one_prompt_with_two_seeds_gives_two_answers(folder: Path) -> None:
    first, second, third = asyncio.run(sample(started(folder), [asked(0, 5), asked(0, 6), asked(0, 5)], together=3))
    assert first == third != second


def test_requests_without_a_seed_differ_and_depend_on_the_engines(folder: Path) -> None:
    some = [asked(0, None)] * 6
    one, same, other = (asyncio.run(sample(started(folder, seed), some, together=6)) for seed in (0, 0, 1))
    assert one == same != other
    assert len({tuple(output) for output in one}) == 6


@pytest.mark.parametrize("after", [1, 17, NEW_TOKENS - 1])
def test_a_request_that_was_aborted_goes_on_as_if_nothing_had_been(folder: Path, after: int) -> None:
    """As the client does it: prompt and tokens so far, the same seed, the rest of the tokens; here in a new engine."""
    first = asked(3, seed=9)
    ((whole, _),) = [asyncio.run(sample(started(folder), [first, asked(4, 1)], together=2))]
    part = asyncio.run(cut(started(folder), first, after))
    assert part == whole[: len(part)]
    assert after <= len(part) < NEW_TOKENS
    rest = Options(max_new_tokens=NEW_TOKENS - len(part), sampling_seed=9)
    going_on = Asked([*first.token_ids, *part], rest, "r", True, False)
    ((tail,),) = [asyncio.run(sample(started(folder), [going_on], together=1))]
    assert part + tail == whole


async def cut(scheduler: Scheduler, one: Asked, after: int) -> list[int]:
    engine = asyncio.create_task(scheduler.run())
    try:
        request: Request = scheduler.submit(one)
        while len(request.output) < after:  # noqa: ASYNC110
            await asyncio.sleep(0)
        scheduler.abort(lambda other: other is request)
        await request.done
        return request.output
    finally:
        engine.cancel()
        await asyncio.gather(engine, return_exceptions=True)
