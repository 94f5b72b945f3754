"""Weights that a run does not train: ``learner.freeze``."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from agentrl.core.errors import ConfigError
from agentrl.models.load import empty_model

KEY = "learner.freeze"


def frozen_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of weights that a pattern matches.

    Args:
        names: of all weights of the policy, as Hugging Face names them.
        patterns: shell patterns of whole names (`fnmatch`); upper and lower case differ.

    Raises:
        ConfigError: a pattern matches nothing, or all weights are frozen.
    """
    frozen: set[str] = set()
    for pattern in patterns:
        matching = matching_names(names, [pattern])
        if not matching:
            sorted_names = sorted(names)
            examples = ", ".join(sorted_names[:: max(1, len(sorted_names) // 3)][:4])
            raise ConfigError(f"{KEY}: {pattern!r} matches no weight of the policy; it has weights such as {examples}")
        frozen |= matching
    if len(frozen) == len(names):
        raise ConfigError(f"{KEY}={list(patterns)} freezes all weights, so nothing is trained; leave one of them out")
    return frozen


def matching_names(names: Collection[str], patterns: Sequence[str]) -> set[str]:
    """Return the names of weights that a shell pattern matches; see `frozen_names`."""
    return {name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns)}


def count_trained(folder: Path, patterns: Sequence[str]) -> tuple[int, int]:
    """Return how many numbers of the model in ``folder`` are trained, and how many there are.

    Raises:
        ConfigError: see `frozen_names`.
        ModelError: the model's configuration cannot be loaded.
    """
    sizes = {name: parameter.numel() for name, parameter in empty_model(folder, "eager").named_parameters()}
    total = sum(sizes.values())
    return total - sum(sizes[name] for name in frozen_names(sizes, patterns)), total
