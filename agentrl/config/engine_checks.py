"""Rules between the keys of engines, weight sync and placement, and of what continues while the learner trains.

`check_placement` and `check_context` are for commands that start engines, so that a configuration for training can be used
for an evaluation elsewhere. A transport checks the configuration itself: `agentrl.weight_sync.base.Transport.faults`.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter

from agentrl.config.engine_groups import all_samplers, disaggregated_groups, evaluation_group
from agentrl.config.judges import judge_configs, judge_keys, judge_sampler
from agentrl.config.sampler import REFUSED_OPTIONS, SamplerConfig
from agentrl.config.schema import Config
from agentrl.config.support_checks import centering_faults, renormalisation_faults
from agentrl.core.errors import ConfigError

_NGRAM = "NGRAM"
_SPECULATIVE = (_NGRAM, "EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""SGLang's algorithms of speculative decoding whose code samples from the policy, with its log-probabilities (0.5.17, 0.5.23)."""
_SGLANG_RESERVES = 6
"""Tokens of its context that SGLang gives neither to prompts nor to answers."""


def engine_faults(config: Config) -> Iterator[str]:
    """Yield what does not fit together, for every command."""
    yield from _engine_addresses(config.sampler)
    yield from _groups(config)
    yield from _sampling(config.sampler)
    yield from _refused_options(config.sampler)
    yield from renormalisation_faults(config)
    yield from centering_faults(config)
    if config.sampler.speculative_algorithm is not None:
        yield from _speculative_decoding(config, config.sampler.speculative_algorithm)
    yield from _batch_invariance(config)
    yield from _weights(config)
    if config.weights.adapters == "only":
        yield from _adapters(config)
    yield from _asynchronous(config)
    if config.asynchronous.streaming:
        yield from _streaming(config)
    yield from _background_evaluation(config)
    yield from _dynamic_sampling(config)


def _engine_addresses(sampler: SamplerConfig) -> Iterator[str]:
    if sampler.url is not None and not sampler.urls:
        yield f"sampler.url={sampler.url!r} holds no address; set sampler.url=http://HOST:PORT, several with commas"
    if len(set(sampler.urls)) < len(sampler.urls):
        yield f"sampler.url={sampler.url} names an engine twice; it takes each address once"
    if sampler.urls and sampler.engines > 1:
        yield (
            f"sampler.url={sampler.url} with sampler.engines={sampler.engines}: running engines are not started; leave out "
            "sampler.engines (all addresses in sampler.url are used), or sampler.url"
        )
    if sampler.urls and sampler.keep_minutes is not None:
        yield (
            f"sampler.url={sampler.url} with sampler.keep_minutes={sampler.keep_minutes:g}: running engines are not started, and "
            "stay; leave out one of the two"
        )
    if sampler.port and sampler.port + sampler.engines - 1 > 65535:
        yield (
            f"sampler.port={sampler.port} with sampler.engines={sampler.engines}: there is no port above 65535; lower "
            "sampler.port"
        )


def _sampling(sampler: SamplerConfig) -> Iterator[str]:
    """Sampling in training needs log-probabilities of the distribution that was sampled from, and different samples."""
    if (sampler.top_p < 1 or sampler.top_k > 0) and not (sampler.allow_unnormalised or sampler.renormalise != "none"):
        yield (
            f"sampler.top_p={sampler.top_p:g}, sampler.top_k={sampler.top_k}: the engine's log-probabilities are not "
            "renormalised, so the policy gradient would be wrong; set sampler.top_p=1 sampler.top_k=-1, or "
            "sampler.renormalise=engine or learner, or accept it with sampler.allow_unnormalised=true"
        )
    if sampler.max_running == "auto" and sampler.has_router_program:
        yield "sampler.max_running=auto with sampler.router=sglang: that router chooses the engine; set sampler.router=builtin"


