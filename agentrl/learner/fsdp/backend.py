"""The backend ``fsdp``: PyTorch's FSDP2 on the Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from agentrl.config.algo import AlgoConfig
from agentrl.learner.base import LearnerBackend, RankClass


class FsdpBackend(LearnerBackend):
    """Every rank computes a share of the batch, and has a part of every weight."""

    @property
    def shares(self) -> int:
        """The number of ranks."""
        return self.config.ranks

    def check(self, algo: AlgoConfig, models: Sequence[Path]) -> None:
        """Refuse nothing: what does not fit a model is found when it is loaded."""

    def rank_class(self) -> RankClass:
        """Import `FsdpRank`."""
        from agentrl.learner.fsdp.rank import FsdpRank

        return FsdpRank
