"""The resources that a run reserves, by learner rank and engine, and their checks before any start. Imports no Ray."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from agentrl.algo.registry import needs_critic
from agentrl.cluster.ray_address import learner_device, running_address
from agentrl.config.engine_checks import check_placement as check_placement_keys
from agentrl.config.engine_groups import disaggregated_groups, engine_group, evaluation_group, training_engines
from agentrl.config.judges import judge_configs, judge_keys, judge_sampler, time_shared_judges
from agentrl.config.runners import runner_count
from agentrl.config.sampler import SamplerConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.imports import has_python_objects

Resources = Mapping[str, int]
"""Such as ``{"GPU": 2, "CPU": 2}``, in Ray's names."""
GpuIndex = tuple[int, str]
"""Sorts the GPUs of a machine: the length of a name and the name, as in ``CUDA_VISIBLE_DEVICES``. Example: ``(2, "10")``."""
_Place = tuple[int, int, GpuIndex, int]


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles of a placement group; Ray places each bundle on one machine."""

    bundles: tuple[Resources, ...]
    """The resources of each bundle."""
    ranks: tuple[int, ...]
    """The bundle of each of the learner's ranks."""
    engines: tuple[tuple[int, ...], ...]
    """The bundles of each engine, one for each of its machines (``sampler.sglang.nnodes``)."""
    rank_needs: Resources
    """The resources that a rank takes from its bundle."""
    shares_engines: bool
    """Whether engines share the GPUs of ranks. They then take nothing from their bundles, otherwise all that these have."""
    critics: tuple[int, ...] = ()
    """The bundle of each of the critic's ranks, if there is a critic."""
    critic_needs: Resources = field(default_factory=dict)
    """The resources that a rank of the critic takes from its bundle: no GPU if it shares that of a rank of the learner."""
    judges: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """The bundle of each engine of a judge that has its own GPUs, by ``judge.model``."""
    judge_needs: Mapping[str, Resources] = field(default_factory=dict)
    """The resources that such an engine takes from its bundle."""
    evaluation: tuple[tuple[int, ...], ...] = ()
    """The bundles of each engine that only evaluates (``sampler.groups``), one for each of its machines."""
    evaluation_needs: Resources = field(default_factory=dict)
    """The resources that such an engine takes from each of its bundles."""

    @property
    def total(self) -> Resources:
        """The resources of all bundles."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return dict(total)


def lay_out(config: Config, device: str) -> Layout:
    """Return the layout of a run with ``placement.mode`` ``colocate`` or ``disaggregate``.

    Engines of judges with ``judge.gpus=own`` have the bundles after these, one each. Those that share GPUs have none: see
    `agentrl.cluster.engine_actors.SharedLocations`. Engines that only evaluate have the last bundles, in every mode.

    Colocated, the bundles of engine ``e`` also hold the learner's ranks ``e*g`` to ``e*g+g-1``, where ``g`` is
    `engine_ranks`; otherwise each engine and each rank has separate bundles. Colocated, a critic's rank is in the bundle of
    the learner's rank with its number.

    Args:
        config: checked by `agentrl.cluster.placement_layout.check_placement`.
        device: of the learner, ``cpu`` or ``cuda``.
    """
    workers, engines, gpus_per_engine = config.learner.ranks, config.sampler.engines, config.sampler.engine_ranks
    machines = config.sampler.engine_machines
    bundle_gpus, engine_bundles = gpus_per_engine // machines, engines * machines
    critics = workers if needs_critic(config.algo) else 0
    rank = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
    if config.placement.shares_gpus:
        shared = engines * gpus_per_engine
        assert shared <= workers
        critic = {"CPU": 1, "GPU": 0} if critics else {}
        slot = {name: count + critic.get(name, 0) for name, count in rank.items()}
        bundles = [{name: count * bundle_gpus for name, count in slot.items()}] * engine_bundles
        bundles += [slot] * (workers - shared)
        ranks = tuple(
            index // bundle_gpus if index < shared else engine_bundles + index - shared for index in range(workers)
        )
        layout = Layout(
            tuple(bundles),
            ranks,
            _bundles_by_engine(range(engine_bundles), machines),
            rank,
            True,
            ranks[:critics],
            critic,
        )
        return _with_evaluation(_with_judges(layout, config), config)
    bundles, engine_bundle_numbers = [rank] * workers, []
    for number in range(training_engines(config.sampler)):
        _, sampler = engine_group(config.sampler, number)
        machines, first = sampler.engine_machines, len(bundles)
        bundles += [{"GPU" if sampler.device == "cuda" else "CPU": sampler.engine_ranks // machines}] * machines
        engine_bundle_numbers.append(tuple(range(first, len(bundles))))
    critic_bundles = tuple(range(len(bundles), len(bundles) + critics))
    layout = Layout(
        (*bundles, *[rank] * critics),
        tuple(range(workers)),
        tuple(engine_bundle_numbers),
        rank,
        False,
        critic_bundles,
        rank,
    )
    return _with_evaluation(_with_judges(layout, config), config)


def _bundles_by_engine(bundles: Sequence[int], machines: int) -> tuple[tuple[int, ...], ...]:
    """Return the bundles of each engine, which has one on each of its ``machines``."""
    return tuple(tuple(bundles[first : first + machines]) for first in range(0, len(bundles), machines))


def _with_judges(layout: Layout, config: Config) -> Layout:
    """Return a layout with bundles for the engines of judges that have their own GPUs."""
    bundles, judges, needs = [*layout.bundles], dict[str, tuple[int, ...]](), dict[str, Resources]()
    for model, judge in judge_configs(config).items():
        if judge.gpus == "own":
            sampler = judge_sampler(config, judge)
            needs[model] = {"GPU" if sampler.device == "cuda" else "CPU": sampler.engine_ranks}
            judges[model] = tuple(range(len(bundles), len(bundles) + judge.engines))
            bundles += [needs[model]] * judge.engines
    return replace(layout, bundles=tuple(bundles), judges=judges, judge_needs=needs)


def _with_evaluation(layout: Layout, config: Config) -> Layout:
    """Return a layout with bundles for the engines that only evaluate."""
    group = evaluation_group(config.sampler)
    if group is None:
        return layout
    _, sampler = group
    machines, first = sampler.engine_machines, len(layout.bundles)
    needs = {"GPU" if sampler.device == "cuda" else "CPU": sampler.engine_ranks // machines}
    bundles = (*layout.bundles, *[needs] * (sampler.engines * machines))
    evaluation = _bundles_by_engine(range(first, len(bundles)), machines)
    return replace(layout, bundles=bundles, evaluation=evaluation, evaluation_needs=needs)


def number_by_machine(
    layout: Layout, machines: Mapping[int, str], gpus: Mapping[int, GpuIndex] = MappingProxyType({})
) -> Layout:
    """Return a layout whose ranks, and engines, are numbered by machine and GPU; the machines with most ranks come first.

    Ray may put neighbouring bundles on several machines, and adjacent ranks compute a micro-batch together. Bundles of the
    same resources are exchanged, so that colocated engine ``e`` keeps the ranks from ``e*g`` on.

    Args:
        layout: of a placement group.
        machines: where Ray has put each bundle.
        gpus: the first GPU of bundles; those of others are not known.
    """
    ranks_in, first_seen = Counter(layout.ranks), {name: at for at, name in reversed([*enumerate(machines.values())])}
    ranks_on: Counter[str] = Counter()
    for bundle, count in ranks_in.items():
        ranks_on[machines[bundle]] += count

    def place(bundle: int) -> _Place:
        machine = machines[bundle]
        return -ranks_on[machine], first_seen[machine], gpus.get(bundle, (0, "")), bundle

    engines = _order_engines(layout, place)
    of_engines = [bundle for engine in engines for bundle in engine]
    critics = sorted(layout.critics, key=place)
    shared = [bundle for bundle in of_engines if bundle in ranks_in]
    alone = sorted(ranks_in.keys() - set(shared), key=place)
    ranks = tuple(bundle for bundle in [*shared, *alone] for _ in range(ranks_in[bundle]))
    has_shared_critics = bool(critics) and set(critics) <= ranks_in.keys()
    return replace(
        layout,
        ranks=ranks,
        engines=engines,
        critics=ranks[: len(critics)] if has_shared_critics else tuple(critics),
    )


def _order_engines(layout: Layout, sort_key: Callable[[int], _Place]) -> tuple[tuple[int, ...], ...]:
    """Return the bundles of each engine, those of engines of the same size exchanged, in order of ``sort_key``."""
    numbers_by_size: dict[tuple[object, ...], list[int]] = {}
    for number, bundles in enumerate(layout.engines):
        size = (len(bundles), *sorted(layout.bundles[bundles[0]].items()))
        numbers_by_size.setdefault(size, []).append(number)
    engines = [*layout.engines]
    for numbers in numbers_by_size.values():
        machines = len(engines[numbers[0]])
        ordered = sorted((bundle for number in numbers for bundle in layout.engines[number]), key=sort_key)
        for number, bundles in zip(numbers, _bundles_by_engine(ordered, machines), strict=True):
            engines[number] = bundles
    return tuple(engines)


def spreads_runners(config: Config, cluster_cores: int) -> bool:
    """Return whether runner processes may be on all machines of a cluster.

    With the program of ``sampler.router=sglang`` they are on this one, and objects that only this process has need no runners.

    Args:
        config: of the run.
        cluster_cores: of all machines.
    """
    if config.sampler.has_router_program or (config.rollout.runners == "auto" and has_python_objects()):
        return False
    return runner_count(config, cluster_cores) > 0


def check_placement(config: Config) -> None:
    """Check the placement. What a running Ray can hold is known only after the run has joined it.

    Raises:
        ConfigError: `agentrl.config.engine_checks.check_placement`.
        MissingError: there are too few GPUs here.
    """
    mode, ranks = config.placement.mode, config.learner.ranks
    has_critic_gpus = needs_critic(config.algo) and mode != "colocate"
    required_gpus = 2 * ranks if has_critic_gpus else ranks
    chosen, available = config.learner.device, gpus_here()
    uses_gpus = chosen == "cuda" or (chosen == "auto" and available > 0)
    if uses_gpus and running_address() is None and required_gpus > available:
        critic = " for the policy and as many for its critic" if has_critic_gpus else ""
        advice = ", or set placement.mode=colocate, where the critic is on the policy's GPUs" if has_critic_gpus else ""
        raise MissingError(
            f"learner.device={chosen} with learner.ranks={ranks} wants as many GPUs{critic}; there are {available} here{advice}"
        )
    if mode == "separate":
        check_placement_keys(config, config.learner.device)
        if config.weights.transport == "ipc":
            _check_only_gpu()
        return
    device = learner_device(config.learner)
    check_placement_keys(config, device)
    _check_shared_judges(config)
    gpus = lay_out(config, device).total.get("GPU", 0)
    if gpus > available and running_address() is None:
        learner = f"learner.ranks={ranks}{' and its critic' if has_critic_gpus else ''}"
        own_text, sampler = _other_engines_text(config), config.sampler
        groups = disaggregated_groups(sampler)
        engines = f"sampler.engines={sampler.engines} of {sampler.engine_ranks} each"
        engines = f"sampler.groups ({_engine_text(sampler)})" if groups else engines
        raise MissingError(
            f"placement.mode={mode} wants {gpus} GPUs for {learner} and {engines}{own_text}; there are {available} here, and "
            "no Ray runs that has more (`ray start`, or RAY_ADDRESS)"
        )


def _check_only_gpu() -> None:
    """Check that learner and engines with ``placement.mode=separate`` are on one GPU, as ``weights.transport=ipc`` needs it.

    Raises:
        ConfigError: they may be on several.
    """
    key = "weights.transport=ipc with placement.mode=separate"
    if (address := running_address()) is not None:
        raise ConfigError(
            f"{key}: the running Ray at {address} may place the learner on another GPU than the engines'; set "
            "placement.mode=colocate, or weights.transport=distributed, or leave out RAY_ADDRESS"
        )
    if (count := gpus_here()) != 1:
        raise ConfigError(
            f"{key}: there are {count} GPUs here, of which the learner takes the first, and engines the last ones; show the run "
            "one of them (CUDA_VISIBLE_DEVICES), or set placement.mode=colocate or weights.transport=distributed"
        )


def _check_shared_judges(config: Config) -> None:
    """Check that the engines of a judge fit on the GPUs that they share with the policy's.

    Raises:
        ConfigError: they do not.
    """
    sampler, ranks = config.sampler, config.learner.ranks
    shared = ranks if config.placement.shares_gpus else sampler.engines * sampler.engine_ranks
    for model, judge in time_shared_judges(config).items():
        per_engine = judge_sampler(config, judge).engine_ranks
        if sampler.device == "cuda" and judge.engines * per_engine > shared:
            more, key = (
                "learner.ranks" if config.placement.shares_gpus else "sampler.engines",
                judge_keys(config)[model],
            )
            raise ConfigError(
                f"{key}.engines={judge.engines} of {per_engine} GPUs each do not fit on the {shared} GPUs that they share with "
                f"the policy's with placement.mode={config.placement.mode}; lower it or {key}.sglang.tp_size, raise {more}, or "
                f"set {key}.gpus=own"
            )


def _other_engines_text(config: Config) -> str:
    """Return how many GPUs judges, and engines that only evaluate, have for themselves, in words; empty if none."""
    empty = Layout((), (), (), {}, False)
    judges = _with_judges(empty, config).total.get("GPU", 0)
    evaluation = _with_evaluation(empty, config).total.get("GPU", 0)
    text = f", and {judges} for judges (judge.gpus=own)" if judges else ""
    return text + (f", and {evaluation} for evaluation (sampler.groups)" if evaluation else "")


def describe_placement(config: Config) -> str:
    """Return in one line how many GPUs the learner and the engines use."""
    ranks, engine_text = config.learner.ranks, _engine_text(config.sampler)
    judges = f", in turns with engines of {', '.join(shared)}" if (shared := time_shared_judges(config)) else ""
    judges += _other_engines_text(config)
    if config.placement.shares_gpus:
        critic = " and its critic" if needs_critic(config.algo) else ""
        return f"colocate: {ranks} for the learner{critic}, in turns with {engine_text}{judges}"
    critic = f", {ranks} for its critic" if needs_critic(config.algo) else ""
    return f"disaggregate: {ranks} for the learner{critic}, and {engine_text}{judges}"


def _engine_text(sampler: SamplerConfig) -> str:
    """Return how many engines of training there are and how many GPUs each has, in words."""
    groups = disaggregated_groups(sampler)
    texts = [f"{group.engines} of {group.engine_ranks} for {name}" for name, group in groups.items()]
    if texts:
        return f"engines: {', '.join(texts)}"
    return f"{sampler.engines} engine{'s' if sampler.engines > 1 else ''} of {sampler.engine_ranks}"


def gpus_here() -> int:
    """Return how many GPUs torch finds on this machine."""
    import torch

    return torch.cuda.device_count()
