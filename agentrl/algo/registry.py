"""The algorithms that ``algo.name`` chooses from."""

from __future__ import annotations

from agentrl.algo.base import Algorithm
from agentrl.algo.grpo import Grpo
from agentrl.config.algo import AlgoConfig

ALGORITHMS: dict[str, type[Grpo]] = {"grpo": Grpo}
"""By ``algo.name``."""


def make_algorithm(config: AlgoConfig) -> Algorithm:
    """Return the algorithm that a configuration names."""
    return ALGORITHMS[config.name](config)
