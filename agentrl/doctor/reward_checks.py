"""Whether the rewards and evaluations of a run give something to learn from, and whether they rise."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain, islice, pairwise
from math import hypot, isnan, nan
from statistics import stdev

from agentrl.core.errors import UserError
from agentrl.core.types import Rollout
from agentrl.doctor.episode_checks import cut_share
from agentrl.doctor.record import FLAT_GROUPS, FLAT_STEPS, RECENT, SOLVED, Finding, RunRecord, mean
from agentrl.obs.rollout_headers import scan_headers
from agentrl.obs.rollouts import rollout_files

CONSTANT_STEPS = 3
"""Least steps in which all rewards are equal."""
CHANGED_LENGTH, CUT_GROWTH = 1.15, 0.3
"""Turns that are so many times as long, or as short, are those of another policy; or cut so much more often."""
LENGTH_STEPS, LENGTH_ROLLOUTS, LENGTH_CORRELATION = 5, 500, 0.8
"""The first steps and rollouts in which length and reward are compared, and the correlation from which length is what pays."""
TASK_REPEATS = 50
"""Tasks that are fewer than a step's groups, and were trained so many times, are learned by heart."""
COLLAPSE_STEPS = 10
"""Least steps for a judgement of a reward that collapses."""


def rewarded_length(run: RunRecord) -> Iterator[Finding]:
    """Yield that longer answers of a task get the higher reward, and answers have grown."""
    first_rows, last_rows = run.steps[:3], run.steps[-RECENT:]
    if len(run.steps) < RECENT:
        return
    cut = [mean([cut_share(row) for row in rows]) for rows in (first_rows, last_rows)]
    lengths = [mean([_turn_length(row) for row in rows]) for rows in (first_rows, last_rows)]
    if lengths[1] <= CHANGED_LENGTH * lengths[0] or (correlation := _length_correlation(run)) < LENGTH_CORRELATION:
        return
    evidence = (
        f"correlation of reward and length within a group: {correlation:.2f} in the first {LENGTH_STEPS} steps",
        f"tokens of a turn: {lengths[0]:.0f} in the first 3 steps, {lengths[1]:.0f} in the last {len(last_rows)}",
        f"rollout/cut_turns: {cut[0]:.2f}, {cut[1]:.2f}",
    )
    advice = (
        "reward.function pays for length: compare short and long answers of a task in `agentrl view --steps`",
        "algo.overlong takes reward off long answers; sampler.max_new_tokens limits them",
    )
    yield Finding("problem", "longer answers get higher rewards, and answers grow", evidence, advice)


def _length_correlation(run: RunRecord) -> float:
    """Return the correlation of reward and characters of the policy's turns in the first steps, both less their group's mean."""
    files = rollout_files(run.folder)
    headers = chain.from_iterable(scan_headers(files[step]) for step in sorted(files)[:LENGTH_STEPS])
    groups: dict[str, list[tuple[float, float]]] = {}
    try:
        for header in islice(headers, LENGTH_ROLLOUTS):
            if isinstance(episode := header.rollout, Rollout):
                characters = sum(len(turn.action) for turn in episode.turns)
                groups.setdefault(episode.prompt_id, []).append((float(characters), float(episode.reward)))
    except UserError:
        return 0.0  # a damaged file
    lengths, rewards = [], []
    for pairs in groups.values():
        group_lengths, group_rewards = zip(*pairs, strict=True)
        lengths += [length - mean(list(group_lengths)) for length in group_lengths]
        rewards += [reward - mean(list(group_rewards)) for reward in group_rewards]
    spread = hypot(*lengths) * hypot(*rewards)
    return sum(a * b for a, b in zip(lengths, rewards, strict=True)) / spread if spread else 0.0


def few_tasks(run: RunRecord) -> Iterator[Finding]:
    """Yield that a file has fewer tasks than a step has groups, so that each is trained many times."""
    config, files = run.config, rollout_files(run.folder)
    batch = config.rollout.batch_size
    if config.data.path is None or config.obs.rollouts != "all" or len(run.steps) * batch < 2 * TASK_REPEATS:
        return
    task_ids: set[str] = set()
    try:
        for step in sorted(files)[-RECENT:]:
            for header in scan_headers(files[step]):
                if isinstance(header.rollout, Rollout):
                    task_ids.add(header.rollout.prompt_id)
            if len(task_ids) > batch:
                return
    except UserError:
        return  # a damaged file
    repeats = len(run.steps) * batch / max(1, len(task_ids))
    if task_ids and repeats >= TASK_REPEATS:
        evidence = (
            f"the last {min(RECENT, len(files))} steps have {len(task_ids)} tasks of data.path={config.data.path}",
            f"{len(run.steps)} steps with rollout.batch_size={batch}",
        )
        advice = (
            "they are learned by heart: more tasks in data.path, or fewer train.steps",
            "eval.size, with tasks that are not trained, shows what else the policy has learned",
        )
        yield Finding("problem", f"only {len(task_ids)} tasks, each trained {repeats:.0f} times", evidence, advice)


