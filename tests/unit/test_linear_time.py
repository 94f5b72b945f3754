"""The work of a step on the driver is linear in its rows and tokens.

Twice as many should take at most 2.3 times the CPU time. Four times as many are measured, which then take 5.3 times as long, and
16 times if the time is quadratic. The bound lies between, as a busy machine makes large work slower than small.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.packing import PackOptions
from agentrl.batch.prefix_groups import Unit, balance_units
from agentrl.config.load import load_config
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.token_ages import staleness_metrics
from agentrl.train.rollout_source import TaskPosition
from agentrl.train.step_scores import StepSettings
from agentrl.train.training_step import TrainingStep

RATIO = 7
ATTEMPTS = 10
GROUP = 4
CONFIG = load_config(None, [])


def make_rollouts(count: int, tokens: int = 48) -> list[Rollout]:
    """Rollouts of one row; those of a group begin with the same quarter."""
    rollouts = []
    for number in range(count):
        ids = np.arange(tokens, dtype=np.int32) + 1000 * number
        ids[: tokens // 4] = number // GROUP
        mask = (np.arange(tokens) >= tokens // 4).astype(np.uint8)
        row = Row(
            key=RowKey(f"p{number // GROUP}", f"r{number}"),
            token_ids=ids,
            provenance=np.where(mask, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
            mask=mask,
            mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
            logprobs=np.where(mask, -0.5, 0).astype(np.float32),
            versions=np.where(mask, number % 3, -1).astype(np.int32),
            requests=np.where(mask, 0, -1).astype(np.int32),
            request_ids=(f"q{number}",),
        )
        rollouts.append(Rollout(row.key.prompt_id, row.key.rollout_id, [row], float(number % 2), StopReason.TERMINATED))
    return rollouts


def cpu_s(work: Callable[[], object]) -> float:
    begun = time.process_time()
    work()
    return time.process_time() - begun


def check_linear(prepare: Callable[[int], Callable[[], object]], size: int) -> None:
    """Check the work that is prepared for ``size`` and four times as much, by the least times of some attempts."""
    small_s = large_s = float("inf")
    for _ in range(ATTEMPTS):
        small_s, large_s = min(small_s, cpu_s(prepare(size))), min(large_s, cpu_s(prepare(4 * size)))
        if large_s <= RATIO * small_s:
            return
    raise AssertionError(f"{size}: {small_s:.4f} s, four times as much: {large_s:.4f} s")


def step(rollouts: list[Rollout], tokens_per_micro: int = 256, share_prefixes: bool = False) -> TrainingStep:
    packing = PackOptions(tokens_per_micro, data_parallel_size=2, share_prefixes=share_prefixes)
    settings = StepSettings(CONFIG, packing)
    return TrainingStep(settings, RunEstimators(CONFIG.algo.by_source), 0, rollouts)


def batches(training_step: TrainingStep) -> Callable[[], object]:
    return lambda: [training_step.policy_batch(optimizer_step) for optimizer_step in training_step.optimizer_steps()]


@pytest.mark.parametrize("share_prefixes", [False, True])
@pytest.mark.parametrize("tokens_per_micro", [256, 1 << 20])
def test_packing(tokens_per_micro: int, share_prefixes: bool) -> None:
    """Into many micro-batches, and into one."""

    def prepare(count: int, tokens: int = 48) -> Callable[[], object]:
        return batches(step(make_rollouts(count, tokens), tokens_per_micro, share_prefixes))

    check_linear(prepare, 256)
    check_linear(lambda count: prepare(count, 2000), 128)
    check_linear(lambda tokens: prepare(16, tokens), 8000)


def test_dividing_many_rows_among_micro_batches() -> None:
    def prepare(count: int) -> Callable[[], object]:
        lengths = np.sort(np.random.default_rng(0).integers(200, 4000, count))[::-1].tolist()
        units = [Unit((number,), length, float(length)) for number, length in enumerate(lengths)]
        return lambda: balance_units(units, 1, 4096)

    check_linear(prepare, 2_500)  # of more, caches are too small


def test_grouping_advantages_and_metrics() -> None:
    def prepare(count: int, tokens: int = 48) -> Callable[[], object]:
        rollouts = make_rollouts(count, tokens)
        return lambda: (step(rollouts).metrics(1.0, ()), staleness_metrics(rollouts, 3))

    check_linear(prepare, 256)
    check_linear(lambda tokens: prepare(16, tokens), 16_000)


def test_the_journal(tmp_path: Path) -> None:
    """Groups are written, taken by a step, and read again by a process that resumes the run."""

    def prepare(groups: int, tokens: int = 48) -> Callable[[], object]:
        folder = tmp_path / f"{groups}-{tokens}-{time.monotonic_ns()}"

        async def write_and_read() -> None:
            journal = Journal(folder).begin()
            for position in range(groups):
                rollouts = make_rollouts(GROUP, tokens)
                journal.record_admitted(position, 0)
                for rollout in rollouts:
                    journal.record_ended(position, rollout)
                await journal.record_finished(position, rollouts)
            await journal.record_taken(1, [*range(groups)], TaskPosition(groups))
            journal.close()
            resumed = Journal(folder)
            for position in range(groups):
                assert len(resumed.read_group(position)) == GROUP

        return lambda: asyncio.run(write_and_read())

    check_linear(prepare, 16)
    check_linear(lambda tokens: prepare(2, tokens), 16_000)
