"""The weight sync contract: from the learner into the engines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from agentrl.inference.base import EngineControl
from agentrl.learner.base import LearnerGroup


class WeightSync(Protocol):
    """Brings the learner's weights into the engines."""

    async def push(self, learner: LearnerGroup, engines: Sequence[EngineControl], version: int) -> None:
        """Send the weights, then check the engines as ``weights.check`` says.

        Raises:
            EngineError: an engine failed, or the check did. Those that may hold a mixture sample nothing until a whole
                update has come.

        """
        ...

    async def aclose(self) -> None:
        """Give back what is kept from one update to the next."""
        ...
