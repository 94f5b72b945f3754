"""Who plays the agents of an episode: policies, scripted players, models behind an endpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from agentrl.core.chat_endpoint import ChatEndpoint
from agentrl.core.sampler import Sampler
from agentrl.core.types import SamplingParams

MAIN = "main"
"""The policy of a run that trains one."""


@dataclass(frozen=True, slots=True)
class PolicySeat:
    """A policy, sampled token by token by the run's engines or by others."""

    policy: str = MAIN
    """Its name at the sampler."""
    trained: bool = True
    """Whether its rollouts are returned, to be trained on; a frozen snapshot is not trained."""
    sampler: Sampler | None = None
    """In place of the run's."""
    name: str = "policy"
    """For display: that of a snapshot, or of frozen weights."""


@dataclass(frozen=True, slots=True)
class ScriptedSeat:
    """A scripted player."""

    player: str = "random"
    """One of the environment's ``players``, or ``path/to/file.py:Class``."""

    @property
    def name(self) -> str:
        """Return the player's name, for display."""
        return self.player


@dataclass(frozen=True, slots=True)
class EndpointSeat:
    """A model behind an endpoint. Its tokens are unknown, so it is not trained."""

    endpoint: ChatEndpoint
    """The model."""
    sampling: SamplingParams
    """Temperature and most tokens of its turns."""
    name: str = "endpoint"
    """For display: that of the model."""


Seat = PolicySeat | ScriptedSeat | EndpointSeat
"""Who plays an agent."""


@dataclass(frozen=True, slots=True)
class Lineup:
    """Who plays the agents of one episode. By default the trained policy plays all of them.

    Example::

        Lineup({"second": ScriptedSeat("minimax")}, opponent="fixed:minimax")
    """

    seats: Mapping[str, Seat] = field(default_factory=dict)
    """By agent, or by role for all its agents; the trained policy plays the others."""
    opponent: str = "mirror"
    """Class of opponents, for `Rollout.opponent`: ``mirror``, ``past`` or ``fixed:NAME``."""
    policies: Mapping[str, str] = field(default_factory=dict)
    """In a run of several policies, who plays where `seats` names no player: by agent, or by role."""

    def policy(self, agent: str, role: str) -> str:
        """Return the policy of an agent: ``main`` in a run of one."""
        return self.policies.get(agent) or self.policies.get(role) or MAIN

    def seat(self, agent: str, role: str) -> Seat:
        """Return who plays an agent."""
        return self.seats.get(agent) or self.seats.get(role) or PolicySeat(self.policy(agent, role))
