"""The sessions of one episode: that of its only agent, or one for each of several."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agentrl.config.agent import AgentConfig
from agentrl.core.errors import EpisodeError
from agentrl.core.lineup import PolicySeat
from agentrl.core.types import Failure, Rollout, StopReason
from agentrl.episode.chat import Agent
from agentrl.episode.seats import SeatTable
from agentrl.gateway.agent_session import EpisodeProgress, PolicySession, Session
from agentrl.gateway.dialects.base import BadRequestError
from agentrl.gateway.fixed_session import FixedSession
from agentrl.gateway.seat_turns import SeatTurns

ONLY = ""
"""The name of the agent of an episode that has one."""


@dataclass(frozen=True, slots=True)
class AgentEnd:
    """The end of an episode, as an agent that runs elsewhere reports it."""

    failure: str = ""
    """What went wrong at the agent; empty if nothing did."""
    answer: str | None = None
    """The final answer; None: the policy's last turn."""
    result: Any = None
    """What it leaves for the reward function, as JSON."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the rollouts, besides those that were set with rewards."""


class AgentSessions:
    """The sessions of one episode, by agent.

    Args:
        by_agent: in the order of seats; `ONLY` is the name of an agent without others.
        agent_of: the agent that each model name chooses; empty: any model is the only agent.
        may_reward: whether the program may set rewards.
    """

    def __init__(
        self,
        by_agent: Mapping[str, Session],
        agent_of: Mapping[str, str] | None = None,
        *,
        may_reward: bool = False,
    ) -> None:
        self.by_agent = by_agent
        """In the order of seats."""
        self.may_reward = may_reward
        """Whether the program may set rewards."""
        self.refused = ""
        """The last request that was refused, in words."""
        self.fault = ""
        """Why the episode has failed, in words; empty if it has not."""
        self.may_end = False
        """Whether the agent may end the episode itself: a program ends it by its own end."""
        self.ended: asyncio.Future[AgentEnd] = asyncio.get_running_loop().create_future()
        """How the agent has ended it."""
        self.needs_reward = False
        """Whether it cannot be ended without a reward."""
        self.seat: SeatTurns | None = None
        """Seat of a program that requests its observations; None: it does not."""
        self.over = asyncio.Event()
        """Set when an episode that the agent may end is over."""
        self._agent_of = agent_of or {}
        self.requested_at = time.monotonic()
        """When the last request came, on `time.monotonic`'s clock."""

    @classmethod
    def open(cls, agent: Agent, config: AgentConfig) -> AgentSessions:
        """Return the sessions of an episode of an agent program, and prepare `Agent.unfinished_rollouts`."""
        may_reward, progress = config.reward == "session", EpisodeProgress()
        if not config.agents:
            return cls({ONLY: PolicySession(agent, config.model, progress)}, may_reward=may_reward)
        assert agent.lineup is not None, "an episode of several agents has a lineup"
        by_agent: dict[str, Session] = {}
        for number, (model, name) in enumerate(config.models.items()):
            seat = agent.lineup.seat(name, config.roles[name])
            if isinstance(seat, PolicySeat):
                by_agent[name] = PolicySession(agent.join(name, seat), model, progress)
            else:
                by_agent[name] = FixedSession(agent, model, progress, seat, number)
        sessions = cls(by_agent, config.models, may_reward=may_reward)
        table = SeatTable(agent.lineup, config.roles, agent.state.rollout_id)
        agent.several_rollouts = lambda failure: sessions.seat_rollouts(table, failure)
        return sessions

    @property
    def models(self) -> list[str]:
        """Model names, in the order of seats."""
        return [session.model for session in self.by_agent.values()]

    def choose(self, agent: str | None, model: str = "") -> Session:
        """Return the session that a request is for.

        Args:
            agent: the agent that it names; None: it names none.
            model: in its body.

        Raises:
            BadRequestError: there is no such agent.
        """
        names = ", ".join(self.by_agent)
        if agent is not None:
            if agent not in self.by_agent or agent == ONLY:
                known = f"there are {names}" if names else "this episode has one agent, without a name"
                raise BadRequestError(f"there is no agent {agent!r:.200} in this episode: {known}", 404)
            return self.by_agent[agent]
        if ONLY in self.by_agent:
            return self.by_agent[ONLY]
        if model not in self._agent_of:
            raise BadRequestError(
                f"the model {model!r:.200} is none of this episode's agents; there are {', '.join(self.models)}. The address "
                f"/s/KEY/agents/NAME and the header x-agentrl-agent choose an agent, too: {names}",
                404,
            )
        return self.by_agent[self._agent_of[model]]

    def set_reward(self, agent: str | None, reward: float, metrics: Mapping[str, float]) -> None:
        """Set the reward and metrics of an agent's rollout; None: of all agents.

        Raises:
            BadRequestError: there is no such agent.
        """
        for session in self.by_agent.values() if agent is None else (self.choose(agent),):
            session.reward, session.metrics, session.has_reward = reward, dict(metrics), True

    def last_message(self) -> str:
        """Return the text of the turn that was requested last, of all agents; auxiliary turns do not count."""
        turns = (session.last_turn() for session in self.by_agent.values())
        return max((turn for turn in turns if turn is not None), default=(0, ""))[1]

    def end(self, end: AgentEnd, reward: float | None) -> None:
        """End the episode of an agent that runs elsewhere, with the reward of all rollouts; None: they have theirs."""
        for session in self.by_agent.values() if reward is not None else ():
            session.reward, session.has_reward = reward or 0.0, True
        self.ended.set_result(end)

    @property
    def unrewarded(self) -> list[str]:
        """Trained agents whose reward was not set; the only agent's name is empty."""
        return [
            name
            for name, session in self.by_agent.items()
            if isinstance(session, PolicySession) and not session.has_reward
        ]

    @property
    def turns(self) -> int:
        """Turns so far, those in progress included."""
        return sum(session.turns for session in self.by_agent.values())

    @property
    def idle_s(self) -> float:
        """Seconds since the last request, or the end of the last turn; 0 while a turn is in progress."""
        since_request_s = time.monotonic() - self.requested_at
        return min(since_request_s, *(session.idle_s for session in self.by_agent.values()))

    @property
    def failure(self) -> asyncio.Future[EpisodeError]:
        """What the infrastructure failed with; it ends the episode."""
        return next(iter(self.by_agent.values())).failure

    @property
    def has_turns(self) -> bool:
        """Whether a turn is finished, or a limit was answered."""
        return any(session.has_turns for session in self.by_agent.values())

    @property
    def at_limit(self) -> bool:
        """Whether a limit was the last answer to an agent."""
        return any(session.stop_reason is not None for session in self.by_agent.values())

    def rollouts(self, agent: Agent) -> list[Rollout]:
        """Return the rollouts of the episode, once the program has ended."""
        if agent.several_rollouts is not None:
            return agent.several_rollouts(None)
        (session,) = self.by_agent.values()
        assert isinstance(session, PolicySession), "the only agent is the policy"
        return [session.rollout()]

    def seat_rollouts(self, table: SeatTable, failure: Failure | None) -> list[Rollout]:
        """Return the rollouts of an episode of several agents.

        Args:
            table: who plays.
            failure: what ended the episode.
        """
        rollouts = {}
        for name in table.returned_agents:
            session = self.by_agent[name]
            assert isinstance(session, PolicySession), "the policy is trained in an agent"
            rollouts[name] = session.rollout(failure)
        aborted = any(session.stop_reason is StopReason.ABORTED for session in self.by_agent.values())
        for rollout in rollouts.values():
            rollout.dropped = rollout.dropped or aborted
        return table.assign_seats(rollouts, self.by_agent)

    async def close(self) -> None:
        """Abort the turns in progress."""
        await asyncio.gather(*(session.close() for session in self.by_agent.values()))