def _batch_invariance(config: Config) -> Iterator[str]:
    """Whether engine and learner compute by the same products of fixed sizes."""
    learner, embedded, sampler = config.learner, config.sampler.embedded, config.sampler
    key, engine_key = "learner.batch_invariant=true", "sampler.embedded.batch_invariant=true"
    if embedded.batch_invariant and embedded.dtype != "float32":
        yield f"{engine_key} with sampler.embedded.dtype={embedded.dtype}: set sampler.embedded.dtype=float32"
    if not learner.batch_invariant:
        return
    if sampler.uses_sglang:
        yield (
            f"{key} with sampler.backend=sglang: its products are others; leave it out, or set sampler.backend=embedded. "
            "sampler.sglang.enable_deterministic_inference=true makes SGLang's independent of the batch"
        )
    elif not embedded.batch_invariant and not sampler.urls:
        yield f"{key} without {engine_key}: engine and learner would differ; set both"
    faults = {
        f"learner.backend={learner.backend}": ("learner.backend=fsdp", learner.backend != "fsdp"),
        f"learner.device={learner.device}": ("learner.device=cpu", learner.device != "cpu"),
        f"learner.precision={learner.precision}": ("learner.precision=float32", learner.precision != "float32"),
        f"learner.context_parallel={learner.context_parallel}": (
            "learner.context_parallel=1",
            learner.context_parallel > 1,
        ),
        "learner.compile=true": ("learner.compile=false", learner.compile is True),
        f"learner.threads={learner.threads}": ("learner.threads=1", learner.threads != 1),
        "learner.lora": ("learner.lora=null: engines have merged weights", learner.lora is not None),
    }
    for fault, (advice, applies) in faults.items():
        if applies:
            yield f"{key} with {fault}: set {advice}"


def _refused_options(sampler: SamplerConfig) -> Iterator[str]:
    """Whether the replies of engines are those that training needs."""
    options = {"sampler": sampler.sglang}
    options |= {f"sampler.groups.{name}": group.sglang for name, group in sampler.groups.items()}
    for key, section in options.items():
        for spelling, value in section.items():
            name = spelling.replace("-", "_")
            accepted, reason = REFUSED_OPTIONS.get(name, (value, ""))
            if value not in (None, accepted):
                yield f"{key}.sglang.{name}={value}: {reason}; leave it out"


def _speculative_decoding(config: Config, algorithm: str) -> Iterator[str]:
    """Whether tokens that a draft proposes are samples of the policy, and what becomes of the draft's own weights."""
    sampler, weights = config.sampler, config.weights
    key = f"sampler.sglang.speculative_algorithm={algorithm}"
    off = "leave out sampler.sglang.speculative_algorithm"
    if algorithm not in _SPECULATIVE:
        yield f"{key}: its samples and log-probabilities were not checked; set {', '.join(_SPECULATIVE)}, or leave it out"
    if sampler.device == "cpu":
        yield f"{key} with sampler.sglang.device=cpu: SGLang then takes the most probable token and samples none; {off}"
    if config.algo.replays_routing:
        yield f"{key} with algo.routing_replay=true: engines return no experts of accepted tokens; {off}"
    if algorithm == _NGRAM:
        return
    if weights.adapters == "only":
        yield f"{key} with weights.adapters=only: SGLang's drafts have no adapters; set speculative_algorithm=NGRAM"
    if weights.transport == "disk":
        yield f"{key} with weights.transport=disk: the draft would get the policy's weights too; set weights.transport=tensor"
    if weights.check == "checksum":
        yield f"{key} with weights.check=checksum: the draft's weights are among them; set weights.check=version"
    if config.placement.shares_gpus and not sampler.sglang_option("enable_draft_weights_cpu_backup", False):
        yield (
            f"{key} with placement.mode=colocate: engines that release their memory lose the draft's weights; set "
            "sampler.sglang.enable_draft_weights_cpu_backup=true, or speculative_algorithm=NGRAM"
        )


