"""The algorithms of ``algo.name``."""

from __future__ import annotations

from agentrl.algo.base import Algorithm
from agentrl.algo.grpo import Grpo
from agentrl.config.algo import AlgoConfig

ALGORITHMS: dict[str, type[Grpo]] = {"grpo": Grpo}
"""Algorithm classes by ``algo.name``."""


def make_algorithm(config: AlgoConfig) -> Algorithm:
    """Create the algorithm of a configuration."""
    return ALGORITHMS[config.name](config)
