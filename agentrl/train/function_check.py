"""Functions of users, tried on recorded rollouts: what they return, how long they take, and what breaks their contracts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from statistics import fmean

import numpy as np
import torch

from agentrl.algo.base import AdvantageInput, LossInput, RowValues
from agentrl.algo.batch_loss import call_policy_loss
from agentrl.algo.estimate import RunEstimators
from agentrl.algo.registry import estimator_class, make_policy_loss
from agentrl.batch.groups import KEY as FILTERS_KEY
from agentrl.batch.groups import GroupFilters, RolloutGroups, group_rollouts, kept_rollouts
from agentrl.batch.sample_conversion import KEY as CONVERT_KEY
from agentrl.batch.sequences import group_sequences
from agentrl.config.algo import AlgoConfig
from agentrl.config.rewards import RewardConfig, RewardFunctionConfig
from agentrl.config.rollout import FilterGroupsConfig
from agentrl.config.schema import Config
from agentrl.core.callback import OptimizerBatch, RunHandle
from agentrl.core.errors import CallbackError, ConfigError, UngradedError
from agentrl.core.imports import is_reference
from agentrl.rewards.grader import make_grader
from agentrl.train.callbacks import KEY as CALLBACKS_KEY
from agentrl.train.callbacks import RunCallbacks, load_callbacks
from agentrl.train.data_function_check import check_buffer_filter, check_data_source, check_evaluation
from agentrl.train.function_report import FunctionReport, RecordedStep
from agentrl.train.loop_function_check import check_generate
from agentrl.train.sample_function_check import check_conversion, check_post_process

_LOG_RATIO = 0.3
"""Standard deviation of the random log-ratios at which a policy loss is tried: some tokens are beyond the usual clip range."""
_RTOL, _ATOL = 1e-4, 1e-5


async def check_functions(config: Config, step: RecordedStep) -> list[FunctionReport]:
    """Try all functions of users that a configuration names on the rollouts of a recorded step.

    Raises:
        ConfigError: it names none that can be tried without an engine.
    """
    reports = [
        *[
            await _check_reward(name, reward, step)
            for name, reward in config.reward.by_name.items()
            if _is_users(reward)
        ],
        *[_check_filter(name, step) for name in config.rollout.filter_groups.filters if is_reference(name)],
        *([check_conversion(config.batch.convert, step)] if config.batch.convert is not None else []),
        *_check_algorithms(config.algo, step),
        *[
            check_data_source(source_config, source, step)
            for source, source_config in config.by_source().items()
            if is_reference(source_config.tasks.data_source.name)
        ],
        *[
            await check_generate(source_config, source, step)
            for source, source_config in config.by_source().items()
            if source_config.rollout.generate is not None
        ],
        *([check_buffer_filter(config, step)] if config.rollout.buffer_filter is not None else []),
        *([await check_evaluation(config, step)] if config.eval.function is not None else []),
        *[await _check_callback(reference, config, step) for reference in config.train.callbacks],
    ]
    if not reports:
        raise ConfigError(
            "no function to try: name one by its key, such as reward=my_rewards.py:score, "
            f"{FILTERS_KEY}=[my_filters.py:keep], algo.advantage.name=my_algo.py:Estimator, algo.loss.name=my_algo.py:Loss, "
            f"{CONVERT_KEY}=my_samples.py:convert, eval.function=my_evaluation.py:evaluate, rollout.generate=my_loop.py:generate "
            f"or {CALLBACKS_KEY}=[my_callbacks.py:Callback]. agentrl env check tries environments"
        )
    return reports


def _is_users(reward: RewardFunctionConfig) -> bool:
    return reward.function is not None and is_reference(reward.function)


async def _check_reward(name: str, reward: RewardFunctionConfig, step: RecordedStep) -> FunctionReport:
    """Score the rollouts twice."""
    key = "reward.function" if name == reward.function else f"reward.functions.{name}.function"
    report = FunctionReport(key, str(reward.function))
    settings = {field_name: getattr(reward, field_name) for field_name in ("function", "key", "timeout_s")}
    try:
        grader = make_grader(RewardConfig(**settings, on_error="drop"))
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    assert grader is not None
    scores: list[dict[str, float]] = [{}, {}]
    failures: dict[str, set[str]] = {}
    for scored in scores:
        for group in step.groups:
            rollouts = kept_rollouts(group)
            begun = time.perf_counter()
            await grader.grade(rollouts)
            report.seconds.append((time.perf_counter() - begun) / max(1, len(rollouts)))
            scored |= {rollout.rollout_id: rollout.reward for rollout in rollouts if not rollout.dropped}
            for rollout in rollouts:
                if rollout.dropped and rollout.failure is not None:
                    failures.setdefault(rollout.failure.message, set()).add(rollout.rollout_id)
    first, second = scores
    if first:
        rewards = [*first.values()]
        recorded = fmean(rollout.reward for rollout in step.rollouts if rollout.rollout_id in first)
        report.lines += [
            f"{len(first)} rollouts scored {fmean(rewards):.4g} in the mean, from {min(rewards):.4g} to {max(rewards):.4g}; "
            f"their recorded rewards are {recorded:.4g} in the mean",
            report.time("a rollout"),
        ]
        changed = sum(first[name] != second.get(name) for name in first)
        if changed:
            report.lines.append(f"{changed} rollouts were scored differently the second time")
        if len(set(rewards)) == 1:
            report.lines.append("all rewards are equal: nothing can be learned from them")
    by_count = sorted(failures.items(), key=lambda failure: -len(failure[1]))
    report.faults += [f"{len(rollout_ids)} rollouts: {message}" for message, rollout_ids in by_count]
    return report


def _check_filter(name: str, step: RecordedStep) -> FunctionReport:
    report = FunctionReport(FILTERS_KEY, name)
    groups, dropped = step.groups, 0
    try:
        filters = GroupFilters(FilterGroupsConfig(filters=[name]))
        for group in groups:
            begun = time.perf_counter()
            dropped += filters.reason(group) == name
            report.seconds.append(time.perf_counter() - begun)
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    report.lines += [f"drops {dropped} of {len(groups)} groups", report.time("a group")]
    if dropped == len(groups):
        report.faults.append(
            "it drops every group, so that a run would end at rollout.filter_groups.max_num_gen_batches: it must return False "
            "for a group that is trained"
        )
    return report


def _check_algorithms(algo: AlgoConfig, step: RecordedStep) -> Iterator[FunctionReport]:
    for source, source_algo in algo.by_source.items():
        prefix = f"sources.{source}." if source else ""
        if source_algo.reward_post_process is not None:
            yield check_post_process(prefix, source_algo, step)
        if is_reference(source_algo.advantage.name):
            yield _check_estimator(prefix, source_algo, step)
        if is_reference(source_algo.loss.name):
            yield _check_loss(prefix, source_algo, step)


def _check_estimator(prefix: str, algo: AlgoConfig, step: RecordedStep) -> FunctionReport:
    report = FunctionReport(f"{prefix}algo.advantage.name", algo.advantage.name)
    groups = step.trained
    try:
        streams = estimator_class(algo.advantage).streams
        begun = time.perf_counter()
        advantages = _advantages(algo, groups)
        report.seconds.append(time.perf_counter() - begun)
        by_group = [_advantages(algo, part) for part in _split_groups(groups)] if streams else []
    except (ConfigError, UngradedError) as error:
        report.faults.append(str(error))
        return report
    trained = np.concatenate([advantages[row.key][row.mask.astype(bool)] for row in groups.rows])
    report.lines += [
        f"{len(trained)} trained tokens with advantages from {trained.min():.4g} to {trained.max():.4g}, "
        f"{trained.mean():.4g} in the mean; 0 for {np.mean(trained == 0):.0%}",
        report.time("a step"),
    ]
    if by_group and not all(
        np.allclose(part[key], advantages[key], rtol=_RTOL, atol=_ATOL) for part in by_group for key in part
    ):
        report.faults.append(
            "streams=True says that a group's advantages depend on no other group, and those of a group alone are others: "
            "set streams=False"
        )
    return report


def _advantages(algo: AlgoConfig, groups: RolloutGroups) -> RowValues:
    """Return the advantages of a new estimator, with values of 0 where it reads a critic's."""
    estimators = RunEstimators({"": algo})
    values = {row.key: np.zeros(len(row.mask), np.float32) for row in groups.rows}
    inputs = AdvantageInput(groups, values=values if estimator_class(algo.advantage).needs_critic else {})
    advantages = estimators.advantages("", inputs)
    estimators.update([("", inputs)])
    estimators.load_state(estimators.state())
    return advantages


