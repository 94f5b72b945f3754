"""What the metrics of optimizer steps say: gradients, divergences, entropy, ratios, weights."""

from __future__ import annotations

from collections.abc import Iterator
from math import isnan
from statistics import median

from agentrl.doctor.record import FLAT_STEPS, RECENT, Finding, RunRecord, mean
from agentrl.doctor.reward_checks import constant_reward
from agentrl.runtime.engine_gap import GapBand

COLLAPSED_NATS, COLLAPSED_SHARE, GROWN_NATS = 0.05, 0.2, 3.0
"""Entropy below the first, or half of the second, and below this share of its first values has collapsed; above so many times
its first values it has exploded."""
SAMPLER_KL = 0.01
"""From this KL divergence on engine and learner disagree on the policy, if the run has no limit for its precision."""
_GAP_OF_TURN = "sync/gap/turn="
RATIO = 10.0
CLIPPED = 0.3
LARGE_KL, KL_GROWTH, NOTABLE_KL = 1.0, 10.0, 0.1
"""Nats a token: a KL divergence to the reference from which on the policy is another one; or growth to so many times the
values before, from a notable one on."""
LARGE_NORM = 100.0
"""A gradient norm that is so many times `learner.optimizer.max_grad_norm`, and the norms before, has exploded; or a tenth of it
for half of the steps."""


def null_metrics(run: RunRecord) -> Iterator[Finding]:
    """Yield the metrics that are not finite."""
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


def nonfinite_gradients(run: RunRecord) -> Iterator[Finding]:
    """Yield that gradients are not finite."""
    broken = run.recent("train/nonfinite_gradients", RECENT)
    if sum(broken) > 0:
        steps = sum(value > 0 for value in broken)
        evidence = (f"train/nonfinite_gradients: {sum(broken):.0f} in {steps} of the last {len(broken)} steps",)
        advice = ("a smaller learner.optimizer.lr, or learner.precision=float32",)
        yield Finding("problem", "gradients are not finite, so optimizer steps are skipped", evidence, advice)


def gradient_norm(run: RunRecord) -> Iterator[Finding]:
    """Yield that the gradient norm explodes."""
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


def kl_divergence(run: RunRecord) -> Iterator[Finding]:
    """Yield that the KL divergence to the reference, or to a teacher, explodes."""
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


def _sampler_limit(run: RunRecord) -> float:
    """Return the KL divergence from which on engine and learner disagree: twice that of first turns, which depends on precision.

    Policies that have moved since the tokens were sampled differ as well.
    """
    limits, config = run.values("sync/gap_limit"), run.config
    moves = config.asynchronous.max_staleness or config.weights.sync_every > 1 or config.train.steps_per_rollout > 1
    return max(2 * limits[0], SAMPLER_KL if moves else 0.0) if limits else SAMPLER_KL


def _gaps_by_turn(run: RunRecord, band: GapBand) -> str:
    """Return in words how far engines and learner were apart after the first sync, by depth of turn, with the limits."""
    keys = [key for key in run.family("sync/gap", len(run.steps)) if key.startswith(_GAP_OF_TURN) and run.values(key)]
    gaps = sorted((int(key.removeprefix(_GAP_OF_TURN)), run.values(key)[0]) for key in keys)
    return ", ".join(f"{gap:.2g} in turn {turn} (limit {band.limit(turn):.2g})" for turn, gap in gaps)


def sampler_mismatch(run: RunRecord) -> Iterator[Finding]:
    """Yield that engine and learner disagree on the policy; log-probabilities that the learner alone renormalises are of
    another distribution.
    """
    values, limit = run.recent("train/sampler_kl", RECENT), _sampler_limit(run)
    if not values or mean(values) <= limit or run.config.sampler.renormalise == "learner":
        return
    all_values = run.values("train/sampler_kl")
    gap = run.recent("train/sampler_gap_max", RECENT)
    first_turn = run.values("sync/gap_limit")
    source = "twice sync/gap_limit, which weights.gap_limit sets" if first_turn and limit == 2 * first_turn[0] else ""
    evidence = [
        f"train/sampler_kl: {all_values[0]:.4f} in the first step, {mean(values):.4f} over the last {len(values)}; its limit is "
        f"{limit:g}{source and f' ({source})'}"
    ]
    if gap:
        evidence.append(f"train/sampler_gap_max is {max(gap):.2f}")
    if first_turn:
        evidence.append(f"sync/gap, after the first sync, was {_gaps_by_turn(run, GapBand(first_turn[0]))}")
    grown = all_values[0] < limit / 5
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


def cut_distribution(run: RunRecord) -> Iterator[Finding]:
    """Yield that top-p or top-k cut the distribution that is sampled from, and not the one that is trained."""
    sampler = run.config.sampler
    if sampler.allow_unnormalised and (sampler.top_p < 1 or sampler.top_k > 0):
        evidence = (f"sampler.top_p={sampler.top_p:g}, sampler.top_k={sampler.top_k}, sampler.allow_unnormalised=true",)
        advice = (
            "sampler.top_p=1 and sampler.top_k=-1: ratios, KL divergences and train/sampler_kl are of the whole distribution",
        )
        yield Finding("problem", "engine and learner disagree on the policy, and no metric shows it", evidence, advice)


def entropy(run: RunRecord) -> Iterator[Finding]:
    """Yield that the entropy collapses or explodes."""
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


def policy_ratio(run: RunRecord) -> Iterator[Finding]:
    """Yield that ratios or clipping are large."""
    ratios, clipped = run.recent("train/ratio_max", RECENT), run.recent("train/clip_fraction", RECENT)
    evidence = []
    if ratios and mean(ratios) > RATIO:
        evidence.append(f"train/ratio_max is {mean(ratios):.1f} over the last {len(ratios)} steps")
    if clipped and mean(clipped) > CLIPPED:
        evidence.append(f"train/clip_fraction is {mean(clipped):.2f} over the last {len(clipped)} steps")
    if evidence:
        advice = ("a smaller learner.optimizer.lr or train.steps_per_rollout; algo.correction",)
        yield Finding("hint", "the policy moves far from what sampled its tokens", tuple(evidence), advice)


def critic(run: RunRecord) -> Iterator[Finding]:
    """Yield that the critic predicts worse than a constant."""
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


def untrained_tokens(run: RunRecord) -> Iterator[Finding]:
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


def unchanged_weights(run: RunRecord) -> Iterator[Finding]:
    """Yield that optimizer steps change no weight."""
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
    if evidence and not any(constant_reward(run)):
        advice = (
            "learner.optimizer, with its warm-up and decay; all advantages are 0 if no group has reward variance",
        )
        yield Finding(
            "problem", "optimizer steps change no weight, so a weight sync changes nothing", tuple(evidence), advice
        )
