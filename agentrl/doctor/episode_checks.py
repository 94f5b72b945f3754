"""What cuts episodes short or drops them, how long they are, and what sampling waits for, from the metrics of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from agentrl.doctor.record import FLAT_GROUPS, RECENT, SOLVED, Finding, RunRecord, mean

FILTERED = 0.75
TRUNCATED = 0.5
"""From this share on most episodes or turns are cut."""
CUT, SAME_REWARD = 0.75, 0.02
"""From this share on cut turns may be why all rewards are equal, if no reward was higher by more than the second before."""
LIMITS = {
    "max_tokens": "rollout.max_tokens, sampler.max_new_tokens",
    "max_turns": "rollout.max_turns",
    "max_time": "rollout.max_seconds",
    "truncated": "the environment's limit of steps",
}
"""The keys of stop reasons that cut an episode."""
TRUNCATED_GROWTH = 3.0
"""A quarter of the episodes is many if it is so many times the share before."""
GROWN_LENGTH, SHRUNK_LENGTH = 4.0, 0.2
"""Tokens of an episode above and below so many times those of the first steps are worth a look."""
FEW_SLOTS, ROLLOUT_SHARE = 8, 0.7
"""A step with so many times the episodes that run at a time, and this share of its time in sampling, waits for them."""
IDLE = 0.5
LEAST_STEP_S = 5.0
"""Shorter steps are those of a trial, whose engines may be idle."""


def truncated_episodes(run: RunRecord) -> Iterator[Finding]:
    """Yield that limits cut many episodes, with the limit."""
    windows = {"over the last steps": run.steps[-RECENT:], "in the last 3 steps": run.steps[-3:]}
    for when, rows in windows.items():
        shares = {
            reason: sum(values) / len(rows)
            for reason in LIMITS
            if (values := run.recent(f"rollout/stop/{reason}", len(rows)))
        }
        total = sum(shares.values())
        first_rows = run.steps[: len(run.steps) // 3]
        first = sum(row.get(f"rollout/stop/{reason}", 0.0) for row in first_rows for reason in LIMITS)
        grown = len(first_rows) >= RECENT // 2 and total > TRUNCATED_GROWTH * first / len(first_rows)
        if total >= TRUNCATED or (total >= TRUNCATED / 2 and grown):
            evidence = tuple(f"rollout/stop/{reason} is {share:.2f} {when}" for reason, share in shares.items())
            most = max(shares, key=lambda reason: shares[reason])
            advice = (f"raise {LIMITS[most]}", "algo.overlong shapes the reward of long answers")
            quantity = "most" if total >= TRUNCATED else "more and more"
            yield Finding("problem", f"limits cut {quantity} episodes", evidence, advice)
            return


def cut_turns(run: RunRecord) -> Iterator[Finding]:
    """Yield that most turns are cut since the start and nothing is learned; an environment may read the beginning alone."""
    shares, flat = run.recent("rollout/cut_turns", RECENT), run.recent("train/flat_groups", RECENT)
    if not shares or not flat or mean(flat) < FLAT_GROUPS:
        return
    first = mean([cut_share(row) for row in run.steps[:3]])
    reward, first_rewards = mean(run.recent("train/reward", RECENT)), run.values("train/reward")[:3]
    if min(mean(shares), first) >= CUT and reward < SOLVED and max(first_rewards) <= reward + SAME_REWARD:
        evidence = (
            f"rollout/cut_turns is {mean(shares):.2f} over the last {len(shares)} steps: turns that end by a limit of tokens",
            f"sampler.max_new_tokens={run.config.sampler.max_new_tokens}",
        )
        advice = ("raise sampler.max_new_tokens, rollout.max_tokens", "algo.overlong shapes the reward of long answers")
        yield Finding("problem", "limits cut most turns", evidence, advice)


def cut_share(row: Mapping[str, float]) -> float:
    """Return the share of turns of a step that a limit of tokens cuts."""
    return row.get("rollout/cut_turns", 0.0)


def filtered_groups(run: RunRecord) -> Iterator[Finding]:
    """Yield that filters drop most groups."""
    counts, batch = run.recent("rollout/filtered_groups", RECENT), run.config.rollout.batch_size
    share = mean(counts) / (mean(counts) + batch) if counts else 0.0
    if share < FILTERED:
        return
    prefix = "rollout/filtered/"
    reasons = sorted({key for row in run.steps[-RECENT:] for key in row if key.startswith(prefix)})
    evidence = [
        f"rollout/filtered_groups is {mean(counts):.1f} over the last {len(counts)} steps: {share:.0%} of all groups",
        *(f"{key}: {sum(run.recent(key, RECENT)):.0f}" for key in reasons),
    ]
    advice = (
        "choose tasks that the policy sometimes solves (tasks.options, data.path, tasks.data_source)",
        "rollout.n_samples_per_prompt: more samples find a rare success; rollout.filter_groups.filters: leave one out",
    )
    yield Finding("problem", "filters drop most groups, so most sampling is lost", tuple(evidence), advice)


def episode_length(run: RunRecord) -> Iterator[Finding]:
    """Yield that episodes have become far longer or shorter."""
    lengths = [
        row["rollout/sampled_tokens"] / row["rollout/episodes"]
        for row in run.steps
        if row.get("rollout/episodes", 0) > 0 and row.get("rollout/sampled_tokens", 0) > 0
    ]
    if len(lengths) < RECENT:
        return
    first, last = mean(lengths[:5]), mean(lengths[-5:])
    if GROWN_LENGTH * first >= last >= SHRUNK_LENGTH * first:
        return
    change = "long" if last > first else "short"
    evidence = (f"tokens of an episode: {first:.0f} in the first 5 steps, {last:.0f} in the last 5",)
    advice = (
        "`agentrl view --steps` shows whether answers repeat themselves, or leave out their reasoning",
        "algo.overlong takes reward off long answers; batch.aggregation says what a long answer weighs; algo.kl_coef above 0",
    )
    yield Finding("hint", f"episodes have become very {change}", evidence, advice)


def few_slots(run: RunRecord) -> Iterator[Finding]:
    """Yield that the run is bound by sampling, with few of a step's episodes at a time."""
    episodes, slots = run.recent("rollout/episodes", RECENT), run.config.rollout.concurrency
    rollout_s, step_s = run.recent("time/rollout_s", RECENT), run.recent("time/step_s", RECENT)
    if (
        not episodes
        or len(rollout_s) < RECENT
        or mean(episodes) < FEW_SLOTS * slots
        or mean(rollout_s) < ROLLOUT_SHARE * mean(step_s)
    ):
        return
    evidence = (
        f"rollout.concurrency={slots}, and a step has {mean(episodes):.0f} episodes",
        f"time/rollout_s is {mean(rollout_s):.1f} of {mean(step_s):.1f} seconds of a step",
    )
    advice = ("raise rollout.concurrency: engines compute requests together; sampler.max_running limits them, too",)
    yield Finding("hint", "sampling takes most of a step, with a low concurrency", evidence, advice)


