"""Why a run does not learn, from its metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice, pairwise
from math import hypot, isnan, nan
from statistics import median, stdev

from agentrl.core.errors import UserError
from agentrl.core.registry import make_any_env
from agentrl.core.types import Rollout
from agentrl.doctor.record import Finding, RunRecord, mean
from agentrl.obs.rollouts import rollout_files, scan_rollouts

RECENT = 10
"""Steps that are judged."""
FLAT_STEPS = 20
"""Least steps for a judgement of the reward."""
SOLVED = 0.95
"""A constant mean reward from this on is no problem: most rewards are at most 1."""
FLAT_GROUPS = 0.8
FILTERED = 0.75
TRUNCATED = 0.5
LIMITS = {
    "max_tokens": "rollout.max_tokens, sampler.max_new_tokens",
    "max_turns": "rollout.max_turns",
    "max_time": "rollout.max_seconds",
    "truncated": "the environment's limit of steps",
}
"""The keys of stop reasons that cut an episode."""
TRUNCATED_GROWTH = 3.0
"""A quarter of the episodes is many if it is so many times the share before."""
COLLAPSED_NATS, COLLAPSED_SHARE, GROWN_NATS = 0.05, 0.2, 3.0
"""Entropy below the first, or half of the second, and below this share of its first values has collapsed; above so many times
its first values it has exploded."""
GROWN_LENGTH, SHRUNK_LENGTH = 4.0, 0.2
"""Tokens of an episode above and below so many times those of the first steps are worth a look."""
SAMPLER_KL = 0.01
"""From this KL divergence on engine and learner disagree on the policy."""
RATIO = 10.0
CLIPPED = 0.3
IDLE = 0.5
LEAST_STEP_S = 5.0
"""Shorter steps are those of a trial, whose engines may be idle."""
LARGE_KL, KL_GROWTH, NOTABLE_KL = 1.0, 10.0, 0.1
"""Nats a token: a KL divergence to the reference from which on the policy is another one; or growth to so many times the
values before, from a notable one on."""
LARGE_NORM = 100.0
"""A gradient norm that is so many times `learner.optimizer.max_grad_norm`, and the norms before, has exploded; or a tenth of it
for half of the steps."""
PROMPTS = 8
"""Recorded prompts in which the environment's tools are looked for."""
FAILING = 0.3
"""From this share on failures of a tool are a problem."""
SLOW_TOOLS = 0.5
"""From this share of the slots' time on episodes wait for tools too long."""
FEW_SLOTS, ROLLOUT_SHARE = 8, 0.7
"""A step with so many times the episodes that run at a time, and this share of its time in sampling, waits for them."""
CONSTANT_STEPS = 3
"""Least steps in which all rewards are equal."""
CHANGED_LENGTH = 1.15
"""Turns that are so many times as long, or as short, are those of another policy."""
COLLAPSE_STEPS = 10
"""Least steps for a judgement of a reward that collapses."""


def learning_findings(run: RunRecord) -> Iterator[Finding]:
    """Yield what keeps the run from learning, and what makes it slow."""
    # Causes stand before their symptoms: without reward variance, for example, every other metric is still.
    for check in (
        _null_metrics,
        _gradients,
        _kl,
        _gradient_norm,
        _mismatch,
        _cut_distribution,
        _unread_tools,
        _failing_tools,
        _truncated_episodes,
        _cut_turns,
        _filtered_groups,
        _entropy,
        _constant_reward,
        _variance,
        _unchanged_weights,
        _evaluations,
        _reward,
        _untrained_tokens,
        _ratio,
        _critic,
        _length,
        _slow_tools,
        _few_slots,
        _idle,
    ):
        yield from check(run)