def constant_reward(run: RunRecord) -> Iterator[Finding]:
    """Yield that every reward is the same, since a step or from the start, and whether the policy has changed with it."""
    rows = [row for row in run.steps if not isnan(row.get("train/reward", nan))]
    value = rows[-1]["train/reward"] if rows else 0.0
    constant = [row.get("train/flat_groups") == 1.0 and abs(row["train/reward"] - value) < 1e-9 for row in rows]
    count = next((number for number, same in enumerate(reversed(constant)) if not same), len(rows))
    if count < CONSTANT_STEPS or value >= SOLVED:
        return
    earlier_rows, constant_rows = rows[:-count], rows[-count:]
    evidence = [f"train/reward is {value:g} and train/flat_groups is 1 in the last {count} of {len(run.steps)} steps"]
    advice = [
        f"reward.function: one that catches errors, such as those of a judge, and returns {value:g} hides them; let it raise. "
        "`agentrl view` shows what it was given",
        "rollout.n_samples_per_prompt, sampler.temperature, easier tasks or model.warm_start, if the policy never succeeds",
    ]
    title = f"every reward is {value:g}, so there is nothing to learn from"
    if earlier_rows:
        title = (
            f"every reward is {value:g} since step {constant_rows[0]['step']:.0f}, so there is nothing to learn from"
        )
        rewards = [row["train/reward"] for row in earlier_rows]
        evidence.append(f"before: {min(rewards):.3f} to {max(rewards):.3f}")
        (first_length, length), (first_cut, cut) = (
            [mean([read(row) for row in window]) for window in (earlier_rows, constant_rows)]
            for read in (_turn_length, cut_share)
        )
        if not 1 / CHANGED_LENGTH < length / max(first_length, 1e-9) < CHANGED_LENGTH or cut > first_cut + CUT_GROWTH:
            title = f"the policy broke before step {constant_rows[0]['step']:.0f}: every reward is {value:g} since"
            evidence += [
                f"tokens of a turn: {first_length:.1f} before, {length:.1f} since",
                f"rollout/cut_turns: {first_cut:.2f} before, {cut:.2f} since",
            ]
            rate = run.config.learner.optimizer.lr
            advice.insert(0, f"learner.optimizer.lr={rate} is too high, or a step had too few rows")
    yield Finding("problem", title, tuple(evidence), tuple(advice))


def _turn_length(row: Mapping[str, float]) -> float:
    """Return the sampled tokens of a step by its turns."""
    return row.get("rollout/sampled_tokens", 0.0) / max(
        1.0, row.get("rollout/episodes", 0.0) * row.get("rollout/turns", 0.0)
    )


def reward_variance(run: RunRecord) -> Iterator[Finding]:
    """Yield that almost no group has reward variance."""
    flat, rewards = run.recent("train/flat_groups", RECENT), run.recent("train/reward", RECENT)
    if not flat or mean(flat) < FLAT_GROUPS or mean(rewards) >= SOLVED:
        return
    if any(constant_reward(run)):
        return
    skipped = len(run.recent("train/skipped", RECENT))
    evidence = [
        f"train/flat_groups is {mean(flat):.2f} over the last {len(flat)} steps: groups whose rewards are all equal",
        f"train/reward is {mean(rewards):.3f}, {min(rewards):.3f} to {max(rewards):.3f}",
    ]
    if skipped:
        evidence.append(f"{skipped} of these steps trained nothing (train/skipped)")
    advice = (
        "rollout.n_samples_per_prompt: more samples find a rare success; sampler.temperature: 0 makes all samples alike",
        "the tasks are too hard or all solved: choose others (tasks.options, data.path), or begin with model.warm_start",
    )
    yield Finding(
        "problem",
        "almost no group has reward variance, so there is nothing to learn from",
        tuple(evidence),
        advice,
    )