def _weights(config: Config) -> Iterator[str]:
    """Whether old weights are corrected for, and what may be checked after a sync."""
    sampler, weights = config.sampler, config.weights
    uncorrected = config.algo.old_logprobs == "learner" and config.algo.correction.rollout_is == "none"
    if weights.sync_every > 1 and uncorrected:
        yield (
            f"algo.old_logprobs=learner with weights.sync_every={weights.sync_every}: engines sample with older weights than the "
            "learner's, and nothing corrects for it; set algo.correction.rollout_is=token, or algo.old_logprobs=sampler"
        )
    if weights.check == "checksum" and any(group.engine_ranks > 1 for _, group in all_samplers(sampler)):
        yield (
            "weights.check=checksum: an engine with several ranks has checksums of shards only; set weights.check=version"
        )
    if weights.prefix_cache != "drop":
        yield from _prefix_cache(config)
    elif weights.pause == "in_place" and weights.adapters == "merged" and sampler.uses_sglang:
        yield (
            "weights.pause=in_place with weights.prefix_cache=drop: SGLang cannot drop its cache while it keeps requests; "
            "set weights.prefix_cache=by_version"
        )


def _prefix_cache(config: Config) -> Iterator[str]:
    """Whether the engines can keep their prefix cache at a sync."""
    key = f"weights.prefix_cache={config.weights.prefix_cache}"
    if config.placement.shares_gpus:
        yield f"{key} with placement.mode=colocate: engines release the memory of their cache; leave out weights.prefix_cache"
    if config.weights.adapters == "only":
        yield f"{key} with weights.adapters=only: each version is an adapter with its cache; leave out weights.prefix_cache"
    if config.weights.prefix_cache == "by_version" and config.sampler.has_router_program:
        yield f"{key} with sampler.router=sglang: requests through it have no key of their version; set sampler.router=builtin"


def _adapters(config: Config) -> Iterator[str]:
    """Whether the engines can hold the base model and take adapters."""
    sampler, key = config.sampler, "weights.adapters=only"
    if config.learner.lora is None:
        yield f"{key} without learner.lora: no adapters are trained; set learner.lora={{}}, or leave out weights.adapters"
    if sampler.has_router_program:
        yield (
            f"{key} with sampler.router=sglang: requests name the adapter of an engine, and the router chooses the engine; set "
            "sampler.router=builtin"
        )
    if sampler.keep_minutes is not None:
        yield f"{key} with sampler.keep_minutes: the next run may have another base model; leave out sampler.keep_minutes"
    if config.placement.shares_gpus:
        yield (
            f"{key} with placement.mode=colocate: engines that release their memory lose the base model; set "
            "weights.adapters=merged"
        )
    if config.weights.transport != "tensor":
        yield (
            f"{key} with weights.transport={config.weights.transport}: adapters are sent in the request; leave out "
            "weights.transport"
        )
    if "dummy" in (sampler.sglang.get("load_format"), sampler.sglang.get("load-format")):
        yield f"{key} with sampler.sglang.load_format=dummy: engines keep the weights that they start with; leave it out"
    if sampler.engine_ranks != sampler.tensor_ranks:
        yield f"{key} reaches SGLang's tensor parallel ranks only; set weights.adapters=merged"


def _asynchronous(config: Config) -> Iterator[str]:
    """What cannot continue while the learner trains, and whether old tokens are corrected for."""
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
    if (group := evaluation_group(config.sampler)) is not None and not config.eval.background:
        yield (
            f"sampler.groups.{group[0]}.serves=evaluation without eval.background: engines and learner would take turns; set "
            "eval.background=true"
        )