def idle_engines(run: RunRecord) -> Iterator[Finding]:
    """Yield what engines and slots wait for."""
    total, step_s = run.recent("engine_idle/total", RECENT), run.recent("time/step_s", RECENT)
    is_trial = run.config.sampler.device == "cpu" or len(total) < RECENT or mean(step_s) < LEAST_STEP_S
    if not is_trial and mean(total) > IDLE:
        prefix = "engine_idle/"
        causes = {key: mean(run.recent(key, RECENT)) for key in run.steps[-1] if key.startswith(prefix)}
        causes.pop(f"{prefix}total", None)
        most = max(causes, key=lambda key: causes[key])
        evidence = (f"engine_idle/total is {mean(total):.2f}; the most of it: {most} is {causes[most]:.2f}",)
        yield Finding(
            "hint", "engines are idle most of the time", evidence, ("docs/how_to/diagnosis.md has what helps by cause",)
        )
    tail = run.recent("slot_idle/long_tail", RECENT)
    if tail and mean(tail) > IDLE:
        evidence = (f"slot_idle/long_tail is {mean(tail):.2f}: a few long episodes end after all others",)
        advice = ("smaller rollout.max_turns or sampler.max_new_tokens; a larger rollout.batch_size",)
        yield Finding("hint", "the long tail of the rollouts leaves slots unused", evidence, advice)