def _split_groups(groups: RolloutGroups) -> Iterator[RolloutGroups]:
    for task in groups.prompt_ids_G:
        yield group_rollouts(rollout for rollout in groups.rollouts_N if rollout.prompt_id == task)


def _check_loss(prefix: str, algo: AlgoConfig, step: RecordedStep) -> FunctionReport:
    """Try a policy loss where the policy equals the sampler, and at random ratios around it."""
    report = FunctionReport(f"{prefix}algo.loss.name", algo.loss.name)
    inputs = _loss_input(step)
    try:
        loss = make_policy_loss(algo.loss)
        generator = torch.Generator().manual_seed(0)
        for where, deviation in (("at the sampler's policy", 0.0), ("at random ratios around it", _LOG_RATIO)):
            log_ratio_N = deviation * torch.randn(len(inputs.logprobs_N), generator=generator)
            logprobs_N = (inputs.logprobs_N + log_ratio_N).clamp(max=0.0).requires_grad_()
            begun = time.perf_counter()
            token = call_policy_loss(loss, logprobs_N, inputs.logprobs_N, inputs)
            total = (inputs.weight_N * token.loss_N).sum()
            report.seconds.append(time.perf_counter() - begun)
            if not total.requires_grad:
                report.faults.append(f"{where}, the loss has no gradient: it must depend on logprobs_N")
                continue
            (gradient_N,) = torch.autograd.grad(total, logprobs_N)
            report.lines.append(
                f"{where}: {total.item():.4g}, norm of the gradient {gradient_N.norm().item():.4g}, "
                f"{token.clipped_N.float().mean().item():.0%} of the tokens clipped"
            )
            report.faults += [f"{where}, {fault}" for fault in _loss_faults(total, gradient_N, token.clipped_N)]
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    report.lines.append(report.time(f"for {len(inputs.logprobs_N)} tokens"))
    return report


