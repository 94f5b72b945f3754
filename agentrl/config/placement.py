"""The ``placement`` section: which GPUs the learner and the engines of a run use."""

from __future__ import annotations

from typing import Literal

from agentrl.config.base import Section

Mode = Literal["separate", "colocate", "disaggregate"]
"""See `PlacementConfig.mode`."""


class PlacementConfig(Section):
    """Where engines and learner run."""

    mode: Mode = "separate"
    """``separate``: the engines on the last GPUs of this machine, the learner's ranks where Ray places them, starting with
    the first ones here; on a machine with one GPU both use it, and neither releases its memory. ``colocate``: the engines
    share the learner's GPUs by time sharing; whichever is idle has released its memory. ``disaggregate``: the engines have
    their own GPUs. ``colocate`` and ``disaggregate`` reserve their GPUs as a Ray placement group, on one machine or
    several."""

    @property
    def reserves_gpus(self) -> bool:
        """Whether learner and engines have a Ray placement group."""
        return self.mode != "separate"

    @property
    def shares_gpus(self) -> bool:
        """Whether learner and engines use the same GPUs in turns, and whichever is idle has released its memory."""
        return self.mode == "colocate"