def _prefill_and_decode(config: Config) -> Iterator[str]:
    """Whether prefill and decode can be apart."""
    sampler, weights = config.sampler, config.weights
    kinds = {group.serves for group in sampler.groups.values()}
    key = "sampler.groups with serves=prefill and decode"
    for kind, counterpart in (("prefill", "decode"), ("decode", "prefill")):
        if kind not in kinds:
            yield f"sampler.groups has serves={counterpart} and no {kind}: neither works alone; add a group with serves={kind}"
    if not sampler.uses_sglang:
        yield f"{key} with sampler.backend={sampler.backend}: that engine does both; set sampler.backend=sglang"
    elif sampler.device == "cpu":
        yield f"{key} with sampler.sglang.device=cpu: KV caches are sent from GPU to GPU; leave them out"
    if not sampler.has_router_program:
        yield f"{key} with sampler.router={sampler.router}: it sends a request to one engine; set sampler.router=sglang"
    if sampler.urls:
        yield f"{key} with sampler.url={sampler.url}: running engines are in no group; leave out one of the two"
    elif sampler.engines > 1:
        yield (
            f"{key} with sampler.engines={sampler.engines}: engines of training are those of groups; leave out sampler.engines"
        )
    if sampler.keep_minutes is not None:
        yield f"{key} with sampler.keep_minutes: engines of groups are not kept; leave it out"
    if config.placement.shares_gpus:
        yield (
            f"{key} with placement.mode=colocate: engines send each other memory that they would have to release; set "
            "placement.mode=disaggregate"
        )
    if weights.pause in ("retract", "in_place"):
        yield (
            f"{key} with weights.pause={weights.pause}: an engine that decodes cannot have a prompt computed again, nor "
            "hold what it receives (SGLang, issue 23668); set weights.pause=abort, restart or finish"
        )
    if weights.prefix_cache != "drop":
        yield f"{key} with weights.prefix_cache={weights.prefix_cache}: ages of cached tokens are not known; leave it out"
    if weights.gap_limit != "off":
        yield (
            f"{key} with weights.gap_limit={weights.gap_limit}: the check after the first sync has an engine score rows alone, "
            "and none can; set weights.gap_limit=off"
        )
    if sampler.speculative_algorithm is not None:
        yield f"{key} with sampler.sglang.speculative_algorithm={sampler.speculative_algorithm} was not checked; leave it out"


def _groups(config: Config) -> Iterator[str]:
    """Whether the groups of engines can be started."""
    sampler = config.sampler
    names = [name for name, group in sampler.groups.items() if group.serves == "evaluation"]
    if len(names) > 1:
        yield (
            f"sampler.groups has {len(names)} groups with serves=evaluation ({', '.join(names)}): an evaluation has one; raise "
            f"sampler.groups.{names[0]}.engines, and leave out the others"
        )
    if disaggregated_groups(sampler):
        yield from _prefill_and_decode(config)
    for name, group in sampler.groups.items():
        key = f"sampler.groups.{name}"
        if group.sglang and not sampler.uses_sglang:
            yield f"{key}.sglang is set, and sampler.backend={sampler.backend} takes no options of SGLang; leave it out"
        if group.embedded.model_fields_set and sampler.uses_sglang:
            yield f"{key}.embedded is set, and sampler.backend=sglang has other options; set {key}.sglang"


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
    if "zero_variance" in rollout.filter_groups.filters and rollout.n_samples_per_prompt == 1:
        yield (
            "rollout.filter_groups.filters has zero_variance, and rollout.n_samples_per_prompt=1: the rewards of a group of one "
            "are always equal, so every group would be dropped; set rollout.n_samples_per_prompt to 2 or more, or leave it out"
        )
    if rollout.straggler_timeout_s and not staleness:
        yield (
            f"rollout.straggler_timeout_s={rollout.straggler_timeout_s:g} with async.max_staleness=0: a step waits for all of "
            "its groups, however long they take; raise async.max_staleness, or leave it out"
        )


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
    if sampler.uses_sglang:
        context = sampler.context_length or max_positions
        max_tokens = None if context is None else context - _SGLANG_RESERVES
    if sampler.url is None and max_tokens is not None and tokens > max_tokens:
        raise ConfigError(
            f"{key}={tokens} is more than the {max_tokens} tokens that an engine with this model "
            "takes: lower it, or raise sampler.sglang.context_length, or set model.path to a model with a longer context"
        )
    if not sampler.uses_sglang and tokens > sampler.embedded.context:
        raise ConfigError(
            f"{key}={tokens} is more than the engine holds: raise sampler.embedded.context={sampler.embedded.context}"
        )