def _unread_tools(run: RunRecord) -> Iterator[Finding]:
    """Yield that the environment's tools are in no prompt: the chat template may have no place for them."""
    config, files = run.config, rollout_files(run.folder)
    if config.sources or config.rollout.loop is not None or not files:
        return
    try:
        tools = make_any_env(config.env.name, config.env.options).tools
        scanned = islice(scan_rollouts(files[max(files)]), PROMPTS)
        prompts = [scan.rollout.prompt for scan in scanned if isinstance(scan.rollout, Rollout) and scan.rollout.prompt]
    except UserError:
        return  # such as an environment that this machine does not have
    unread = [tool.name for tool in tools if not any(tool.name in prompt for prompt in prompts)]
    if prompts and unread:
        evidence = (
            f"none of the {len(prompts)} prompts that were read has {', '.join(unread)} of env.name={config.env.name}",
        )
        advice = (
            "render.tool_preamble=true describes them in the system message; render.chat_template=FILE may have a place for them",
        )
        yield Finding("problem", "the policy never reads its tools", evidence, advice)


def _failing_tools(run: RunRecord) -> Iterator[Finding]:
    """Yield the tools that answer too few calls."""
    for name in _tool_names(run):
        calls = sum(run.recent(f"tool/{name}/calls", RECENT))
        share = _tool_total(run, name, "failed_share") / max(1.0, calls)
        if share >= FAILING:
            evidence = (f"{share:.0%} of {calls:.0f} calls of {name} in the last {len(run.steps[-RECENT:])} steps",)
            advice = (
                f"`agentrl view --steps` shows what {name} answers; run it by hand: it raises, times out or is killed",
                "the tool's timeout_s; sandbox.limits for code",
            )
            yield Finding("problem", "calls of a tool fail", evidence, advice)


def _slow_tools(run: RunRecord) -> Iterator[Finding]:
    """Yield that episodes wait for tools most of the time, with the tool that takes the most of it."""
    idle_shares = run.recent("slot_idle/tools", RECENT)
    seconds = {name: _tool_total(run, name, "seconds") for name in _tool_names(run)}
    if not seconds or not idle_shares or mean(idle_shares) < SLOW_TOOLS:
        return
    slowest = max(seconds, key=lambda name: seconds[name])
    evidence = (
        f"slot_idle/tools is {mean(idle_shares):.2f} over the last {len(idle_shares)} steps",
        f"tool/{slowest}/seconds is {mean(run.recent(f'tool/{slowest}/seconds', RECENT)):.2f}; "
        f"{seconds[slowest] / max(1e-9, sum(seconds.values())):.0%} of the time in tools",
    )
    advice = (
        f"make {slowest} faster, or give its server more workers or machines (tools.{slowest}.url takes several)",
        "a larger rollout.concurrency, so that engines work meanwhile",
    )
    yield Finding("hint", "episodes wait for a tool most of the time", evidence, advice)


def _tool_total(run: RunRecord, name: str, metric: str) -> float:
    """Return the sum of a metric that is a mean over a tool's calls, over its calls of the last steps."""
    calls, value = f"tool/{name}/calls", f"tool/{name}/{metric}"
    return sum(row.get(calls, 0.0) * row.get(value, 0.0) for row in run.steps[-RECENT:])


def _tool_names(run: RunRecord) -> list[str]:
    """Return the names of the tools that were called in the last steps."""
    keys = {key for row in run.steps[-RECENT:] for key in row if key.startswith("tool/") and key.endswith("/calls")}
    return sorted(key.removeprefix("tool/").removesuffix("/calls") for key in keys)


def _cut_turns(run: RunRecord) -> Iterator[Finding]:
    """Yield that most turns are cut since the start and nothing is learned; an environment may read the beginning alone."""
    shares, flat = run.recent("rollout/cut_turns", RECENT), run.recent("train/flat_groups", RECENT)
    first = [_cut_share(row) for row in run.steps[:3]]
    rewards = run.recent("train/reward", RECENT)
    is_stuck = (
        flat and mean(flat) >= FLAT_GROUPS and mean(rewards) < SOLVED and rewards[-1] <= run.values("train/reward")[0]
    )
    if shares and min(mean(shares), mean(first)) >= TRUNCATED and is_stuck:
        evidence = (
            f"rollout/cut_turns is {mean(shares):.2f} over the last {len(shares)} steps: turns that end by a limit of tokens",
            f"sampler.max_new_tokens={run.config.sampler.max_new_tokens}",
        )
        advice = ("raise sampler.max_new_tokens, rollout.max_tokens", "algo.overlong shapes the reward of long answers")
        yield Finding("problem", "limits cut most turns", evidence, advice)