def reward_change(run: RunRecord) -> Iterator[Finding]:
    """Yield that the reward has fallen, collapsed, or not changed."""
    if any(constant_reward(run)):
        return
    key = "rollout/unfiltered_reward" if run.values("rollout/unfiltered_reward") else "train/reward"
    rewards = run.values(key)
    if len(rewards) < FLAT_STEPS:
        yield from _collapsed_reward(key, rewards)
        return
    third = len(rewards) // 3
    first, last = rewards[:third], rewards[-third:]
    error = (stdev(first) ** 2 / third + stdev(last) ** 2 / third) ** 0.5
    change = mean(last) - mean(first)
    evaluations = [row["eval/reward"] for row in run.evaluations if not isnan(row.get("eval/reward", nan))]
    evidence = (
        f"{key}: {mean(first):.3f} in the first {third} steps, {mean(last):.3f} in the last {third}; "
        f"standard error of the difference {error:.3f}",
        *([f"eval/reward: {evaluations[0]:.3f} → {evaluations[-1]:.3f}"] if len(evaluations) > 1 else []),
    )
    advice = (
        "the other findings, if any; otherwise learner.optimizer.lr, rollout.batch_size and rollout.n_samples_per_prompt",
        "`agentrl view` shows whether good rollouts get the higher rewards",
    )
    if change < -2 * error and change < -0.02:
        yield Finding("problem", "the reward has fallen", evidence, ("a smaller learner.optimizer.lr", *advice))
    elif collapse := [*_collapsed_reward(key, rewards)]:
        yield from collapse
    elif abs(change) <= 2 * error:
        solved = mean(last) >= SOLVED
        yield Finding("hint" if solved else "problem", "the reward has not changed", evidence, advice)


def _collapsed_reward(key: str, rewards: list[float]) -> Iterator[Finding]:
    """Yield that the reward of the last steps is far below what it was, at any time before."""
    if len(rewards) < COLLAPSE_STEPS:
        return
    window = max(3, min(RECENT, len(rewards) // 4))
    last = rewards[-min(window, 5) :]
    windows = [rewards[start : start + window] for start in range(len(rewards) - len(last) - window + 1)]
    best = max(windows, key=mean)
    # The noise is that of the differences between steps, without the largest: the collapse itself.
    differences = sorted(abs(after - before) for before, after in pairwise(rewards))[:-1]
    error = (mean([value**2 for value in differences]) / 2 * (1 / len(best) + 1 / len(last))) ** 0.5
    drop, spread = mean(best) - mean(last), mean(best) - min(mean(last), *map(mean, windows))
    if drop > max(0.02, 5 * error, spread / 2):
        start = windows.index(best) + 1
        evidence = (
            f"{key}: {mean(best):.3f} in the steps {start} to {start + window - 1}, {mean(last):.3f} in the last {len(last)}; "
            f"standard error of the difference {error:.3f}",
        )
        advice = (
            "the other findings, if any; otherwise a smaller learner.optimizer.lr, algo.kl_coef, or algo.entropy_coef",
            "`agentrl view --steps` shows the rollouts before and after; train.keep_best keeps the best checkpoint",
        )
        yield Finding("problem", "the reward has collapsed", evidence, advice)


def evaluation_drop(run: RunRecord) -> Iterator[Finding]:
    """Yield the metrics of evaluations that were far better before."""
    goals = {*run.config.train.stop_at, *filter(None, [run.config.train.keep_best])}
    names = {name for row in run.evaluations for name in row if name.startswith("eval/")}
    evidence = []
    for name in sorted(names):
        if "=" in name or not (name.endswith("/reward") or name.removeprefix("eval/") in goals):
            continue
        rows = [row for row in run.evaluations if not isnan(row.get(name, nan))]
        if not rows:
            continue
        best, last = max(rows, key=lambda row: row[name]), rows[-1]
        drop = best[name] - last[name]
        intervals = [row[f"{name}/ci95"] for row in (best, last) if f"{name}/ci95" in row]
        # Of many evaluations the best is too good by chance: the interval of a difference is taken twice.
        least = 2 * hypot(*intervals) if len(intervals) == 2 else 0.25 * abs(best[name])
        if drop > max(least, 0.02):
            steps = [f"{row[name]:.3f} after step {row['step']:.0f}" for row in (best, last)]
            evidence.append(f"{name}: {steps[0]}, {steps[1]}")
    if evidence:
        advice = (
            "train.keep_best keeps the best checkpoint; `agentrl eval --checkpoint` evaluates another one",
            "a smaller learner.optimizer.lr, algo.kl_coef above 0; if train/reward rises at the same time, the tasks of training "
            "are learned by heart, or the reward is gamed",
        )
        yield Finding("problem", "evaluations were far better before", tuple(evidence), advice)
