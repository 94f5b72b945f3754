"""The reserved placement of a run: a Ray placement group."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.placement_layout import GpuIndex, Layout, Resources, number_by_machine
from agentrl.cluster.ray_runtime import LOOK_S, RayRuntime, check_ray, gcs_ended
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.obs.waiting import waiting


@dataclass(frozen=True, slots=True)
class ActorLocation:
    """The machine and the GPUs of an actor."""

    node: str
    """Ray's node id."""
    gpus: tuple[str, ...]
    """The GPUs assigned by Ray, as named in ``CUDA_VISIBLE_DEVICES``, in the order of their index."""

    @property
    def first_gpu(self) -> GpuIndex:
        """The index of the first GPU; ``(0, "")`` without any."""
        return gpu_index(self.gpus[0]) if self.gpus else (0, "")


def gpu_index(gpu: str) -> GpuIndex:
    """Return what sorts the GPUs of a machine; see `GpuIndex`."""
    return len(gpu), gpu


def order_by_gpu(locations: Sequence[ActorLocation]) -> list[int]:
    """Return the indices of actors by machine and GPU: machines with most actors first, else in order of appearance."""
    nodes = [location.node for location in locations]
    counts = Counter(nodes)
    return sorted(
        range(len(nodes)), key=lambda at: (-counts[nodes[at]], nodes.index(nodes[at]), locations[at].first_gpu)
    )


def actor_location(actor: object) -> ActorLocation:
    """Return the location of ``actor``; called in its process, by ``actor.__ray_call__``."""
    ids = [str(gpu) for gpu in ray.get_gpu_ids()]
    return ActorLocation(ray.get_runtime_context().get_node_id(), tuple(sorted(ids, key=gpu_index)))


