"""Checks of what goes on while the learner trains, across sections: episodes, evaluations, and groups that are replaced."""

from __future__ import annotations

from collections.abc import Iterator

from agentrl.config.schema import Config


def check_asynchronous(config: Config) -> Iterator[str]:
    """Yield what does not fit together."""
    yield from _asynchronous(config)
    yield from _streaming(config)
    yield from _background_evaluation(config)
    yield from _dynamic_sampling(config)


def _asynchronous(config: Config) -> Iterator[str]:
    """What cannot go on while the learner trains, and whether old tokens are corrected for."""
    key, limit = f"async.max_staleness={config.asynchronous.max_staleness}", config.asynchronous.mask_older_than
    if limit is not None and limit >= config.asynchronous.max_staleness:
        yield f"async.mask_older_than={limit} with {key}: no token is older; set a smaller number, or leave it out"
    if not config.asynchronous.max_staleness:
        return
    if config.weights.sync_every > config.asynchronous.max_staleness + 1:
        yield (
            f"{key} with weights.sync_every={config.weights.sync_every}: before the next sync, all tokens that engines "
            f"sample are too old; set weights.sync_every to {config.asynchronous.max_staleness + 1} or less, or raise "
            "async.max_staleness"
        )
    if config.algo.old_logprobs == "learner" and config.algo.correction.rollout_is == "none":
        yield (
            f"algo.old_logprobs=learner with {key}: tokens are older than the learner's weights, and nothing corrects for it; "
            "set algo.correction.rollout_is=token, or algo.old_logprobs=sampler"
        )


def _streaming(config: Config) -> Iterator[str]:
    """Whether the gradient of a group can be computed before all groups of its step are there."""
    if not config.asynchronous.streaming:
        return
    algo = config.algo
    whole = {
        f"train.steps_per_rollout={config.train.steps_per_rollout}": config.train.steps_per_rollout > 1,
        "algo.correction of all tokens": algo.correction.needs_all_tokens,
        "algo.distillation.teachers": bool(algo.distillation.teachers),
        "learner.lora.policies": config.learner.lora is not None and len(config.learner.lora.policies) > 1,
        f"async.mask_older_than={config.asynchronous.mask_older_than}": config.asynchronous.mask_older_than is not None,
        "placement.mode=colocate": config.placement.shares_gpus,
        "learner.megatron.overlap_grad_reduce": bool(config.learner.megatron.get("overlap_grad_reduce")),
    }
    for key in (name for name, is_set in whole.items() if is_set):
        yield f"async.streaming=true with {key}: it needs all groups of a step; leave it out, or async.streaming"


def _background_evaluation(config: Config) -> Iterator[str]:
    """Whether engines and weights can stay with an evaluation while the learner trains."""
    key = f"eval.engines={config.eval.engines}"
    if config.eval.engines and not config.eval.background:
        yield f"{key} without eval.background: engines and learner would take turns; set eval.background=true"
    if config.eval.engines and config.placement.reserves_gpus:
        yield (
            f"{key} with placement.mode={config.placement.mode}: engines that only evaluate are not placed; set "
            "placement.mode=separate, or eval.engines=0"
        )


def _dynamic_sampling(config: Config) -> Iterator[str]:
    """How many groups may run ahead of a step, and whether filtered ones can be replaced."""
    staleness, rollout = config.asynchronous.max_staleness, config.rollout
    most = rollout.over_sampling_batch_size
    if most is not None and not rollout.batch_size <= most <= (staleness + 1) * rollout.batch_size:
        yield (
            f"rollout.over_sampling_batch_size={most} with async.max_staleness={staleness}: a step takes "
            f"rollout.batch_size={rollout.batch_size} groups, and the next async.max_staleness steps train the others; set "
            "it from rollout.batch_size to rollout.batch_size * (async.max_staleness + 1), or raise async.max_staleness"
        )
    if rollout.straggler_timeout_s and not staleness:
        yield (
            f"rollout.straggler_timeout_s={rollout.straggler_timeout_s:g} with async.max_staleness=0: a step waits for all of "
            "its groups, however long they take; raise async.max_staleness, or leave it out"
        )
