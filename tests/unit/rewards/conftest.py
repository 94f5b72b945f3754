from collections.abc import Callable
from typing import Any

import pytest

from agentrl.core.types import FinishReason, Rollout, StopReason, Turn


@pytest.fixture
def rollout() -> Callable[..., Rollout]:
    def make(*texts: str, label: Any = "4", name: str = "0", **more: Any) -> Rollout:
        """An episode of turns; between them the environment texts ``[heard]``."""
        turns = [Turn(text, "[heard]", FinishReason.STOP) for text in texts]
        if turns:
            turns[-1].observation = ""
        return Rollout(
            "train.jsonl:1",
            f"1/0/{name}",
            [],
            0.25,
            StopReason.TERMINATED,
            metrics={"turns": 1.0},
            turns=turns,
            prompt="<user>2 + 2?<assistant>",
            label=label,
            metadata={"hops": 2},
            **more,
        )

    return make
