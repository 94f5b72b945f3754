"""Rollouts of an episode of several agents, by seat: who played, with which role, and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from agentrl.config.schema import Config
from agentrl.core.lineup import Lineup, PolicySeat
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.registry import make_any_env
from agentrl.core.types import Rollout, SeatRecord


class SeatPlayer(Protocol):
    """What one agent did in one episode, whatever plays it."""

    @property
    def reward(self) -> float:
        """Reward of the episode."""
        ...

    @property
    def turn_steps(self) -> Sequence[int]:
        """For each of its turns the step of the episode, from 0."""
        ...

    @property
    def moves(self) -> Sequence[str]:
        """Its turns as text, in the same order."""
        ...


def agent_roles(config: Config) -> dict[str, str]:
    """Return the agents of the episodes of a run, or of one of its sources, with their roles, in the order of seats.

    They are those of the agent program, or else of the environment. Empty if an episode has one agent.
    """
    if config.rollout.agent.setting is not None:
        return config.rollout.agent.roles
    env = make_any_env(config.env.name, config.env.options)
    return {agent: env.role_of(agent) for agent in env.possible_agents} if isinstance(env, MultiAgentEnv) else {}


class SeatTable:
    """Who plays the agents of one episode.

    Args:
        lineup: of the episode.
        roles: of the agents, in the order of seats.
        episode: id of the episode.
    """

    def __init__(self, lineup: Lineup, roles: Mapping[str, str], episode: str) -> None:
        self._lineup = lineup
        self._roles = roles
        self._episode = episode

    @property
    def returned_agents(self) -> list[str]:
        """Agents whose rollouts an episode returns: those that are trained; without any, all."""
        return [agent for agent in self._roles if self._is_trained(agent)] or list(self._roles)

    def assign_seats(self, rollouts: Mapping[str, Rollout], players: Mapping[str, SeatPlayer]) -> list[Rollout]:
        """Set roles, seats and players of rollouts, and return them by seat.

        Args:
            rollouts: by agent.
            players: all agents of the episode.
        """
        agents = [agent for agent in self._roles if agent in players]
        rewards = tuple(players[agent].reward for agent in agents)
        records = tuple(self._record(agent, players[agent]) for agent in agents)
        for agent, rollout in rollouts.items():
            rollout.role, rollout.seat = self._roles[agent], list(self._roles).index(agent)
            seat = self._lineup.seat(agent, rollout.role)
            if isinstance(seat, PolicySeat):
                rollout.policy = seat.policy
            rollout.opponent, rollout.episode = self._lineup.opponent, self._episode
            rollout.seat_rewards, rollout.seats = rewards, records
        return sorted(rollouts.values(), key=lambda rollout: rollout.seat)

    def _is_trained(self, agent: str) -> bool:
        seat = self._lineup.seat(agent, self._roles[agent])
        return isinstance(seat, PolicySeat) and seat.trained

    def _record(self, agent: str, player: SeatPlayer) -> SeatRecord:
        role, trained = self._roles[agent], self._is_trained(agent)
        name, moves = self._lineup.seat(agent, role).name, () if trained else tuple(player.moves)
        return SeatRecord(agent, role, name, trained, tuple(player.turn_steps), moves)
