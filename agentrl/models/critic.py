"""The critic of a run: the folder of its initial weights."""

from __future__ import annotations

from pathlib import Path

from agentrl.algo.registry import needs_critic
from agentrl.config.algo import AlgoConfig
from agentrl.models.resolve import resolve_model

KEY = "algo.critic.path"


def resolve_critic(algo: AlgoConfig, policy: Path, *, fetch: bool = True) -> Path | None:
    """Return the folder of the critic's initial weights, or None if the algorithm needs no critic.

    Args:
        algo: section of the run's configuration.
        policy: folder of the run's initial policy, which the critic starts from without ``algo.critic.path``.
        fetch: whether a model may be downloaded.

    Raises:
        MissingError: ``fetch`` is False and the model would have to be downloaded.
        ModelError: the model does not exist; the message names ``algo.critic.path``.
    """
    if not needs_critic(algo):
        return None
    path = algo.critic.path
    return policy if path is None else resolve_model(path, KEY, fetch=fetch)
