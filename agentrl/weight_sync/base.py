"""The weight sync contract."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup


@dataclass(frozen=True, slots=True)
class SyncedWeights:
    """What a weight sync has sent to each engine."""

    fingerprint: int
    """64 bits that differ from those of another sync if any weight differs."""
    bytes: int
    """Size of the weights as they were sent."""


class WeightSync(Protocol):
    """Syncs the learner's weights to the engines."""

    async def sync_weights(
        self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int
    ) -> SyncedWeights:
        """Sync the weights as policy ``version``, then check the engines according to ``weights.check``.

        Raises:
            EngineError: an engine or the check failed. Engines that may hold a mixture of versions sample nothing until
                a whole update has arrived.

        """
        ...

    async def aclose(self) -> None:
        """Release resources that are kept between updates."""
        ...
