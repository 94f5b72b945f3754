"""One attempt at one episode of a multi-agent environment."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from agentrl.core.errors import AgentrlError, ConfigError, unknown_name
from agentrl.core.imports import is_reference, load_object
from agentrl.core.lineup import EndpointSeat, Lineup, ScriptedSeat
from agentrl.core.multi_agent_env import MultiAgentEnv, PlayerFactory
from agentrl.core.task import Task
from agentrl.core.types import Failure, Info, Message, Rollout, StopReason
from agentrl.episode.context import EpisodeContext
from agentrl.episode.env_threads import ThreadedMultiAgentEnv
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.participants import Participant, PolicyParticipant, ScriptedParticipant, SeatProgram
from agentrl.episode.seats import SeatTable
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner
from agentrl.obs.waiting import ROLLOUT, TURN, waiting

_log = logging.getLogger(__name__)

_SHARE_OF_GRACE = 0.1
"""Share of ``rollout.max_seconds`` that an episode with programs may take after the time limit. A program that does not move has
failed before that; see `agentrl.gateway.agent_loop.time_left`."""
_ANY = 2**31
"""Limit of the tokens of a model that is not the run's: its endpoint has one."""


def player_factory(env: MultiAgentEnv, name: str, key: str = "env.roles") -> PlayerFactory:
    """Return the scripted player of a name in ``env.players``, or of ``path/to/file.py:Class``; ``key`` as in `load_player`.

    Raises:
        ConfigError: there is none.
    """
    if name in env.players:
        return env.players[name]
    if not is_reference(name):
        raise unknown_name(f"player of {type(env).__name__}", name, sorted(env.players), key)
    return load_player(name, key)


def load_player(name: str, key: str = "env.roles") -> PlayerFactory:
    """Return the scripted player ``path/to/file.py:Class``, which the configuration key ``key`` names.

    Raises:
        ConfigError: there is none.
    """
    if not is_reference(name):
        raise ConfigError(
            f"{key}: {name} is no player of an agent program, which has none with names; write path/to/file.py:Class"
        )
    factory = load_object(name, key)
    if not callable(factory):
        raise ConfigError(f"{key}: the player {name} is {factory!r:.100}, and makes no player")
    made: PlayerFactory = factory
    return made


