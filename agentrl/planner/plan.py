"""A plan: for each placement and learner backend the first layout that fits, with its engines."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from agentrl.algo.registry import algorithm_faults, needs_critic
from agentrl.config.engine_checks import check_context, check_placement
from agentrl.config.engine_groups import disaggregated_groups
from agentrl.config.layers import Layer, load_layers, merge_layers
from agentrl.config.merging import Tree, merge
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, ModelError, NoLayoutError
from agentrl.models.engine_float8 import has_float8_engines, read_engine_float8
from agentrl.models.load import read_max_positions
from agentrl.models.reference_policy import CRITIC_KEY
from agentrl.models.shipped_architectures import find_architecture
from agentrl.planner.engine import (
    GIB,
    MACHINE,
    PROCESS_BYTES,
    EnginePlan,
    EngineWeights,
    Gpus,
    plan_engine_beside_learner,
    plan_engines,
)
from agentrl.planner.groups import GroupPlan, plan_groups
from agentrl.planner.judges import RESTING_BYTES, JudgePlan, own_gpus, plan_judges
from agentrl.planner.layouts import Candidate, Models, Request, layouts
from agentrl.planner.training_summary import FITS, KEEPS_GRADIENTS, micro_tokens, trained_model
from agentrl.weight_sync.bucketwise import IpcSync
from agentrl.weight_sync.registry import transport_faults

BASE = Layer("default of a plan", {"sampler": {"backend": "sglang"}, "learner": {"device": "cuda"}})
"""What a plan is for: GPUs."""
_MOST = 64
"""How many times as many ranks are tried where no layout fits."""


@dataclass(frozen=True, slots=True)
class Option:
    """A placement with a layout of the learner, or why there is none."""

    mode: str
    """``placement.mode``."""
    backend: str
    learner_gpus: int
    candidate: Candidate | None = None
    """The first layout that fits; if none does, the one that needs least."""
    engines: EnginePlan | None = None
    """None for engines that are running already."""
    at_sync: int = 0
    """Bytes of a GPU that learner and engine share in turn, while weights are sent; 0 if they share none."""
    together: int = 0
    """Bytes of a GPU that learner and engine have at the same time; 0 if they have none so."""
    settings: Tree | None = None
    """What is to be set in addition to what is configured."""
    judges: tuple[JudgePlan, ...] = ()
    """Engines of judges."""
    groups: tuple[GroupPlan, ...] = ()
    """Groups of engines with their own options."""
    faults: tuple[str, ...] = ()
    """Why it does not fit."""


@dataclass(frozen=True, slots=True)
class Plan:
    """All options for some GPUs."""

    folder: Path
    numbers: int
    """Weights of the model."""
    gpus: Gpus
    config: Config
    """What is configured, with defaults."""
    options: tuple[Option, ...]


def make_plan(layers: Sequence[Layer], gpus: Gpus) -> Plan:
    """Return the plan of a configuration.

    Args:
        layers: the configuration; what they set is kept.
        gpus: of the whole run.

    Raises:
        ConfigError: the configuration is not valid, or needs other GPUs.
        ModelError: the model's architecture is not found.
    """
    configured = merge_layers(layers)
    base = load_layers([BASE, *layers], [algorithm_faults])
    folder = find_architecture(base.model.path)
    model = trained_model(base.learner, folder)
    has_float8 = not base.sampler.urls and has_float8_engines(base.weights.dtype, folder)
    weights = EngineWeights.count(model, read_engine_float8(folder) if has_float8 else None)
    section = configured.get("learner") or {}
    backends = [section["backend"]] if "backend" in section else [*KEEPS_GRADIENTS]
    options = []
    path = base.algo.critic.path
    critic = None if not needs_critic(base.algo) else folder if path is None else find_architecture(path, CRITIC_KEY)
    models = Models(model, critic)
    judge_gpus = own_gpus(base, gpus.bytes)
    if judge_gpus >= gpus.count:
        raise ConfigError(
            f"judge.gpus=own: the engines of judges have {judge_gpus} GPUs of --gpus {gpus.count}, and none is left; raise "
            "--gpus, or set judge.gpus=shared"
        )
    groups = plan_groups(base, model.config, weights, gpus.bytes)
    group_gpus = sum(group.gpus for group in groups)
    if judge_gpus + group_gpus >= gpus.count:
        raise ConfigError(
            f"sampler.groups: the engines of groups have {group_gpus} GPUs of --gpus {gpus.count}, and none is left; raise "
            "--gpus, or lower sampler.groups.NAME.engines"
        )
    run_gpus = replace(gpus, count=gpus.count - judge_gpus - group_gpus)
    for mode, learner_gpus in _placements(base, configured, run_gpus, is_only_gpu=gpus.count == 1):
        ranks = int(section.get("ranks", learner_gpus))
        request = Request((BASE, *layers), configured, folder, models, ranks, mode == "colocate")
        for backend in backends:
            try:
                options.append(_option(request, backend, mode, run_gpus, weights, groups))
            except (ModelError, NoLayoutError) as error:
                if len(backends) == 1:
                    raise
                options.append(Option(mode, backend, request.ranks, faults=(str(error),)))
    return Plan(folder, weights.numbers, gpus, base, tuple(options))


def _placements(config: Config, configured: Tree, gpus: Gpus, *, is_only_gpu: bool) -> list[tuple[str, int]]:
    """Return the placements to plan, each with the learner's GPUs: all if they are shared, else half of them.

    Args:
        config: of the run.
        configured: keys that are set.
        gpus: without those of judges and groups.
        is_only_gpu: whether the whole run has one GPU.
    """
    ranks = (configured.get("learner") or {}).get("ranks")
    if ranks is not None and ranks > gpus.count:
        raise ConfigError(f"learner.ranks={ranks} with --gpus {gpus.count}: a rank has a GPU; lower learner.ranks")
    if config.sampler.urls:
        return [("separate", gpus.count)]
    if disaggregated_groups(config.sampler):  # whose GPUs are counted already
        return [("disaggregate", ranks or gpus.count // (2 if needs_critic(config.algo) else 1))]
    mode_setting = (configured.get("placement") or {}).get("mode")
    has_critic = needs_critic(config.algo)
    if gpus.count == 1:
        return [(mode, 1) for mode in _single_gpu_modes(mode_setting, beside=is_only_gpu and not has_critic)]
    modes = [mode_setting] if mode_setting is not None else ["colocate", "disaggregate"]
    users = 3 if has_critic else 2
    return [(mode, gpus.count if mode == "colocate" else ranks or gpus.count // users) for mode in modes]


def _single_gpu_modes(mode: str | None, *, beside: bool) -> list[str]:
    """Return the placements on one GPU.

    Args:
        mode: that is configured.
        beside: whether learner and engine may have it at the same time: a critic would need a GPU then, and with several GPUs
            weights do not go by ``ipc``.
    """
    modes = ["separate", "colocate"] if beside else ["colocate"]
    if mode is not None and mode not in modes:
        raise ConfigError(
            f"placement.mode={mode} with one GPU for learner and engines: they share it; set placement.mode={' or '.join(modes)}"
        )
    return modes if mode is None else [mode]


def _option(
    request: Request, backend: str, mode: str, gpus: Gpus, weights: EngineWeights, groups: tuple[GroupPlan, ...]
) -> Option:
    """Return the option of a backend: the smallest engines for which a layout fits, checked like a run's configuration."""
    config = request.config({"backend": backend, "ranks": request.ranks})
    shared = mode == "colocate" or (mode == "separate" and gpus.count == 1)
    engine_plans: list[EnginePlan | None] = [None]
    judges: tuple[JudgePlan, ...] = ()
    engine_gpus = 0
    has_common_engines = not config.sampler.urls and not disaggregated_groups(config.sampler)
    if has_common_engines:
        engine_gpus = (
            request.ranks if shared else gpus.count - request.ranks * (2 if request.models.critic is not None else 1)
        )
        if engine_gpus < 1:
            critic = "" if request.models.critic is None or shared else " and as many for the critic"
            raise ConfigError(
                f"learner.ranks={request.ranks}{critic} with --gpus {gpus.count}: no GPU is left for an engine"
            )
        engine_plans = [*_plan_engines(request, config, mode, gpus, engine_gpus, weights)]
        judges = plan_judges(config, mode, gpus.bytes, engine_gpus)
    bucket = IpcSync.bucket_bytes(config.weights.bucket_mib)
    tried = []
    for engine_plan in engine_plans if shared else engine_plans[:1]:
        limits = _limits(mode if shared else "", gpus, engine_plan, judges, bucket)
        tried.append((_first_fitting(layouts(request, backend), limits), engine_plan, limits))
        if limits.hold(tried[-1][0]):
            break
    best, engines, limits = tried[-1]
    settings = _settings(mode, best, engines)
    if limits.beside_bytes:  # `auto` would take what the engine has
        settings = merge(settings, {"batch": {"tokens_per_micro": config.batch.micro_tokens}})
    if not has_common_engines and not config.sampler.urls:
        settings = merge(settings, {"placement": {"mode": mode}, "weights": {"transport": "distributed"}})
    for group in groups:
        settings = merge(settings, {"sampler": {"groups": group.settings}})
    for judge in judges:
        settings = merge(settings, judge.settings)
    rules = [transport_faults] if engines is not None else []
    checked = load_layers([Layer("plan", settings), *request.layers], rules)
    if engines is not None:
        check_placement(checked, "cuda")
    check_context(checked, read_max_positions(request.folder))
    faults = [] if limits.hold(best) else [_excess(request, backend, best, limits)]
    if engines is not None and not engines.rows(config.max_tokens):
        faults.append(
            f"the KV cache of an engine with tp_size={engines.tensor} does not hold a row of {config.max_tokens:,} tokens"
        )
    faults += [fault for judge in judges if (fault := judge.fault(engine_gpus))]
    faults += [fault for group in groups if (fault := group.fault())]
    together = limits.peak(best) if limits.beside_bytes else 0
    at_sync = limits.at_sync(best)
    return Option(
        mode, backend, request.ranks, best, engines, at_sync, together, settings, judges, groups, tuple(faults)
    )


