"""What a run reserves from Ray, and who gets which part of it. Without Ray, so that it can be checked before any start."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.config.schema import Config

Resources = Mapping[str, int]
"""Such as ``{"GPU": 2, "CPU": 2}``, in Ray's names."""


@dataclass(frozen=True, slots=True)
class Layout:
    """The bundles of a placement group; Ray keeps each on one machine."""

    bundles: tuple[Resources, ...]
    """What each reserves."""
    ranks: tuple[int, ...]
    """The bundle of each of the learner's ranks."""
    engines: tuple[int, ...]
    """The bundle of each engine."""
    rank_needs: Resources
    """What a rank takes of its bundle."""
    engine_needs: Resources
    """What an engine takes of its bundle: nothing where it shares the ranks' GPUs."""

    @property
    def total(self) -> Resources:
        """What all of it needs."""
        total: Counter[str] = Counter()
        for bundle in self.bundles:
            total.update(bundle)
        return dict(total)


def lay_out(config: Config, device: str) -> Layout:
    """Return what a run with ``placement.mode`` ``colocate`` or ``disaggregate`` reserves.

    Where they share, the bundle of engine ``e`` holds the ranks ``e*g`` to ``e*g+g-1`` of the learner too, ``g`` being
    `engine_ranks`; otherwise each engine and each rank has a bundle of its own.

    Args:
        config: checked by `agentrl.runtime.placement_check.check_placement`.
        device: of the learner, ``cpu`` or ``cuda``.

    """
    workers, engines, each = config.learner.ranks, config.sampler.engines, config.sampler.engine_ranks
    rank = {"CPU": 1, "GPU": 1} if device == "cuda" else {"CPU": 1}
    if config.placement.mode == "colocate":
        shared = engines * each
        assert shared <= workers
        bundles = [{name: count * each for name, count in rank.items()}] * engines + [rank] * (workers - shared)
        ranks = [index // each if index < shared else engines + index - shared for index in range(workers)]
        return Layout(tuple(bundles), tuple(ranks), tuple(range(engines)), rank, {})
    engine = {"GPU": each} if config.sampler.device == "cuda" else {"CPU": each}
    bundles = [rank] * workers + [engine] * engines
    return Layout(tuple(bundles), tuple(range(workers)), tuple(range(workers, workers + engines)), rank, engine)
