"""Ages of cached prefixes, from what an engine reports of its requests."""

from __future__ import annotations

from collections.abc import Sequence

from agentrl.core.types import FinishReason, Generation
from agentrl.inference.client.prefix_ages import BLOCK, PrefixAges, age_metrics, block_use

SYSTEM = list(range(BLOCK))
"""A prefix that episodes share."""


def note(ages: PrefixAges, prompt: Sequence[int], cached: int, version: int, sampled: Sequence[int] = ()) -> None:
    logprobs = (0.0,) * len(sampled)
    generation = Generation(tuple(sampled), logprobs, FinishReason.STOP, ((0, version),), cached)
    ages.add(block_use(prompt, generation))


def test_a_cached_block_is_as_old_as_the_version_that_computed_it() -> None:
    ages = PrefixAges()
    answer = [7] * BLOCK
    note(ages, SYSTEM, 0, 3, answer)
    note(ages, [*SYSTEM, *answer, 9], 2 * BLOCK, 5)
    note(ages, [*SYSTEM, 8], BLOCK, 4)
    assert age_metrics([ages]) == {
        "rollout/cache_stale": 1.0,
        "rollout/cache_age_mean": (2 * 2 + 1) / 3,
        "rollout/cache_age_max": 2.0,
    }
    assert age_metrics([ages]) == {}


def test_a_block_that_the_engine_has_dropped_is_as_old_as_the_request_that_computed_it_again() -> None:
    ages = PrefixAges()
    note(ages, SYSTEM, 0, 3)
    note(ages, [*SYSTEM, 1], 0, 6)
    note(ages, [*SYSTEM, 1], BLOCK, 7)
    assert ages.take() == (BLOCK, BLOCK, BLOCK, 1)


def test_cached_tokens_of_unknown_origin_and_parts_of_blocks_are_not_counted() -> None:
    ages = PrefixAges()
    note(ages, SYSTEM, BLOCK - 1, 3)
    note(ages, [*SYSTEM, *SYSTEM], 2 * BLOCK, 4)
    assert ages.take() == (BLOCK, BLOCK, BLOCK, 1)
    ages.add(block_use(SYSTEM, Generation((), (), FinishReason.ABORT, ())))
    assert ages.take() == (0, 0, 0, 0)


def test_tokens_sampled_after_a_sync_have_the_newer_version() -> None:
    ages, count = PrefixAges(), 2 * BLOCK
    sampled = tuple(range(count))
    ages.add(block_use([], Generation(sampled, (0.0,) * count, FinishReason.STOP, ((0, 3), (BLOCK, 4)))))
    note(ages, [*sampled, 1], count, 5)
    assert ages.take() == (count, count, 2 * BLOCK + BLOCK, 2)