def _plan_engines(
    request: Request, config: Config, mode: str, gpus: Gpus, engine_gpus: int, weights: EngineWeights
) -> Iterator[EnginePlan]:
    """Yield the engines that are tried, in this order."""
    hf, sampler, row_tokens = request.models.policy.config, config.sampler, config.max_tokens
    if mode == "separate":
        rollouts = [source.rollout for source in config.by_source().values()]
        rows = min(
            config.rollout.concurrency, sum(rollout.batch_size * rollout.n_samples_per_prompt for rollout in rollouts)
        )
        yield from plan_engine_beside_learner(
            hf, weights, sampler, gpu_bytes=gpus.bytes, row_tokens=row_tokens, rows=rows
        )
    else:
        yield from plan_engines(
            hf, weights, sampler, mode=mode, gpus=engine_gpus, gpu_bytes=gpus.bytes, row_tokens=row_tokens
        )


def _limits(
    shared_mode: str, gpus: Gpus, engines: EnginePlan | None, judges: Sequence[JudgePlan], bucket: int
) -> _Limits:
    """Return the limits of a layout; ``shared_mode`` is the placement if learner and engine share GPUs, else empty."""
    most = int(FITS * gpus.bytes)
    if not shared_mode or engines is None:
        return _Limits(most, 0)
    shared_judges = [judge for judge in judges if judge.is_shared]
    if shared_mode == "colocate":
        return _Limits(most - RESTING_BYTES * len(shared_judges), bucket + engines.weights)
    # The bucket holds at most all weights, and stays between syncs.
    beside = sum(int(each.fraction * gpus.bytes) for each in (engines, *(judge.engines for judge in shared_judges)))
    beside += PROCESS_BYTES * (1 + len(shared_judges)) + min(bucket, engines.weights)
    return _Limits(most, 0, beside)


