"""The learner backends of ``learner.backend``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig
from agentrl.learner.base import LearnerRank, Role

if TYPE_CHECKING:
    import torch

    from agentrl.learner.fsdp.rank import FsdpRank


def make_rank(
    folder: Path,
    config: LearnerConfig,
    algo: AlgoConfig,
    *,
    device: torch.device,
    seed: int,
    reference: Path | None = None,
    role: Role = "policy",
) -> LearnerRank:
    """Create this process's rank of ``learner.backend``; the process group must exist."""
    from agentrl.learner.fsdp.rank import FsdpRank

    backends: dict[str, type[FsdpRank]] = {"fsdp": FsdpRank}
    return backends[config.backend](folder, config, algo, device=device, seed=seed, reference=reference, role=role)