def _constant_reward(run: RunRecord) -> Iterator[Finding]:
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
            for read in (_turn_length, _cut_share)
        )
        if not 1 / CHANGED_LENGTH < length / max(first_length, 1e-9) < CHANGED_LENGTH or cut > first_cut + FAILING:
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


def _cut_share(row: Mapping[str, float]) -> float:
    return row.get("rollout/cut_turns", 0.0)


def _variance(run: RunRecord) -> Iterator[Finding]:
    flat, rewards = run.recent("train/flat_groups", RECENT), run.recent("train/reward", RECENT)
    if not flat or mean(flat) < FLAT_GROUPS or mean(rewards) >= SOLVED:
        return
    if any(_constant_reward(run)):
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


def _filtered_groups(run: RunRecord) -> Iterator[Finding]:
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


def _truncated_episodes(run: RunRecord) -> Iterator[Finding]:
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


def _length(run: RunRecord) -> Iterator[Finding]:
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


def _untrained_tokens(run: RunRecord) -> Iterator[Finding]:
    """Yield that much of what is sampled does not train the policy, although it has an advantage."""
    evidence = []
    for key, limit, keys in (
        ("async/masked_share", 0.5, "async.mask_older_than, async.max_staleness"),
        ("train/correction_rejected", 0.5, "algo.correction"),
        ("train/provenance_faults", 0.0, "train.provenance"),
    ):
        values = run.recent(key, RECENT)
        if values and mean(values) > limit:
            evidence.append(f"{key} is {mean(values):.2f} over the last {len(values)} steps ({keys})")
    sizes = run.recent("train/effective_sample_size", RECENT)
    if sizes and mean(sizes) < 0.1:
        evidence.append(f"train/effective_sample_size is {mean(sizes):.3f}: few tokens have all the weight")
    if evidence:
        advice = (
            "fresher rollouts (async.max_staleness, weights.sync_every), or wider limits of the keys named above",
        )
        yield Finding("hint", "much of what is sampled is not trained", tuple(evidence), advice)


def _critic(run: RunRecord) -> Iterator[Finding]:
    values = run.values("train/value_explained_variance")
    if len(values) >= FLAT_STEPS and mean(values[-RECENT:]) < 0:
        evidence = (
            f"train/value_explained_variance is {mean(values[-RECENT:]):.2f} over the last {RECENT} steps; below 0 a constant is "
            "better",
        )
        advice = (
            "algo.critic.optimizer.lr, algo.critic.warmup_steps, algo.critic.value_clip; algo.advantage.name=grpo needs none",
        )
        yield Finding("hint", "the critic does not predict the returns", evidence, advice)


def _reward(run: RunRecord) -> Iterator[Finding]:
    if any(_constant_reward(run)):
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


def _evaluations(run: RunRecord) -> Iterator[Finding]:
    """Yield the metrics of evaluations that were far better before."""
    goals = {*run.config.train.stop_at, *filter(None, [run.config.train.keep_best])}
    names = {name for row in run.evaluations for name in row if name.startswith("eval/")}
    evidence = []
    for name in sorted(names):
        if "=" in name or not (name.endswith("/reward") or name.removeprefix("eval/") in goals):
            continue
        rows = [row for row in run.evaluations if not isnan(row.get(name, nan))]
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


def _cut_distribution(run: RunRecord) -> Iterator[Finding]:
    """Yield that top-p or top-k cut the distribution that is sampled from, and not the one that is trained."""
    sampler = run.config.sampler
    if sampler.allow_unnormalised and (sampler.top_p < 1 or sampler.top_k > 0):
        evidence = (f"sampler.top_p={sampler.top_p:g}, sampler.top_k={sampler.top_k}, sampler.allow_unnormalised=true",)
        advice = (
            "sampler.top_p=1 and sampler.top_k=-1: ratios, KL divergences and train/sampler_kl are of the whole distribution",
        )
        yield Finding("problem", "engine and learner disagree on the policy, and no metric shows it", evidence, advice)


