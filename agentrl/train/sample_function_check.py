"""Sample conversions and functions of rewards of users, tried on recorded rollouts."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from agentrl.algo.reward_processing import KEY as POST_PROCESS_KEY
from agentrl.algo.reward_processing import load_post_process, shape_rewards
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.sample_conversion import KEY as CONVERT_KEY
from agentrl.batch.sample_conversion import ConvertedSamples, convert_samples, load_convert
from agentrl.config.algo import AlgoConfig
from agentrl.core.errors import ConfigError
from agentrl.core.training_sample import TrainingSample
from agentrl.core.types import Rollout, Row
from agentrl.train.function_report import FunctionReport, RecordedStep


def check_conversion(reference: str, step: RecordedStep) -> FunctionReport:
    """Convert the samples of a step twice, and look for changes of what was sampled."""
    report = FunctionReport(CONVERT_KEY, reference)
    rollouts = [rollout for group in step.groups for rollout in group if not rollout.dropped]
    try:
        convert = load_convert(reference)
        assert convert is not None, "it has a name"
        changed: set[str] = set()

        def convert_and_watch(samples: Sequence[TrainingSample]) -> Sequence[TrainingSample]:
            rows = {sample.rollout.rollout_id: [row.row for row in sample.rows] for sample in samples}
            returned = convert(samples)
            for sample in returned if isinstance(returned, Sequence) else ():
                if isinstance(sample, TrainingSample):
                    rollout_id = sample.rollout.rollout_id
                    if rollout_id in rows and [row.row for row in sample.rows] != rows[rollout_id]:
                        changed.add(rollout_id)
            return returned

        conversions = []
        for _ in range(2):
            begun = time.perf_counter()
            conversions.append(convert_samples(convert_and_watch, reference, rollouts))
            report.seconds.append(time.perf_counter() - begun)
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    first, second = conversions
    report.lines += _describe(first, rollouts)
    report.lines.append(report.time("a step"))
    if not any(row.mask.any() for rollout in first.rollouts for row in rollout.rows):
        report.faults.append("it leaves no token to train on: a step would be skipped")
    if changed:
        report.faults.append(
            f"it replaces the sampled tokens of {len(changed)} rollouts ({min(changed)}), which has no effect: change mask_T, "
            "weight_T, reward_T, and leave row as it is"
        )
    if not _equal(first, second):
        report.faults.append(
            "it converts the same samples differently the second time: a resumed run would train others"
        )
    return report


def _describe(converted: ConvertedSamples, rollouts: Sequence[Rollout]) -> list[str]:
    rewards = [rollout.reward for rollout in converted.rollouts]
    recorded = {rollout.rollout_id: rollout.reward for rollout in rollouts}
    changed = sum(rollout.reward != recorded[rollout.rollout_id] for rollout in converted.rollouts)
    lines = [
        f"keeps {len(rewards)} of {len(rollouts)} samples, and masks {converted.metrics['batch/convert/masked_share']:.0%} of "
        "their tokens"
    ]
    if changed:
        lines.append(f"changes {changed} rewards; their mean is {np.mean(rewards):.4g}")
    if converted.rewards:
        numbers = np.concatenate([*converted.rewards.values()])
        lines.append(f"rewards {int((numbers != 0).sum())} tokens, {numbers.sum():.4g} in all")
    if converted.weights is not None:
        weights = np.concatenate([*converted.weights.values()])
        lines.append(f"weighs tokens from {weights.min():.4g} to {weights.max():.4g}")
    return lines


def _equal(first: ConvertedSamples, second: ConvertedSamples) -> bool:
    def by_row(converted: ConvertedSamples) -> dict[object, tuple[object, ...]]:
        def values(row: Row) -> tuple[object, ...]:
            rewards, weights = converted.rewards.get(row.key), (converted.weights or {}).get(row.key)
            return tuple(None if array is None else array.tobytes() for array in (row.mask, rewards, weights))

        return {row.key: values(row) for rollout in converted.rollouts for row in rollout.rows}

    rewards = [{rollout.rollout_id: rollout.reward for rollout in converted.rollouts} for converted in (first, second)]
    return rewards[0] == rewards[1] and by_row(first) == by_row(second)


def check_post_process(prefix: str, algo: AlgoConfig, step: RecordedStep) -> FunctionReport:
    """Turn the rewards of a step into others, twice."""
    report = FunctionReport(f"{prefix}{POST_PROCESS_KEY}", str(algo.reward_post_process))
    groups = step.trained
    try:
        load_post_process(algo.reward_post_process)
        begun = time.perf_counter()
        rewards = _shape(groups, algo)
        report.seconds.append(time.perf_counter() - begun)
        again = _shape(groups, algo)
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    numbers = np.array([*rewards.values()])
    report.lines += [
        f"{len(numbers)} rewards from {numbers.min():.4g} to {numbers.max():.4g}, {numbers.mean():.4g} in the mean; "
        f"recorded were {groups.rewards_N.mean():.4g}",
        report.time("a step"),
    ]
    if rewards != again:
        report.faults.append(
            "it returns other rewards for the same rollouts the second time: a resumed run would train others"
        )
    elif not np.ptp(numbers):
        report.lines.append("all rewards are equal: nothing can be learned from them")
    return report


def _shape(groups: RolloutGroups, algo: AlgoConfig) -> dict[str, float]:
    return {rollout.rollout_id: rollout.reward for rollout in shape_rewards(groups, algo).rollouts_N}
