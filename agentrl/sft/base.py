"""What supervised fine-tuning trains on: rows by step."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agentrl.core.types import Row
from agentrl.render.renderer import ChatRenderer


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one optimizer step."""

    rows: list[Row]
    """Of all its episodes or chats."""
    metrics: dict[str, float]
    """Metrics of the data, such as ``sft/reward``, the mean reward of the episodes, the expert's mistakes included."""


class SftData(ABC):
    """Item ``i`` holds the rows of some steps, in order. A pure function of the configuration and the data.

    Items are independent, so any process may make any of them; the object can be pickled.

    Args:
        make_renderer: builds the renderer, once in each process.
    """

    steps_per_item = 1
    """Steps of each item, the last one excepted."""

    def __init__(self, make_renderer: Callable[[], ChatRenderer]) -> None:
        self._make_renderer = make_renderer
        self._renderer: ChatRenderer | None = None

    @property
    def renderer(self) -> ChatRenderer:
        """The renderer, built on first access in each process."""
        if self._renderer is None:
            self._renderer = self._make_renderer()
        return self._renderer

    def __getstate__(self) -> dict[str, Any]:
        """Return the state without the renderer, which each process builds."""
        return {**self.__dict__, "_renderer": None}

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of items."""

    @abstractmethod
    def __getitem__(self, index: int) -> list[StepRows]:
        """Return the rows of the steps from ``index * steps_per_item`` on."""

    def close(self) -> None:  # noqa: B027  most data hold nothing open
        """Close what making items has opened in this process."""
