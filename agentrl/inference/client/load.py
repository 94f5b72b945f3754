"""The load that an engine reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict, NonNegativeFloat, NonNegativeInt


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """Requests and KV cache of an engine."""

    running: int
    """Requests that it computes."""
    waiting: int
    """Requests that it has queued."""
    used_share: float
    """Tokens of the running requests, as a share of the KV cache."""
    retracted: int = 0
    """Requests whose cache it has taken back, to be computed again."""


class _Queues(BaseModel):
    model_config = ConfigDict(extra="ignore")

    retracted: NonNegativeInt = 0


class _Load(BaseModel):
    """A data-parallel rank of SGLang."""

    model_config = ConfigDict(extra="ignore")

    num_running_reqs: NonNegativeInt
    num_waiting_reqs: NonNegativeInt
    token_usage: NonNegativeFloat
    queues: _Queues | None = None


class _Loads(BaseModel):
    model_config = ConfigDict(extra="ignore")

    loads: list[_Load]


def read_load(reply: Any) -> EngineLoad:
    """Return the load in a reply of ``/v1/loads``: requests of all ranks, and the cache of the fullest.

    Raises:
        ValueError: it is not such a reply.
    """
    loads = _Loads.model_validate(reply).loads
    return EngineLoad(
        running=sum(load.num_running_reqs for load in loads),
        waiting=sum(load.num_waiting_reqs for load in loads),
        used_share=max((load.token_usage for load in loads), default=0.0),
        retracted=sum(load.queues.retracted for load in loads if load.queues is not None),
    )
