"""Engines as processes see them that sample with the engines of another process, which controls them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agentrl.core.sampler import Sampler


@dataclass(frozen=True, slots=True)
class EngineState:
    """What it takes to sample with an engine, or with a router in front of several."""

    url: str
    """Takes generations."""
    abort_urls: Sequence[str]
    """Take aborts."""
    ready: bool = False
    """Whether generations may start; they wait otherwise."""
    unfit: str = ""
    """Why generations fail instead of waiting; empty if they do not."""
    adapters: Mapping[str, str] = field(default_factory=dict)
    """LoRA adapters that requests name, by policy."""
    weights_owner: str = ""
    """Whose weights the engine must have; see `SGLangWeightUpdates`. Empty: replies are not checked for it."""
    cache_key: str | None = None
    """Separates the prefixes of requests in the engine's cache."""
    knows_ages: bool = False
    """Whether the process that controls it needs to know of cached prefixes; see `agentrl.inference.client.prefix_ages`."""
    max_running: int | None = None
    """Most requests of this process at the engine; None: no limit."""


@dataclass(frozen=True, slots=True)
class FleetUpdate:
    """The engines of a fleet, and what has just happened to one."""

    engines: Mapping[str, EngineState]
    """By name."""
    failed: str | None = None
    """Why all requests fail: no engine is left."""
    engine: str = ""
    """To which the following happened."""
    pause: str | None = None
    """The mode in which it is about to be paused."""
    updated: bool = False
    """It has received weights."""


@dataclass(frozen=True, slots=True)
class RequestsInProgress:
    """Requests of other processes at an engine."""

    unanswered: int = 0
    """Without a reply."""
    kept: bool = False
    """Whether a paused engine keeps one, to continue it after the pause."""


class EngineMirror(Protocol):
    """Keeps the processes that sample with an engine informed."""

    async def publish(self, client: Sampler, *, pause: str | None = None, updated: bool = False) -> RequestsInProgress:
        """Send the state of a client's engine, and return once all processes have it, with their requests there.

        Args:
            client: that this process sends generations through.
            pause: see `FleetUpdate`.
            updated: see `FleetUpdate`.
        """
        ...
