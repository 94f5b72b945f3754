"""All rules between keys: what a configuration can get wrong although every value fits its own key.

`check` holds for every command; `agentrl.algo.checks` has the rules of what algorithms declare. `check_placement` and
`check_context` are for commands that start engines, so that a configuration for training can be used for an evaluation
elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from string import Formatter

from agentrl.config.async_checks import check_asynchronous
from agentrl.config.schema import Config
from agentrl.config.self_play import PAST
from agentrl.config.weight_checks import check_weight_sync
from agentrl.core.errors import ConfigError
from agentrl.core.imports import is_reference
from agentrl.core.lineup import MAIN

_SGLANG_RESERVES = 6
"""Tokens of its context that SGLang gives neither to prompts nor to answers."""


def check(config: Config) -> None:
    """Check the rules that hold for every command.

    Raises:
        ConfigError: one line for each violated rule, with the keys and a setting that fits.
    """
    rules = (
        _engine_addresses,
        _sampling,
        _task_source,
        _eval_sets,
        _reward,
        _warm_start,
        _curriculum,
        _overlong,
        _algo,
        _distillation,
        _batches,
        check_weight_sync,
        check_asynchronous,
        _self_play,
        _frozen_roles,
        _adapter_policies,
    )
    faults = [fault for rule in rules for fault in rule(config)]
    for name, source in config.by_source().items() if config.sources else ():
        source_faults = [fault for rule in (_task_source, _reward, _overlong) for fault in rule(source)]
        faults += [f"sources.{name}: {fault}" for fault in source_faults if fault not in faults]
    if faults:
        raise ConfigError("\n".join(faults))


def _engine_addresses(config: Config) -> Iterator[str]:
    sampler = config.sampler
    if sampler.url is not None and not sampler.urls:
        yield f"sampler.url={sampler.url!r} holds no address; set sampler.url=http://HOST:PORT, several with commas"
    if len(set(sampler.urls)) < len(sampler.urls):
        yield f"sampler.url={sampler.url} names an engine twice; it takes each address once"
    if sampler.urls and sampler.engines > 1:
        yield (
            f"sampler.url={sampler.url} with sampler.engines={sampler.engines}: running engines are not started; leave out "
            "sampler.engines (all addresses in sampler.url are used), or sampler.url"
        )
    if sampler.port and sampler.port + sampler.engines - 1 > 65535:
        yield (
            f"sampler.port={sampler.port} with sampler.engines={sampler.engines}: there is no port above 65535; lower "
            "sampler.port"
        )


def _sampling(config: Config) -> Iterator[str]:
    """Sampling in training needs log-probabilities of the distribution that was sampled from, and different samples."""
    sampler = config.sampler
    if (sampler.top_p < 1 or sampler.top_k > 0) and not sampler.allow_unnormalised:
        yield (
            f"sampler.top_p={sampler.top_p:g}, sampler.top_k={sampler.top_k}: the engine's log-probabilities are not "
            "renormalised, so the policy gradient would be wrong; set sampler.top_p=1 sampler.top_k=-1, or accept it with "
            "sampler.allow_unnormalised=true"
        )
    if sampler.max_running == "auto" and sampler.router == "sglang":
        yield "sampler.max_running=auto with sampler.router=sglang: that router chooses the engine; set sampler.router=builtin"


def _task_source(config: Config) -> Iterator[str]:
    files = {"data.path": config.data.path, "data.eval_path": config.data.eval_path}
    settings = [f"{key}={path}" for key, path in files.items() if path is not None]
    if settings and config.tasks.name is not None:
        yield (
            f"{' and '.join(settings)} and tasks.name={config.tasks.name} both say where tasks are; to use the files, set "
            "tasks.name=null"
        )


def _eval_sets(config: Config) -> Iterator[str]:
    sets = {"eval": config.eval, **{f"eval.sets.{name}": eval_set for name, eval_set in config.eval.sets.items()}}
    names = ", ".join(config.sources) or "none"
    for key, eval_set in sets.items():
        if eval_set.split is not None and eval_set.path is not None:
            yield f"{key}.split={eval_set.split} and {key}.path={eval_set.path}: a set has one source of tasks; leave one out"
        if eval_set.source is not None and eval_set.source not in config.sources:
            yield f"{key}.source={eval_set.source} is none of the run's sources ({names}); set it to one, or leave it out"
        is_default_section = key == "eval" and (eval_set.path is None or config.eval.sets)
        if config.sources and not is_default_section and eval_set.source is None and config.eval.source is None:
            yield f"{key}: a set of a run with several sources belongs to one of them; set {key}.source to one of {names}"


def _reward(config: Config) -> Iterator[str]:
    if config.reward.key is not None and config.reward.function is None:
        yield f"reward.key={config.reward.key} is set, but no reward.function to return a mapping"


def _warm_start(config: Config) -> Iterator[str]:
    if config.model.warm_start_options and config.model.warm_start is None:
        yield "model.warm_start_options is set without model.warm_start, the configuration that it changes"


def _curriculum(config: Config) -> Iterator[str]:
    steps = sum(stage.steps for stage in config.sft.curriculum)
    if steps > config.sft.steps:
        yield f"sft.steps={config.sft.steps}, but the stages of sft.curriculum have {steps} steps"


def _overlong(config: Config) -> Iterator[str]:
    overlong = config.algo.overlong
    if overlong.max_tokens is not None and overlong.buffer_tokens > overlong.max_tokens:
        yield (
            f"algo.overlong.buffer_tokens={overlong.buffer_tokens} is more than algo.overlong.max_tokens="
            f"{overlong.max_tokens}"
        )


def _algo(config: Config) -> Iterator[str]:
    algo = config.algo
    if algo.old_logprobs == "sampler" and algo.correction.rollout_is not in ("auto", "none"):
        yield (
            f"algo.correction.rollout_is={algo.correction.rollout_is} with algo.old_logprobs=sampler: the loss's ratio is to the "
            "engine's probabilities already; set algo.old_logprobs=learner, or leave out algo.correction.rollout_is"
        )
    correction = algo.correction
    if correction.rollout_is_lower is not None and correction.rollout_is_lower >= correction.rollout_is_threshold:
        yield (
            f"algo.correction.rollout_is_lower={correction.rollout_is_lower:g} is not below "
            f"algo.correction.rollout_is_threshold={correction.rollout_is_threshold:g}"
        )
    if any(kind.endswith("k1") for kind in correction.rollout_rs) and correction.rollout_rs_threshold <= 1:
        yield (
            f"algo.correction.rollout_rs_threshold={correction.rollout_rs_threshold:g}: of k1 it is a ratio, and the lower limit "
            "its inverse; set it above 1"
        )
    if algo.routing_replay and config.sampler.router == "sglang":
        yield (
            "algo.routing_replay=true with sampler.router=sglang: that router drops the option of requests that return experts; "
            "set sampler.router=builtin"
        )
    if algo.reference_steps and not algo.needs_reference:
        yield f"algo.reference_steps={algo.reference_steps} without a reference: set algo.kl_coef above 0, or leave it out"


def _distillation(config: Config) -> Iterator[str]:
    key, distillation = "algo.distillation", config.algo.distillation
    teachers = distillation.teachers
    if not teachers and (distillation.task_key is not None or not distillation.reward_coef):
        setting = (
            f"task_key={distillation.task_key}"
            if distillation.task_key is not None
            else f"reward_coef={distillation.reward_coef:g}"
        )
        yield f"{key}.{setting} without teachers: set {key}.teachers.NAME.url to a server, or leave it out"
    if distillation.default is not None and (distillation.task_key is None or distillation.default not in teachers):
        yield (
            f"{key}.default={distillation.default} must be one of {key}.teachers ({', '.join(teachers) or 'none'}), and is for "
            f"tasks that {key}.task_key assigns to none; set both, or leave it out"
        )
    for name, teacher in teachers.items():
        teacher_key = f"{key}.teachers.{name}"
        kinds = {"url": teacher.url, "path": teacher.path, "policy": teacher.policy}
        settings = [f"{kind}={value}" for kind, value in kinds.items() if value is not None]
        if len(settings) != 1:
            yield f"{teacher_key} has {' and '.join(settings) or 'none of url, path and policy'}; set exactly one of the three"
        if teacher.policy == "main" and teacher.context is None:
            yield f"{teacher_key}.policy=main without {teacher_key}.context: the policy would be its own teacher; set a context"
        if teacher.policy is None and config.sampler.temperature != 1:
            yield (
                f"{teacher_key}: servers score at temperature 1, and sampler.temperature={config.sampler.temperature:g}; set "
                "sampler.temperature=1"
            )
        if teacher.path is not None and config.placement.reserves_gpus:
            yield (
                f"{teacher_key}.path={teacher.path} with placement.mode={config.placement.mode}: a teacher's engine is not "
                f"placed; start a server and set {teacher_key}.url, or placement.mode=separate"
            )
        if teacher.context is not None:
            yield from _context(f"{teacher_key}.context", teacher.context)


def _context(key: str, text: str) -> Iterator[str]:
    if not is_context_template(text):
        if not is_reference(text):
            yield f"{key}={text!r:.200} has neither {{message}} nor {{answer}}, and is no module:function"
        return
    try:
        fields = {name for _, name, _, _ in Formatter().parse(text) if name is not None}
    except ValueError as error:
        yield f"{key}={text!r:.200} is no template: {error}; write {{{{ and }}}} for braces"
        return
    if unknown := sorted(fields - {"message", "answer"}):
        yield f"{key}={text!r:.200} has {{{unknown[0]}}}; a template has {{message}} and {{answer}}"


def is_context_template(text: str) -> bool:
    """Return whether a teacher's ``context`` is a text with places to fill in, and not a function's import path."""
    return "{" in text


def _batches(config: Config) -> Iterator[str]:
    """As in slime, ``rollout.batch_size`` x ``rollout.n_samples_per_prompt`` must equal ``batch.global_batch_size`` x
    ``train.steps_per_rollout``; and an optimizer step takes whole groups.
    """
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    batch_size, steps = config.batch.global_batch_size, config.train.steps_per_rollout
    if prompts % steps == 0 and batch_size in (None, prompts * samples // steps):
        return
    if prompts * samples == (batch_size or 0) * steps or batch_size is None:
        reason = f"an optimizer step takes whole groups, and {prompts} prompts cannot be divided into {steps} parts"
    else:
        reason = f"{prompts} x {samples} = {prompts * samples} rollouts a step, but {batch_size} x {steps} = {batch_size * steps}"
    fitting_batch_size = batch_size if batch_size is not None else f"{prompts * samples / steps:g}"
    yield (
        f"rollout.batch_size={prompts} x rollout.n_samples_per_prompt={samples} must be "
        f"batch.global_batch_size={fitting_batch_size} x train.steps_per_rollout={steps}: {reason}; "
        f"set for example {_fitting_batch_sizes(config)}"
    )


def _fitting_batch_sizes(config: Config) -> str:
    """Return batch sizes near the configured ones that fit together, as settings."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    batch_size, steps = config.batch.global_batch_size, config.train.steps_per_rollout
    if prompts % steps == 0:
        return f"batch.global_batch_size={prompts // steps * samples}"
    if batch_size is not None and batch_size % samples == 0:
        return f"rollout.batch_size={batch_size // samples * steps}"
    rounded_prompts = -(-prompts // steps) * steps
    return f"rollout.batch_size={rounded_prompts}" + (
        f" batch.global_batch_size={rounded_prompts // steps * samples}" if batch_size else ""
    )


def _self_play(config: Config) -> Iterator[str]:
    if config.self_play is None:
        return
    if other_roles := [name for name, role in config.env.roles.items() if role.policy is None or not role.train]:
        yield (
            f"self_play with env.roles ({', '.join(other_roles)}): self_play says who plays, env.roles only which policy a role "
            "has; leave out one"
        )
    if PAST in config.self_play.mix and config.placement.reserves_gpus:
        yield (
            f"self_play.mix has {PAST}, and placement.mode={config.placement.mode}: engines of snapshots are not placed; set "
            f"placement.mode=separate, or leave out {PAST}"
        )
    if config.sources:
        yield f"self_play with sources ({', '.join(config.sources)}): a run with self-play has one environment; leave out one"
    if config.rollout.generate is not None:
        yield f"self_play with rollout.generate={config.rollout.generate}, which runs the episodes itself; leave out one"


def _frozen_roles(config: Config) -> Iterator[str]:
    for source, source_config in config.by_source().items():
        for name, role in source_config.env.roles.items():
            if role.frozen is None:
                continue
            prefix = f"sources.{source}." if source else ""
            key = f"{prefix}env.roles.{name}.frozen={role.frozen}"
            if source:
                yield f"{key}: a run with frozen roles has one environment; leave it out, or leave out sources"
            if config.placement.reserves_gpus:
                yield (
                    f"{key} with placement.mode={config.placement.mode}: the engine of frozen weights is not placed; set "
                    "placement.mode=separate"
                )


def _adapter_policies(config: Config) -> Iterator[str]:
    names = config.env.policies
    for source, source_config in config.by_source().items() if config.sources else ():
        if policies := ", ".join(source_config.env.policies):
            yield f"sources.{source}.env.roles names the policies {policies}: a mixed run trains one policy; leave them out"
    if not names:
        return
    if MAIN in names:
        yield f"env.roles names a policy {MAIN}, which is the policy of a run that names none; choose another name"
    key = f"env.roles names the policies {', '.join(names)}"
    if config.learner.lora is None:
        yield f"{key}, which are adapters over one base model: set learner.lora={{}}"
    elif config.weights.adapters != "only":
        yield f"{key}, and weights.adapters={config.weights.adapters}: merged weights are one policy; set weights.adapters=only"
    if config.rollout.generate is not None:
        yield f"{key} with rollout.generate={config.rollout.generate}, which samples one policy; leave out one"
    if config.algo.distillation.teachers:
        yield f"{key} with algo.distillation.teachers: teachers are of one policy; leave out one"


def check_context(config: Config, max_positions: int | None = None) -> None:
    """Check that an episode fits the engines that the run starts.

    Args:
        config: of the run.
        max_positions: most tokens that the model takes; None: not known, or without a limit.

    Raises:
        ConfigError: an engine holds fewer tokens than an episode may have.
    """
    sampler, max_tokens = config.sampler, max_positions
    source, tokens = max(
        ((name, source_config.rollout.max_tokens) for name, source_config in config.by_source().items()),
        key=itemgetter(1),
    )
    key = f"sources.{source}.rollout.max_tokens" if source else "rollout.max_tokens"
    if sampler.kind.takes_sglang_options:
        context = sampler.context_length or max_positions
        max_tokens = None if context is None else context - _SGLANG_RESERVES
    if sampler.url is None and max_tokens is not None and tokens > max_tokens:
        raise ConfigError(
            f"{key}={tokens} is more than the {max_tokens} tokens that an engine with this model "
            "takes: lower it, or raise sampler.sglang.context_length, or set model.path to a model with a longer context"
        )
    if sampler.backend == "embedded" and tokens > sampler.embedded.context:
        raise ConfigError(
            f"{key}={tokens} is more than the engine holds: raise sampler.embedded.context={sampler.embedded.context}"
        )


def check_placement(config: Config, learner_device: str) -> None:
    """Check that ``placement.mode`` fits the engines and the learner.

    Args:
        config: of a training run.
        learner_device: ``cpu`` or ``cuda``.

    Raises:
        ConfigError: it does not; the message says what to set.
    """
    mode, sampler = config.placement.mode, config.sampler
    if mode == "separate":
        return
    if sampler.urls:
        raise ConfigError(
            f"placement.mode={mode} with sampler.url={sampler.url}: running engines cannot be placed; leave out "
            "placement.mode, or sampler.url"
        )
    if mode == "disaggregate":
        return
    if sampler.device != learner_device:
        raise ConfigError(
            f"placement.mode=colocate: the learner is on {learner_device}, the engines are on {sampler.device}; set "
            "learner.device, or sampler.sglang.device, or placement.mode=separate"
        )
    ranks, engine_gpus = config.learner.ranks, sampler.engine_ranks
    if sampler.engines * engine_gpus > ranks:
        advice = (
            "and a smaller sampler.sglang.tp_size"
            if engine_gpus > ranks
            else f"or learner.ranks={sampler.engines * engine_gpus}"
        )
        raise ConfigError(
            f"placement.mode=colocate: sampler.engines={sampler.engines} of {engine_gpus} GPUs each do not fit on those of "
            f"learner.ranks={ranks}; set sampler.engines={max(1, ranks // engine_gpus)}, {advice}"
        )
    if config.weights.sync_every > 1:
        raise ConfigError(
            f"placement.mode=colocate with weights.sync_every={config.weights.sync_every}: engines that have released their "
            "memory need new weights after each step; leave out weights.sync_every"
        )
    staleness = f"placement.mode=colocate with async.max_staleness={config.asynchronous.max_staleness}"
    if config.asynchronous.max_staleness and config.weights.pause not in ("abort", "restart"):
        raise ConfigError(
            f"{staleness} and weights.pause={config.weights.pause}: engines keep no requests while the learner has their GPUs; "
            "set weights.pause=abort or restart"
        )
    if config.asynchronous.max_staleness and sampler.router == "sglang":
        raise ConfigError(
            f"{staleness} and sampler.router=sglang: the router would send requests to engines without memory; leave out "
            "sampler.router"
        )
    if config.eval.background:
        raise ConfigError(
            "placement.mode=colocate with eval.background=true: engines cannot sample while the learner has their GPUs; leave "
            "out eval.background, or set placement.mode=disaggregate"
        )
    if learner_device == "cuda" and sampler.sglang_options.get("enable_memory_saver") is False:
        raise ConfigError(
            "placement.mode=colocate with sampler.sglang.enable_memory_saver=false: without it SGLang does not release "
            "memory; leave it out"
        )