@dataclass(frozen=True, slots=True)
class _Limits:
    """What a layout of the learner must keep to."""

    bytes: int
    """Memory of a GPU."""
    engine_bytes: int
    """Bytes of a bucket and of the engine's weights on the learner's GPU while weights are sent; 0 if the two do not share GPUs
    in turn."""
    beside_bytes: int = 0
    """Bytes of engines on the learner's GPU at all times, with a bucket."""

    def at_sync(self, candidate: Candidate) -> int:
        """Return the bytes on a shared GPU while weights are sent; 0 if none is shared."""
        memory = candidate.memory
        return memory.weights + memory.optimizer + memory.reference + self.engine_bytes if self.engine_bytes else 0

    def peak(self, candidate: Candidate) -> int:
        """Return the most bytes on a GPU of the learner."""
        return max(candidate.memory.total + self.beside_bytes, candidate.critic, self.at_sync(candidate))

    def hold(self, candidate: Candidate) -> bool:
        """Return whether the layout fits."""
        return self.peak(candidate) <= self.bytes


def _first_fitting(candidates: Iterable[Candidate], limits: _Limits) -> Candidate:
    """Return the first candidate that fits, or else the one that needs least."""
    least: Candidate | None = None
    for candidate in candidates:
        if limits.hold(candidate):
            return candidate
        if least is None or limits.peak(candidate) < limits.peak(least):
            least = candidate
    assert least is not None, "there is a layout, or it was refused"
    return least


def _excess(request: Request, backend: str, best: Candidate, limits: _Limits) -> str:
    """Return why the best layout does not fit, and how many ranks have one that does."""
    if limits.beside_bytes:
        parts = f"{best.memory.total / GIB:.1f} and {limits.beside_bytes / GIB:.1f}"
        return f"learner and engine together need {limits.peak(best) / GIB:.1f} GiB ({parts}), {limits.bytes / GIB:.1f} are there"
    need = "the learner's layout that needs least" if best.memory.total > limits.bytes else "weight sync"
    text = f"{need} needs {limits.peak(best) / GIB:.1f} GiB"
    if "ranks" in (request.configured.get("learner") or {}):
        return text
    for power in range(1, _MOST.bit_length()):
        ranks = request.ranks << power
        if limits.hold(_first_fitting(layouts(replace(request, ranks=ranks), backend), limits)):
            return f"{text}; learner.ranks={ranks} has a layout that fits"
    return text


