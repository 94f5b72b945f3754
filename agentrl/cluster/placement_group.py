"""The part of a Ray cluster that a run has for itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import placement_group_table
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from agentrl.cluster.placement_layout import Layout, Resources
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.core.child_process import LOOPBACK
from agentrl.core.errors import ConfigError, LearnerError
from agentrl.obs.waiting import waiting


@dataclass(frozen=True, slots=True)
class Seat:
    """Where an actor runs."""

    node: str
    """Ray's id of the machine."""
    gpus: tuple[str, ...]
    """Those that Ray gave it, as ``CUDA_VISIBLE_DEVICES`` names them."""


def own_seat(actor: object) -> Seat:
    """Return where ``actor`` runs; called in its process, by ``actor.__ray_call__``."""
    ids = [str(gpu) for gpu in ray.get_gpu_ids()]
    return Seat(ray.get_runtime_context().get_node_id(), tuple(sorted(ids, key=lambda gpu: (len(gpu), gpu))))


class Room:
    """A placement group: nobody else gets what is in it until it is closed. Made by `reserve`."""

    def __init__(self, layout: Layout, runtime: RayRuntime, group: PlacementGroup) -> None:
        """Take over a group that is ready."""
        self.layout = layout
        self._runtime = runtime
        self._group: PlacementGroup | None = group
        self.here = _machine(ray.get_runtime_context().get_node_id())
        """The address of this machine."""
        nodes = set(placement_group_table(group)["bundles_to_node_id"].values())
        self._alone = {_machine(node) for node in nodes} == {self.here}

    @classmethod
    def reserve(cls, layout: Layout, runtime: RayRuntime, timeout_s: float) -> Room:
        """Start or join Ray, and wait until it has what ``layout`` wants.

        Raises:
            ConfigError: it will never have that much.
            LearnerError: Ray does not start, or others kept what is wanted for ``timeout_s``.

        """
        with waiting("start", "of Ray"):
            runtime.start()
        try:
            check_cluster(layout.bundles)
            group = placement_group([dict(bundle) for bundle in layout.bundles], strategy="PACK")
            with waiting("start", f"until Ray has {_shown(layout.total)} free"):
                ready = group.wait(timeout_s)
            if not ready:
                remove_placement_group(group)
                free = ray.available_resources()  # type: ignore[no-untyped-call]
                raise LearnerError(
                    f"Ray has not given {_shown(layout.total)} after learner.start_timeout_s={timeout_s:g} s; free now: "
                    f"{_shown({name: free.get(name, 0) for name in layout.total})}. Others use the rest"
                )
            return cls(layout, runtime, group)
        except BaseException:
            runtime.stop()
            raise

    def rank_options(self, rank: int) -> dict[str, Any]:
        """Return how Ray is told where a rank of the learner belongs."""
        return {"scheduling_strategy": self._strategy(self.layout.ranks[rank])}

    def engine_options(self, engine: int) -> dict[str, Any]:
        """Return how Ray is told where the host of an engine belongs, and what it takes of that."""
        needs = self.layout.engine_needs
        return {
            "num_cpus": needs.get("CPU", 0),
            "num_gpus": needs.get("GPU", 0),
            "scheduling_strategy": self._strategy(self.layout.engines[engine]),
        }

    def address(self, seat: Seat) -> str:
        """Return the address at which what sits there listens: the loopback's where the whole run is on one machine."""
        machine = _machine(seat.node)
        return LOOPBACK if self._alone and machine == self.here else machine

    def close(self) -> None:
        """Give everything back: whatever runs in it ends; so does Ray where it was started for the run."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None
            self._runtime.stop()

    def _strategy(self, bundle: int) -> PlacementGroupSchedulingStrategy:
        assert self._group is not None, "it is closed"
        return PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=bundle)


def check_cluster(bundles: Sequence[Resources]) -> None:
    """Refuse what the whole cluster could not hold if it were free.

    Raises:
        ConfigError: with what is wanted, what there is, and the keys to change.

    """
    machines = [node["Resources"] for node in _nodes() if node["Alive"]]
    for name in ("GPU", "CPU"):
        keys = "lower learner.ranks, sampler.engines or sampler.sglang.tp_size"
        total, most = (fold(node.get(name, 0) for node in machines) for fold in (sum, max))
        wanted, largest = (fold(bundle.get(name, 0) for bundle in bundles) for fold in (sum, max))
        if wanted > total:
            raise ConfigError(f"the run wants {_shown({name: wanted})}, and Ray has {_shown({name: total})}: {keys}")
        if largest > most:
            raise ConfigError(
                f"an engine wants {_shown({name: largest})} of one machine, and Ray has none with more than "
                f"{_shown({name: most})}: {keys}"
            )


def _nodes() -> list[dict[str, Any]]:
    nodes: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return nodes


def _machine(node: str) -> str:
    """Return the address of a machine that Ray knows."""
    return next(str(known["NodeManagerAddress"]) for known in _nodes() if known["NodeID"] == node)


def _shown(resources: Mapping[str, float]) -> str:
    """Return for example ``3 GPUs and 1 CPU``."""
    named = {"GPU": resources.get("GPU", 0), "CPU": resources.get("CPU", 0)}
    words = [f"{count:g} {name}{'' if count == 1 else 's'}" for name, count in named.items() if name in resources]
    return " and ".join(words) or "nothing"
