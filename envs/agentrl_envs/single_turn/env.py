"""One prompt, one answer."""

from __future__ import annotations

from typing import ClassVar

from agentrl import Action, Env, Step


class SingleTurnEnv(Env):
    """Shows the task's prompt and ends with the policy's first turn. The reward comes from ``reward.function``."""

    blocking: ClassVar[bool] = False
    needs_reward: ClassVar[bool] = True

    def step(self, action: Action) -> Step:
        """End the episode without a reward."""
        return (), 0.0, True, False, {}