def _settings(mode: str, candidate: Candidate, engines: EnginePlan | None) -> Tree:
    """Return the keys of an option."""
    settings: Tree = {"learner": {"backend": candidate.backend, **candidate.settings}}
    if engines is not None:
        sglang = {"tp_size": engines.tensor, "mem_fraction_static": engines.fraction}
        transport = "distributed" if mode == "disaggregate" else "ipc"
        settings = merge(settings, {"placement": {"mode": mode}, "weights": {"transport": transport}})
        settings["sampler"] = {"engines": engines.engines, "sglang": sglang}
    return settings


def report(plan: Plan, configured: Tree) -> list[str]:
    """Return the lines of a plan.

    Args:
        plan: to show.
        configured: keys that are not repeated as keys to set.
    """
    gpus, config = plan.gpus, plan.config
    limit = FITS * gpus.bytes / GIB
    return [
        f"{'model':<13}{config.model.path}: {plan.numbers / 1e9:,.2f} billion weights",
        f"{'GPUs':<13}{gpus.count} of {gpus.bytes / GIB:.1f} GiB ({gpus.name}), of which a layout may need {limit:.1f}",
        f"{'tokens':<13}{micro_tokens(config):,} a micro-batch (batch.tokens_per_micro), rows of up to {config.max_tokens:,} "
        "(rollout.max_tokens)",
        *(line for option in plan.options for line in ("", *_option_lines(option, plan, configured))),
    ]


def _option_lines(option: Option, plan: Plan, configured: Tree) -> Iterator[str]:
    title = f"{option.backend}, {option.mode}, learner.ranks={option.learner_gpus}"
    yield f"{title}: {'does not fit' if option.faults else 'fits'}"
    yield from (f"  {'because':<12}{fault}" for fault in option.faults)
    if option.candidate is None:
        return
    memory = option.candidate.memory
    yield f"  {'learner':<12}{memory.total / GIB:.1f} GiB a GPU: {_parts(asdict(memory))}"
    if option.candidate.critic:
        yield f"  {'critic':<12}{option.candidate.critic / GIB:.1f} GiB a GPU, on as many GPUs"
    if (engines := option.engines) is not None:
        rows = engines.rows(plan.config.max_tokens)
        parts = _parts({"weights": engines.weights, "KV cache": max(0, engines.cache)})
        yield (
            f"  {'engines':<12}{engines.engines} with tp_size={engines.tensor}, GiB a GPU: {parts}: {engines.cache_tokens:,} "
            f"tokens or {rows:,} rows in an engine"
        )
    yield from (f"  {'judge':<12}{judge.line()}" for judge in option.judges)
    yield from (f"  {'group':<12}{group.line()}" for group in option.groups)
    shared_judges = [judge for judge in option.judges if judge.is_shared]
    copies = 0
    if engines is not None and shared_judges:
        copies = engines.engines * engines.tensor * engines.weights
        copies += sum(judge.gpus * judge.engines.weights for judge in shared_judges)
    if option.together:
        beside = (option.together - memory.total) / GIB
        yield (
            f"  {'together':<12}{option.together / GIB:.1f} GiB at all times, {beside:.1f} of them the engine's with its process "
            "and a bucket: no step waits for memory"
        )
    if option.at_sync:
        yield f"  {'weight sync':<12}{option.at_sync / GIB:.1f} GiB: learner at rest, a bucket, the engine's weights"
        offloaded = memory.weights + memory.optimizer + memory.reference + memory.critic
        count = min(MACHINE, option.learner_gpus)
        yield f"  {'main memory':<12}{count * offloaded / GIB:,.0f} GiB a machine, while engines sample"
    if copies:
        yield f"  {'main memory':<12}{copies / GIB:,.0f} GiB on all machines, for weights that engines have released"
    if keys := " ".join(_keys(option.settings or {}, configured)):
        yield f"  {'set':<12}{keys}"


def _parts(parts: dict[str, int]) -> str:
    return ", ".join(f"{name} {size / GIB:.1f}" for name, size in parts.items() if size)


def _keys(tree: Tree, configured: Tree, prefix: str = "") -> Iterator[str]:
    """Yield settings as ``key=value``, without those that are given."""
    for name, value in tree.items():
        configured_value = configured.get(name) if isinstance(configured, dict) else None
        if isinstance(value, dict):
            yield from _keys(value, configured_value if isinstance(configured_value, dict) else {}, f"{prefix}{name}.")
        elif configured_value is None:
            yield f"{prefix}{name}={str(value).lower() if isinstance(value, bool) else value}"
