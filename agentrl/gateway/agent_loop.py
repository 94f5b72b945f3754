"""What agents that play episodes through the gateway have in common, whether the run starts them or they run elsewhere."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import replace

from agentrl.config.agent import AgentConfig
from agentrl.core.errors import AgentProgramError
from agentrl.core.task import Task
from agentrl.core.types import ANSWER, Rollout
from agentrl.episode.chat import Agent
from agentrl.episode.env_steps import AnswerScoring
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.state import EpisodeState
from agentrl.gateway.agent_sessions import AgentSessions

_SHARE_OF_GRACE = 0.05
"""Share of ``rollout.max_seconds`` that an agent has to end after the time limit."""


def time_left(clock: EpisodeClock) -> float:
    """Return the seconds that an agent has left, with what it may take to end after the time limit; 0 or less: it is over."""
    return clock.seconds_left + _SHARE_OF_GRACE * clock.seconds


def late(clock: EpisodeClock, verb: str = "end") -> str:
    """Return in words what is wrong with an agent that has no time left for what it has to do."""
    return f"did not {verb} within rollout.max_seconds={clock.seconds:g}"


def describe_wait(sessions: AgentSessions, clock: EpisodeClock, idle_timeout_s: float | None = None) -> str:
    """Return what an episode waits for whose agent plays, and which key ends the wait.

    Args:
        sessions: of the episode.
        clock: of the episode.
        idle_timeout_s: ``rollout.agent.idle_timeout_s``.
    """
    turns = f"{sessions.turns} turns so far"
    if not sessions.idle_s:
        return f"to read its turn, which is being sampled; {turns}"
    idle_limit = (
        "" if idle_timeout_s is None else f", or {idle_timeout_s:g} s without a request (rollout.agent.idle_timeout_s)"
    )
    return (
        f"to send a request or to end: its last request was {sessions.idle_s:.0f} s ago, {turns}; it has "
        f"{max(0.0, time_left(clock)):.0f} s left (rollout.max_seconds={clock.seconds:g}){idle_limit}"
    )


class AgentLoop(ABC):
    """Plays episodes through the gateway; a `agentrl.episode.custom_loop.Generate` function.

    Args:
        config: of the agent.
    """

    def __init__(self, config: AgentConfig) -> None:
        assert config.setting is not None, "there is an agent"
        self.config = config
        """Configuration of the agent."""
        self.setting = config.setting
        """The key and value that say which agent plays, for messages."""

    async def __call__(self, task: Task, agent: Agent) -> list[Rollout]:
        """Play an episode and return the rollouts of what was sampled: one, or one for each trained agent.

        Raises:
            AgentProgramError: the agent failed, did not end in time, or sent no request.
            EpisodeError: the engine failed, or the task's first prompt is too long.
        """
        agent.clock.raise_nothing()  # an end at the limit is a failure of the agent, which has a message
        if self.config.reward != "environment":
            return await self.run(task, agent, None)
        first = agent.state
        state = EpisodeState(first.rollout_id, first.seed, first.attempt, first.reset_seed)
        scoring = AnswerScoring(agent.context, task, state, agent.tools)
        try:
            return await self.run(replace(task, prompt=await scoring.begin()), agent, scoring)
        finally:
            await scoring.close()

    @abstractmethod
    async def run(self, task: Task, agent: Agent, scoring: AnswerScoring | None) -> list[Rollout]:
        """Play an episode, and `finish` it.

        Args:
            task: of the episode, with the prompt that the agent gets.
            agent: records what is sampled.
            scoring: gives the reward of the final answer; None: something else does.
        """
        ...

    def check(self, sessions: AgentSessions, output: str = "") -> None:
        """Check that an episode which is over has not failed.

        Args:
            sessions: of the episode.
            output: the end of what the agent printed, for messages.

        Raises:
            AgentProgramError: it has, or it has no turn, or none of the rewards that it is to post.
            EpisodeError: the engine failed, or the task's first prompt is too long.
        """
        if sessions.failure.done():
            raise sessions.failure.result()
        if sessions.fault or not sessions.has_turns:
            refused = f" Its last refused request: {sessions.refused}" if sessions.refused else ""
            fault = sessions.fault or "ended without a turn of the policy"
            raise AgentProgramError(f"{self.setting}: it {fault}.{refused}{output}")
        if sessions.may_reward and sessions.unrewarded and not sessions.at_limit:
            of_agents = f" of {', '.join(sessions.unrewarded)}" if any(sessions.unrewarded) else ""
            raise AgentProgramError(
                f"{self.setting}: it ended without posting the reward{of_agents} to /v1/session/reward, as "
                f"rollout.agent.reward=session asks{output}"
            )

    async def finish(
        self,
        sessions: AgentSessions,
        agent: Agent,
        scoring: AnswerScoring | None,
        answer: str,
        metadata: Mapping[str, object],
    ) -> list[Rollout]:
        """Score the final answer of an episode that is over, and return its rollouts.

        Args:
            sessions: of the episode.
            agent: of the episode.
            scoring: see `run`.
            answer: the final answer.
            metadata: added to that of the rollouts.
        """
        if scoring is not None:
            await scoring.score(answer)
            sessions.set_reward(None, scoring.reward, scoring.metrics)
        rollouts = sessions.rollouts(agent)
        for rollout in rollouts:
            rollout.metadata |= {**metadata, ANSWER: answer}
        return rollouts