def _loss_faults(total: torch.Tensor, gradient_N: torch.Tensor, clipped_N: torch.Tensor) -> Iterator[str]:
    if not torch.isfinite(total):
        yield f"the loss is {total.item()}"
    if not torch.isfinite(gradient_N).all():
        yield f"the gradient of {int((~torch.isfinite(gradient_N)).sum())} tokens is not finite"
    if clipped_N.dtype != torch.bool:
        yield f"clipped_N is {clipped_N.dtype}; it must be bool"
    elif (moving := int((gradient_N[clipped_N] != 0).sum())) > 0:
        yield f"{moving} tokens have a gradient and count as clipped in clipped_N"


def _loss_input(step: RecordedStep) -> LossInput:
    """Return the trained tokens of a step as one micro-batch, with the recorded rewards, centered by task, as advantages."""
    means: dict[str, float] = {}
    for group in step.groups:
        if kept := kept_rollouts(group):
            means[group[0].prompt_id] = fmean(rollout.reward for rollout in kept)
    rewards = {
        rollout.rollout_id: rollout.reward - means[rollout.prompt_id]
        for rollout in step.rollouts
        if not rollout.dropped
    }
    sequences = group_sequences(step.trained.rows)
    logprobs = [sequence.gather({row.key: row.logprobs for row in sequence.rows}) for sequence in sequences]
    sizes = torch.tensor([len(values) for values in logprobs])
    names = [sequence.rows[0].key.rollout_id for sequence in sequences]
    count = int(sizes.sum())
    return LossInput(
        weight_N=torch.full((count,), 1 / max(1, count)),
        advantages_N=torch.tensor([rewards[name] for name in names]).float().repeat_interleave(sizes),
        logprobs_N=torch.tensor(np.concatenate(logprobs)).float(),
        sequence_N=torch.arange(len(sequences)).repeat_interleave(sizes),
        sequence_size_N=sizes.repeat_interleave(sizes).float(),
        sequences=len(sequences),
    )


async def _check_callback(reference: str, config: Config, step: RecordedStep) -> FunctionReport:
    """Call the hooks of a training step as a run does: rollouts, batch, step, weights, evaluation."""
    report = FunctionReport(CALLBACKS_KEY, reference)
    try:
        callbacks = load_callbacks([reference])
    except ConfigError as error:
        report.faults.append(str(error))
        return report
    handle = RunHandle(
        step.folder,
        config.model_dump(mode="json", by_alias=True),
        config.train.steps or step.step,
        max(0, step.step - 1),
    )
    run = RunCallbacks(callbacks, handle)
    evaluation = {name: value for name, value in step.metrics.items() if name.startswith("eval/")}
    added: dict[str, float] = {}
    hooks: dict[str, Callable[[], object]] = {
        "on_rollouts": lambda: run.on_rollouts(step.rollouts),
        "on_batch": lambda: run.on_batch(OptimizerBatch(step.step, 0, 1, "main", 1.0, step.metrics)),
        "on_step": lambda: run.on_step(step.metrics),
        "on_weights_synced": run.on_weights_synced,
        "on_eval": lambda: run.on_eval(step.step, evaluation),
    }
    for name, hook in hooks.items():
        begun = time.perf_counter()
        try:
            result = await hook()  # type: ignore[misc]
        except CallbackError as error:
            report.faults.append(str(error))
            continue
        report.seconds.append(time.perf_counter() - begun)
        if name == "on_rollouts":
            handle.step = step.step
        added = result if name == "on_step" else added
    if report.seconds:
        report.lines.append(report.time("a hook"))
    if added:
        report.lines.append("adds " + ", ".join(f"{name}={value:g}" for name, value in added.items()))
    if handle.stop_reason is not None:
        report.lines.append(f"stops the run: {handle.stop_reason}")
    return report
