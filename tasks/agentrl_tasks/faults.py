"""Faults of scripted experts: an option ``faults`` has the probability of each in a demonstration."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from agentrl.core.errors import ConfigError, unknown_name


def check_faults(faults: Mapping[str, float], fault_names: Collection[str]) -> None:
    """Check the option ``faults``.

    Raises:
        UnknownNameError: a fault is not in ``fault_names``.
        ConfigError: the values are not probabilities.
    """
    for name in faults:
        if name not in fault_names:
            raise unknown_name("fault", name, fault_names, "tasks.options.faults")
    if any(p < 0 for p in faults.values()) or sum(faults.values()) > 1 + 1e-9:
        raise ConfigError(f"tasks.options.faults={dict(faults)}: probabilities are ≥ 0 and sum to at most 1")


def draw_fault(faults: Mapping[str, float], rng: np.random.Generator) -> str | None:
    """Return the fault of one demonstration, or None for a clean one."""
    draw = float(rng.random())
    for name, probability in faults.items():
        if draw < probability:
            return name
        draw -= probability
    return None