def _entropy(run: RunRecord) -> Iterator[Finding]:
    values = run.values("train/entropy")
    if len(values) < 4:
        return
    first, last = mean(values[: max(1, len(values) // 10)]), mean(values[-min(5, len(values) // 2) :])
    evidence = (f"train/entropy: {first:.3f} → {last:.4f} nats",)
    if last < COLLAPSED_SHARE * first and last < max(COLLAPSED_NATS, COLLAPSED_SHARE / 2 * first):
        advice = (
            "algo.entropy_coef above 0, a smaller learner.optimizer.lr, or the recipe algo/dapo, which clips higher above",
        )
        yield Finding("hint", "the entropy has collapsed: samples of a task are alike", evidence, advice)
    elif last > max(1.0, GROWN_NATS * first):
        advice = ("a smaller algo.entropy_coef or learner.optimizer.lr; algo.kl_coef above 0",)
        yield Finding("hint", "the entropy explodes: samples become random", evidence, advice)


def _kl(run: RunRecord) -> Iterator[Finding]:
    evidence = []
    for key in [*run.family("train/kl", RECENT), *run.family("train/teacher_kl", RECENT)]:
        values = run.values(key)
        recent = values[-min(RECENT, (len(values) + 1) // 2) :]
        earlier = values[: -len(recent)]
        is_large = mean(recent) > LARGE_KL and not key.startswith("train/teacher_kl") if recent else False
        grows = len(earlier) >= 3 and mean(recent) > max(NOTABLE_KL, KL_GROWTH * abs(median(earlier)))
        if is_large or grows:
            before = f"{median(earlier):.3f} before (median), " if earlier else ""
            end = f"{mean(recent):.3f} nats over the last {len(recent)} steps, {values[-1]:.3f} in the last"
            evidence.append(f"{key}: {before}{end}")
    if evidence:
        advice = (
            "a smaller learner.optimizer.lr or train.steps_per_rollout; a larger algo.kl_coef; algo.kl_kind=low_var_kl cuts off "
            "single tokens",
            "the policy before it is in an earlier checkpoint (train.keep, train.keep_best)",
        )
        yield Finding("problem", "the KL divergence to the reference explodes", tuple(evidence), advice)


def _mismatch(run: RunRecord) -> Iterator[Finding]:
    values = run.recent("train/sampler_kl", RECENT)
    if not values or mean(values) < SAMPLER_KL:
        return
    all_values = run.values("train/sampler_kl")
    gap = run.recent("train/sampler_gap_max", RECENT)
    evidence = [
        f"train/sampler_kl: {all_values[0]:.4f} in the first step, {mean(values):.4f} over the last {len(values)}"
    ]
    if gap:
        evidence.append(f"train/sampler_gap_max is {max(gap):.2f}")
    grown = all_values[0] < SAMPLER_KL / 5
    cause = (
        "it has grown: engines may sample with old weights; weights.check=checksum compares them after each sync"
        if grown
        else "it was large from the start: another numerical precision, chat template, or model in the engine"
    )
    advice = (
        cause,
        "algo.correction weighs or masks tokens on which both differ; algo.routing_replay for mixtures of experts",
    )
    yield Finding("problem", "engine and learner disagree on the policy", tuple(evidence), advice)


def _ratio(run: RunRecord) -> Iterator[Finding]:
    ratios, clipped = run.recent("train/ratio_max", RECENT), run.recent("train/clip_fraction", RECENT)
    evidence = []
    if ratios and mean(ratios) > RATIO:
        evidence.append(f"train/ratio_max is {mean(ratios):.1f} over the last {len(ratios)} steps")
    if clipped and mean(clipped) > CLIPPED:
        evidence.append(f"train/clip_fraction is {mean(clipped):.2f} over the last {len(clipped)} steps")
    if evidence:
        advice = ("a smaller learner.optimizer.lr or train.steps_per_rollout; algo.correction",)
        yield Finding("hint", "the policy moves far from what sampled its tokens", tuple(evidence), advice)


def _gradients(run: RunRecord) -> Iterator[Finding]:
    broken = run.recent("train/nonfinite_gradients", RECENT)
    if sum(broken) > 0:
        steps = sum(value > 0 for value in broken)
        evidence = (f"train/nonfinite_gradients: {sum(broken):.0f} in {steps} of the last {len(broken)} steps",)
        advice = ("a smaller learner.optimizer.lr, or learner.precision=float32",)
        yield Finding("problem", "gradients are not finite, so optimizer steps are skipped", evidence, advice)


def _null_metrics(run: RunRecord) -> Iterator[Finding]:
    rows = [*run.steps[-RECENT:], *run.evaluations[-1:]]
    names = sorted(
        {
            name
            for row in rows
            for name, value in row.items()
            if isnan(value) and (name.startswith("train/") or (name.startswith("eval/") and name.endswith("/reward")))
        }
    )
    if not names:
        return
    evidence = []
    for name in names:
        steps = [f"{row['step']:.0f}" for row in (*run.steps, *run.evaluations) if isnan(row.get(name, 0.0))]
        evidence.append(f"{name} is null in {len(steps)} steps, the first was {steps[0]}, the last {steps[-1]}")
    advice = (
        "a smaller learner.optimizer.lr, or learner.precision=float32; resume from a checkpoint before the first such step",
        "`agentrl view --steps` shows the rollouts of that step: a reward or an advantage that is not finite",
    )
    yield Finding("problem", "metrics are not finite", tuple(evidence), advice)


def _gradient_norm(run: RunRecord) -> Iterator[Finding]:
    evidence = []
    limits = {
        "train/grad_norm": run.config.learner.optimizer.max_grad_norm,
        "train/value_grad_norm": run.config.algo.critic.optimizer.max_grad_norm,
    }
    for family, max_grad_norm in limits.items():
        for key in run.family(family, RECENT):
            values, recent = run.values(key), run.recent(key, RECENT)
            limit = LARGE_NORM * max(1.0, max_grad_norm)
            is_large = recent and (median(recent) > limit or max(recent) > limit * max(1.0, median(values)))
            earlier = values[: -len(recent)]
            grows = earlier and median(recent) > max(limit / 10, LARGE_NORM / 2 * median(earlier))
            if is_large or grows:
                sizes = f"median {median(recent):.3g}, at most {max(recent):.3g}"
                evidence.append(f"{key}: {sizes} over the last {len(recent)} steps")
    if evidence:
        advice = (
            "larger gradients are scaled down to learner.optimizer.max_grad_norm, so a single rollout may decide a step: a "
            "smaller learner.optimizer.lr, rewards of a smaller scale",
            "algo.correction.rollout_is_threshold, algo.loss.options: smaller ratios; batch.aggregation=token_mean",
        )
        yield Finding("problem", "the gradient norm explodes", tuple(evidence), advice)


def _unchanged_weights(run: RunRecord) -> Iterator[Finding]:
    norms, rates = run.recent("train/grad_norm", RECENT), run.recent("train/lr", RECENT)
    evidence = []
    if norms and max(norms) <= 0:
        evidence.append(f"train/grad_norm is 0 in the last {len(norms)} steps")
    if rates and max(rates) <= 0:
        evidence.append(f"train/lr is 0 in the last {len(rates)} steps")
    versions = run.recent("train/version", RECENT)
    if len(versions) == RECENT and versions[0] == versions[-1]:
        evidence.append(f"train/version is {versions[-1]:.0f} in all of the last {RECENT} steps")
    unchanged = run.recent("sync/unchanged", RECENT)
    if unchanged and min(unchanged) > 0:
        evidence.append(f"sync/unchanged is 1 in the last {len(unchanged)} steps")
    if evidence and not any(_constant_reward(run)):
        advice = (
            "learner.optimizer, with its warm-up and decay; all advantages are 0 if no group has reward variance",
        )
        yield Finding(
            "problem", "optimizer steps change no weight, so a weight sync changes nothing", tuple(evidence), advice
        )


def _few_slots(run: RunRecord) -> Iterator[Finding]:
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


def _idle(run: RunRecord) -> Iterator[Finding]:
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