class MultiAgentEpisode:
    """Runs an episode of several agents: each policy has a separate conversation and trajectory.

    Agents that act at the same time are sampled concurrently. An agent without turns or tokens ends the episode: the
    environment's ``forfeit`` has the rewards.

    Args:
        context: what all episodes share.
        task: the problem.
        state: id, seeds and attempt of the episode.
        lineup: who plays.
        programs: play agents with the policies of their seats, by agent or role.
    """

    def __init__(
        self,
        context: EpisodeContext,
        task: Task,
        state: EpisodeState,
        lineup: Lineup,
        programs: Mapping[str, SeatProgram] = MappingProxyType({}),
    ) -> None:
        self.tools = ToolRunner(context.tool_clients, task, state.episode_id, context.served)
        """Runs the tool calls of all agents. Its sessions stay open after `run`, for grading."""
        self._context = context
        self._task = task
        self._state = state
        self._lineup = lineup
        self._programs = programs
        self._env = ThreadedMultiAgentEnv(context)
        self._participants: dict[str, Participant] = {}
        self._infos: dict[str, Info] = {}
        self._steps = 0  # of the environment
        self._began = time.monotonic()
        self._clock: EpisodeClock

    async def run(self) -> None:
        """Run until the environment or a limit ends the episode.

        Raises:
            EpisodeError: something failed.
        """
        self._began = time.monotonic()
        max_seconds = self._context.limits.max_seconds
        grace_s = _SHARE_OF_GRACE * max_seconds if self._programs else 0.0
        self._clock = self.tools.clock = EpisodeClock(max_seconds, grace_s)
        with waiting(ROLLOUT, self._state.episode_id, lambda: f"turns {self._turns}"):
            try:
                async with self._clock:
                    await self._begin()
                    await self._run()
            except TimeoutError:
                if not self._clock.expired:
                    raise
                for player in self._participants.values():
                    player.check_time()
                self._end(StopReason.MAX_TIME)
            finally:
                await self._close()

    def rollouts(self, failure: Failure | None = None) -> list[Rollout]:
        """Return the rollout of each trained agent, by seat; without trained agents, of each agent.

        Args:
            failure: what ended the episode.
        """
        if failure is not None:
            self._end(StopReason.FAILED)
        if not self._participants:  # the environment was never built
            reason = StopReason.FAILED if failure is not None else StopReason.MAX_TIME
            return [Rollout(self._task.id, self._state.rollout_id, [], 0.0, reason, failure=failure)]
        env, seconds = self._env.env, time.monotonic() - self._began
        roles = {agent: env.role_of(agent) for agent in env.possible_agents}
        table = SeatTable(self._lineup, roles, self._state.rollout_id)
        rollouts = {
            agent: self._participants[agent].rollout(
                self._task, seconds=seconds, tool_seconds=self.tools.seconds, failure=failure
            )
            for agent in table.returned_agents
            if agent in self._participants
        }
        return table.assign_seats(rollouts, self._participants)

    @property
    def _turns(self) -> str:
        turns = (f"{player.agent} {len(player.state.turns)}" for player in self._participants.values())
        return ", ".join(turns)

    async def _begin(self) -> None:
        views, self._infos = await self._env.reset(self._task, self._state.env_seed)
        for agent in self._env.read("possible_agents", lambda env: env.possible_agents):
            self._participants[agent] = self._participant(agent)
        for agent, view in views.items():
            self._participants[agent].observe(view["messages"])

    def _participant(self, agent: str) -> Participant:
        first, env = self._state, self._env.env
        state = EpisodeState(f"{first.rollout_id}.{agent}", first.seed, first.attempt, first.reset_seed)
        seat = self._lineup.seat(agent, env.role_of(agent))
        if isinstance(seat, ScriptedSeat):
            return ScriptedParticipant(agent, state, seat.player, player_factory(env, seat.player), self._env)
        if isinstance(seat, EndpointSeat):
            limits = replace(self._context.limits, max_tokens=_ANY, max_new_tokens=seat.sampling.max_new_tokens)
            sampling = replace(seat.sampling, seed=self._context.sampling.seed)
            context = replace(self._context, endpoint=seat.endpoint, limits=limits, sampling=sampling)
            return PolicyParticipant(agent, context, state, self._task, env, self.tools, self._clock)
        context = replace(self._context, policy=seat.policy)
        if seat.sampler is not None:  # whose tokens are not trained
            sampling = replace(context.sampling, experts_from=None, support=None)
            context = replace(context, sampler=seat.sampler, sampling=sampling)
        program = self._programs.get(agent) or self._programs.get(env.role_of(agent))
        if program is not None:
            return program.join(agent, seat, context, state, self._task, self.tools, self._clock)
        return PolicyParticipant(agent, context, state, self._task, env, self.tools, self._clock)

    async def _run(self) -> None:
        goes_on = True
        while goes_on and self._env.read("agents", lambda env: env.agents):
            acting = self._env.read("acting", lambda env: tuple(env.acting))
            with waiting(TURN, ", ".join(acting)):
                goes_on = await self._step(acting)

    async def _step(self, acting: tuple[str, ...]) -> bool:
        """Let the agents act, and step the environment; return whether the episode continues."""
        actions = await self._act(acting)
        self._steps += 1
        silent = [agent for agent, action in actions.items() if action is None]
        if silent:
            await self._forfeit(silent)
            return False
        taken = {agent: action for agent, action in actions.items() if action is not None}
        views, rewards, terminations, truncations, self._infos = await self._env.step(taken)
        for agent, player in self._participants.items():
            if player.over is not None:
                continue
            self._receive(player, rewards.get(agent, 0.0), self._infos.get(agent, {}))
            if agent in views:
                player.observe(views[agent]["messages"])
            if terminations.get(agent) or truncations.get(agent):
                player.leave(StopReason.TERMINATED if terminations.get(agent) else StopReason.TRUNCATED)
        return True

    async def _act(self, acting: tuple[str, ...]) -> dict[str, Message | None]:
        """Return the messages of agents that act at the same time."""
        if len(acting) == 1:
            [agent] = acting
            return {agent: await self._participants[agent].act(self._infos.get(agent, {}), self._steps)}
        try:
            async with asyncio.TaskGroup() as group:
                turns = {
                    agent: group.create_task(self._participants[agent].act(self._infos.get(agent, {}), self._steps))
                    for agent in acting
                }
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None  # the first ended the others
        return {agent: turn.result() for agent, turn in turns.items()}

    async def _forfeit(self, agents: list[str]) -> None:
        """End the episode because agents have no turns or tokens left, or were aborted."""
        if any(self._participants[agent].over is StopReason.ABORTED for agent in agents):
            for player in self._participants.values():
                player.over = StopReason.ABORTED
        else:
            for agent in agents:
                for name, reward in (await self._env.forfeit(agent)).items():
                    self._receive(self._participants[name], reward, {})
        self._end(StopReason.TRUNCATED)

    def _end(self, reason: StopReason) -> None:
        for player in self._participants.values():
            if player.over is None or reason is StopReason.FAILED:
                player.over = reason
            player.leave(reason)

    def _receive(self, player: Participant, reward: object, info: Info) -> None:
        number = self._env.number(reward, f"the reward of {player.agent!r}")
        player.receive(number, self._env.metrics(info))

    async def _close(self) -> None:
        """End the sampler's sessions and close the environment. Failures are only logged: the episode is over."""
        for player in self._participants.values():
            await player.close()
        try:
            await self._env.close()
        except AgentrlError as error:
            _log.warning("episode %s was not closed: %s", self._state.episode_id, error)