def _check_engine_machines(config: Config) -> None:
    """Raise `ConfigError` if engines cannot have the machines of ``sampler.sglang.nnodes``."""
    sampler, machines = config.sampler, config.sampler.engine_machines
    key = f"sampler.sglang.nnodes={machines}"
    if machines < 1 or sampler.engine_ranks % machines:
        raise ConfigError(
            f"{key} does not divide the {sampler.engine_ranks} GPUs of an engine: set it to a divisor, or raise "
            "sampler.sglang.tp_size or pp_size"
        )
    if machines > 1 and sampler.url is None and not config.placement.reserves_gpus:
        raise ConfigError(
            f"{key} with placement.mode={config.placement.mode}: engines are on this machine; set placement.mode=disaggregate or "
            "colocate on a Ray cluster, or sampler.url to use an engine that runs"
        )
    if machines > 1 and sampler.keep_minutes is not None:
        raise ConfigError(f"{key} with sampler.keep_minutes: an engine of several machines is not kept; leave one out")
    for key, group in all_samplers(sampler):
        if group is not sampler:
            _check_group_machines(config, key, group)
    for model, judge in judge_configs(config).items():
        if (machines := judge_sampler(config, judge).engine_machines) > 1:
            key = f"{judge_keys(config)[model]}.sglang.nnodes"
            raise ConfigError(f"{key}={machines}: an engine of a judge is on one machine; set {key}=1")


def _check_group_machines(config: Config, key: str, sampler: SamplerConfig) -> None:
    """Raise `ConfigError` if engines of a group cannot have their machines."""
    machines = sampler.engine_machines
    if machines < 1 or sampler.engine_ranks % machines:
        raise ConfigError(
            f"{key}: nnodes={machines} does not divide the {sampler.engine_ranks} GPUs of an engine; set {key}.sglang.nnodes to "
            f"a divisor, or raise {key}.sglang.tp_size"
        )
    if machines > 1 and not config.placement.reserves_gpus:
        raise ConfigError(
            f"{key}: nnodes={machines} with placement.mode={config.placement.mode}: engines are on this machine; set "
            f"placement.mode=disaggregate or colocate on a Ray cluster, or {key}.sglang.nnodes=1"
        )
    if sampler.device != config.sampler.device:
        raise ConfigError(
            f"{key}.sglang.device={sampler.device}, and other engines are on {config.sampler.device}; leave it out"
        )


def check_placement(config: Config, learner_device: str) -> None:
    """Check that ``placement.mode`` fits the engines and the learner.

    Raises:
        ConfigError: it does not; the message states what to set.
    """
    mode, sampler = config.placement.mode, config.sampler
    _check_engine_machines(config)
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
    if config.asynchronous.max_staleness and sampler.has_router_program:
        raise ConfigError(
            f"{staleness} and sampler.router=sglang: the router would send requests to engines without memory; leave out "
            "sampler.router"
        )
    if config.eval.background and evaluation_group(sampler) is None:
        raise ConfigError(
            "placement.mode=colocate with eval.background=true: engines cannot sample while the learner has their GPUs; leave "
            "out eval.background, or set placement.mode=disaggregate, or give evaluation engines of its own: "
            "sampler.groups.eval.serves=evaluation"
        )
    if learner_device == "cuda" and sampler.sglang_options.get("enable_memory_saver") is False:
        raise ConfigError(
            "placement.mode=colocate with sampler.sglang.enable_memory_saver=false: without it SGLang does not release "
            "memory; leave it out"
        )