class ReservedPlacement:
    """A placement group, whose resources are exclusive to the run until `close`. Created by `reserve`."""

    def __init__(
        self, layout: Layout, runtime: RayRuntime, group: PlacementGroup, spreads_runners: Callable[[int], bool]
    ) -> None:
        """Take over a placement group that is ready; see `reserve`."""
        machines: dict[int, str] = placement_group_table(group)["bundles_to_node_id"]
        self._nodes = {bundle: machines[bundle] for bundle in range(len(layout.bundles))}
        self._gpus: dict[int, GpuIndex] = {}
        """The first GPU of bundles, as far as their actors have reported it."""
        self.layout = number_by_machine(layout, self._nodes)
        """The layout of `reserve`, with ranks and engines numbered by machine, and by GPU once `number_ranks` was called."""
        self.cores = sum(int(node["Resources"].get("CPU", 0)) for node in _nodes() if node["Alive"])
        """CPU cores of all machines, as Ray has them."""
        self._has_runners = spreads_runners(self.cores)
        self._runtime = runtime
        self._group: PlacementGroup | None = group
        self._machines = _machines()
        self.here = self._machines[ray.get_runtime_context().get_node_id()]
        """The address of this machine."""
        nodes = {*machines.values(), *self.runner_nodes()}
        self._alone = {self._machines[node] for node in nodes} == {self.here}

    @classmethod
    def reserve(
        cls,
        layout: Layout,
        runtime: RayRuntime,
        timeout_s: float,
        spreads_runners: Callable[[int], bool],
        cancelled: threading.Event,
    ) -> ReservedPlacement:
        """Start or join Ray, and wait until it has reserved the bundles of ``layout``.

        Args:
            layout: bundles.
            runtime: Ray.
            timeout_s: seconds that others may use the resources.
            spreads_runners: returns whether runner processes may be on all machines of a cluster with so many cores.
            cancelled: ends the wait, as ``timeout_s`` does.

        Raises:
            ConfigError: the cluster is too small.
            LearnerError: Ray does not start, or the resources were in use for ``timeout_s``.
        """
        with waiting("start", "of Ray"):
            runtime.start()
        try:
            check_cluster(layout.bundles)
            group = placement_group([dict(bundle) for bundle in layout.bundles], strategy="PACK")
            with waiting("start", f"until Ray has {_describe(layout.total)} free"):
                limit = time.monotonic() + timeout_s
                while not (ready := group.wait(min(LOOK_S, timeout_s))) and time.monotonic() < limit:
                    if cancelled.is_set():
                        break
            if not ready:
                remove_placement_group(group)
                free = ray.available_resources()  # type: ignore[no-untyped-call]
                raise LearnerError(
                    f"Ray has not given {_describe(layout.total)} after learner.start_timeout_s={timeout_s:g} s; free now: "
                    f"{_describe({name: free.get(name, 0) for name in layout.total})}. Others use the rest"
                )
            return cls(layout, runtime, group, spreads_runners)
        except BaseException:
            runtime.stop()
            raise

    @property
    def machines(self) -> tuple[str, ...]:
        """Ray's id of each rank's machine."""
        return tuple(self._nodes[bundle] for bundle in self.layout.ranks)

    def number_ranks(self, locations: Sequence[ActorLocation]) -> list[int]:
        """Number the learner's ranks, and engines that share their GPUs, by machine and GPU.

        Ray assigns the GPUs of a bundle in the order in which its actors start.

        Args:
            locations: of the actors that were started with `rank_options`, by their number then.

        Returns:
            These numbers, in the order of the ranks from now on.
        """
        bundles = self.layout.ranks
        self._add_gpus(bundles, locations)
        return _order_within(bundles, locations, self.layout.ranks)

    def number_critics(self, locations: Sequence[ActorLocation]) -> list[int]:
        """Number the ranks of a critic that has separate GPUs; see `number_ranks`."""
        bundles = self.layout.critics
        self._add_gpus(bundles, locations)
        return _order_within(bundles, locations, self.layout.critics)

    def _add_gpus(self, bundles: Sequence[int], locations: Sequence[ActorLocation]) -> None:
        for bundle, location in zip(bundles, locations, strict=True):
            self._gpus[bundle] = min(location.first_gpu, self._gpus.get(bundle, location.first_gpu))
        self.layout = number_by_machine(self.layout, self._nodes, self._gpus)

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Return the actor options that place a learner rank."""
        return {"scheduling_strategy": self._strategy(self.layout.ranks[rank])}

    def critic_options(self, rank: int) -> dict[str, Any]:
        """Return the actor options that place a rank of the critic, with its resources."""
        needs = self.layout.critic_needs
        return {"num_gpus": needs.get("GPU", 0), "scheduling_strategy": self._strategy(self.layout.critics[rank])}

    def host_options(self, bundle: int, needs: Resources) -> dict[str, Any]:
        """Return the actor options that place the host of an engine in a bundle, of which it takes resources."""
        return {
            "num_cpus": needs.get("CPU", 0),
            "num_gpus": needs.get("GPU", 0),
            "scheduling_strategy": self._strategy(bundle),
        }

    def address(self, location: ActorLocation) -> str:
        """Return the address for servers at a location: the loopback address if the whole run is on one machine.

        Raises:
            LearnerError: the machine is not known, and Ray has ended.
        """
        if location.node not in self._machines:
            check_ray()  # without its GCS, Ray does not answer
            self._machines = _machines()
        machine = self._machines[location.node]
        return LOOPBACK if self._alone and machine == self.here else machine

    def runner_nodes(self) -> list[str]:
        """Return Ray's ids of the machines that runner processes are started on: those that live and have CPUs, in a fixed order.

        Empty if all are on this one.
        """
        nodes = _nodes() if self._has_runners else []
        return sorted(node["NodeID"] for node in nodes if node["Alive"] and node["Resources"].get("CPU"))

    @property
    def spreads_runners(self) -> bool:
        """Whether runner processes are on other machines than this one, too."""
        return any(self._machines[node] != self.here for node in self.runner_nodes())

    @property
    def runner_cores(self) -> int:
        """Cores of the machines that runner processes are started on; 0: all are on this one."""
        return self.cores if self.spreads_runners else 0

    def close(self) -> None:
        """Remove the placement group, which ends its actors; end Ray if it was started for the run."""
        if self._group is not None:
            if not gcs_ended():  # else they end with Ray
                remove_placement_group(self._group)
            self._group = None
            self._runtime.stop()

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None, "it is closed"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)


def _order_within(bundles: Sequence[int], locations: Sequence[ActorLocation], order: Sequence[int]) -> list[int]:
    """Return the numbers of actors in ``bundles`` in an ``order`` of the bundles, those of one bundle by their GPUs."""
    position = {bundle: at for at, bundle in enumerate(dict.fromkeys(order))}
    return sorted(range(len(bundles)), key=lambda number: (position[bundles[number]], locations[number].first_gpu))


def check_cluster(bundles: Sequence[Resources]) -> None:
    """Refuse bundles that do not fit on the whole cluster, even if it were idle.

    Raises:
        ConfigError: with the needed and the existing resources, and the keys to change.
    """
    machines = [node["Resources"] for node in _nodes() if node["Alive"]]
    for name in ("GPU", "CPU"):
        keys = "lower learner.ranks, sampler.engines or sampler.sglang.tp_size"
        total, largest_machine = (fold(node.get(name, 0) for node in machines) for fold in (sum, max))
        requested, largest_bundle = (fold(bundle.get(name, 0) for bundle in bundles) for fold in (sum, max))
        if requested > total:
            raise ConfigError(
                f"the run wants {_describe({name: requested})}, and Ray has {_describe({name: total})}: {keys}"
            )
        if largest_bundle > largest_machine:
            raise ConfigError(
                f"an engine wants {_describe({name: largest_bundle})} of one machine, and Ray has none with more than "
                f"{_describe({name: largest_machine})}: {keys}, or raise sampler.sglang.nnodes"
            )


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _machines() -> dict[str, str]:
    """Return the IP addresses of all machines by Ray's node ids."""
    return {str(node["NodeID"]): str(node["NodeManagerAddress"]) for node in _nodes()}


def _describe(resources: Mapping[str, float]) -> str:
    """Return for example ``3 GPUs and 1 CPU``."""
    named = {"GPU": resources.get("GPU", 0), "CPU": resources.get("CPU", 0)}
    words = [f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in named.items() if name in resources]
    return " and ".join(words) or "nothing"
