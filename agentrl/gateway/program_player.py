"""Agent programs that play an agent of a multi-agent environment, with the policy as their model (``env.roles.NAME.program``)."""

from __future__ import annotations

import asyncio
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack

from typing_extensions import override

from agentrl.config.agent import SeatProgramConfig
from agentrl.core.errors import AgentProgramError, EnvironmentFailure
from agentrl.core.lineup import PolicySeat
from agentrl.core.task import Task
from agentrl.core.types import Failure, FinishReason, Info, Message, Rollout, StopReason
from agentrl.episode.chat import Agent
from agentrl.episode.context import EpisodeContext
from agentrl.episode.limits import EpisodeClock
from agentrl.episode.participants import Participant
from agentrl.episode.state import EpisodeState
from agentrl.episode.tool_calls import ToolRunner
from agentrl.gateway.agent_loop import describe_wait, late
from agentrl.gateway.agent_session import EpisodeProgress, PolicySession
from agentrl.gateway.agent_sessions import ONLY, AgentSessions
from agentrl.gateway.program import ProgramLauncher, wait_for_end
from agentrl.gateway.program_process import ProgramInput, RunningProgram, program_prompt, task_json
from agentrl.gateway.seat_turns import SeatTurns
from agentrl.obs.waiting import waiting

MOVES = "program_moves"
"""Key of `Rollout.metadata` with the moves of the program, which may differ from the text of the policy."""
_END_S = 2.0
"""Seconds in which a program may end itself once it has read that the episode is over."""


class GatewaySeatProgram:
    """Makes the participants that a program plays; one in a task source. See `agentrl.episode.participants.SeatProgram`.

    Args:
        config: of the program.
        launcher: starts it.
    """

    def __init__(self, config: SeatProgramConfig, launcher: ProgramLauncher) -> None:
        self._config, self._launcher = config, launcher

    def join(
        self,
        agent: str,
        seat: PolicySeat,
        context: EpisodeContext,
        state: EpisodeState,
        task: Task,
        tools: ToolRunner,
        clock: EpisodeClock,
    ) -> Participant:
        """Return the participant of an episode; see `agentrl.episode.participants.SeatProgram.join`."""
        player = Agent(context, task, state, name=agent)
        player.tools, player.clock = tools, clock
        if self._config.start == "turn":
            return _StartedEachTurn(player, agent, seat, self._config, self._launcher)
        return _StartedOnce(player, agent, seat, self._config, self._launcher)


class _SeatProgress(EpisodeProgress):
    """Numbers the turns of one seat, and keeps the environment's step of each."""

    def __init__(self) -> None:
        super().__init__()
        self.env_step = 0
        """In which the agent acts, or has acted last."""
        self.env_steps: list[int] = []
        """By the number of the turn."""

    @override
    def next_step(self) -> int:
        self.env_steps.append(self.env_step)
        return super().next_step()


class _ProgramParticipant(Participant):
    """An agent that a program plays.

    Args:
        player: the policy, which the program's requests sample.
        agent: its name in the environment.
        seat: the policy that plays it.
        config: of the program.
        launcher: starts it.
    """

    def __init__(
        self, player: Agent, agent: str, seat: PolicySeat, config: SeatProgramConfig, launcher: ProgramLauncher
    ) -> None:
        super().__init__(agent, player.state)
        self._player, self._config, self._launcher = player, config, launcher
        self._is_trained = seat.trained
        self._progress = _SeatProgress()
        self._session = PolicySession(player, config.model, self._progress)
        self._sessions = AgentSessions({ONLY: self._session})
        self._messages: list[Message] = []  # of the seat: observations and moves
        self._moves: list[str] = []
        self._move_steps: list[int] = []
        self._resources = AsyncExitStack()
        self._key = ""  # of the session, once it is open
        self._program: RunningProgram | None = None  # that was started last
        self._is_acting = False

    @override
    async def _act(self, info: Info) -> Message | None:
        self._record_last()
        new, self._new = self._new, []
        if not new and not self._messages:
            raise EnvironmentFailure(f"the agent {self.agent!r} acts and has read no message yet")
        self._messages = [*new] if self._rewritten else [*self._messages, *new]
        self._rewritten, self._progress.env_step = False, self._step
        if not self._key:
            await self._resources.enter_async_context(self._launcher.serving())
            self._key = await self._resources.enter_async_context(self._launcher.gateway.open(self._sessions))
        self._is_acting = True
        with waiting("agent", f"program of {self.agent}", lambda: describe_wait(self._sessions, self._player.clock)):
            text = await self._move("\n\n".join(message.content for message in new))
        self._is_acting = False
        if self._session.stop_reason is not None:
            self.over = self._session.stop_reason
            return None
        if not self._session.has_turns:
            raise self._failure("moved without having requested a turn of the policy")
        move = Message("assistant", text)
        self._messages.append(move)
        self._moves.append(text)
        self._move_steps.append(self._step)
        return move

    @abstractmethod
    async def _move(self, prompt: str) -> str:
        """Return the program's move.

        Args:
            prompt: the text of what the agent has read since its last turn.

        Raises:
            AgentProgramError: the program has failed, or has no move.
            EpisodeError: the engine or the sandbox failed, or the first prompt is too long.
        """

    def _program_input(self, prompt: str) -> ProgramInput:
        return ProgramInput(program_prompt(self._config, prompt), task_json(self._player.task, self._messages))

    def _check(self, fault: str) -> None:
        """Raise what the program, or the engine, has failed with; ``fault`` is empty if the program has not."""
        if self._session.failure.done():
            raise self._session.failure.result()
        if fault:
            raise self._failure(fault)

    def _failure(self, fault: str) -> AgentProgramError:
        """Return the failure of the program."""
        refused = f" Its last refused request: {self._sessions.refused}" if self._sessions.refused else ""
        output = "" if self._program is None else self._program.output_end()
        return AgentProgramError(f"{self._config.setting}: in the seat of {self.agent!r} it {fault}.{refused}{output}")

    @override
    def check_time(self) -> None:
        if self._is_acting and not self._session.is_sampling:
            raise self._failure(late(self._player.clock, "move"))

    @override
    def receive(self, reward: float, metrics: Mapping[str, float] | None) -> None:
        super().receive(reward, metrics)
        self._reward = 0.0  # the session has the turns
        if reward:
            self._session.annotate_last_turn(reward=reward)

    @override
    def _record(self, reply: Message, reason: FinishReason) -> None:
        self._session.annotate_last_turn(observation="".join(message.content for message in self._new))

    @property
    @override
    def turn_steps(self) -> Sequence[int]:
        """For each turn of the policy the environment's step; for each move if the agent is not trained."""
        if not self._is_trained:
            return self._move_steps
        return [self._progress.env_steps[number] for number in self._session.turn_steps]

    @property
    @override
    def moves(self) -> Sequence[str]:
        return self._session.moves if self._is_trained else self._moves

    @override
    def rollout(self, task: Task, *, seconds: float, tool_seconds: float, failure: Failure | None) -> Rollout:
        session = self._session
        session.reward, session.metrics = self.state.reward, self.state.metrics
        rollout = session.rollout(failure)
        rollout.seconds, rollout.tool_seconds = seconds, tool_seconds
        rollout.metadata[MOVES] = list(self._moves)
        if failure is None:
            rollout.stop_reason = self.over or StopReason.FAILED
            rollout.dropped = rollout.dropped or self.over is StopReason.ABORTED
        return rollout

    @override
    async def close(self) -> None:
        await self._resources.aclose()
        await self._player.close()


class _StartedEachTurn(_ProgramParticipant):
    """A program that is started for each turn: its final answer is the move."""

    @override
    async def _move(self, prompt: str) -> str:
        player, earlier = self._player, len(self._progress.env_steps)
        name = f"{player.episode_id}.{len(self._moves)}"
        async with self._launcher.running(self._program_input(prompt), name, self._key, player.tools) as program:
            self._program = program
            fault = await wait_for_end(program, self._sessions, player.clock)
        last = self._session.last_turn()
        if not fault and self._config.answer == "message" and (last is None or last[0] < earlier):
            fault = "" if self._sessions.at_limit else "ended without a turn of the policy"
        self._check(fault)
        return self._launcher.final_answer(program, "" if last is None else last[1])


class _StartedOnce(_ProgramParticipant):
    """A program that is started once, requests its observations, and posts its moves."""

    def __init__(
        self, player: Agent, agent: str, seat: PolicySeat, config: SeatProgramConfig, launcher: ProgramLauncher
    ) -> None:
        super().__init__(player, agent, seat, config, launcher)
        self._turns = self._sessions.seat = SeatTurns()

    @override
    async def _move(self, prompt: str) -> str:
        player = self._player
        if self._program is None:
            running = self._launcher.running(self._program_input(prompt), player.episode_id, self._key, player.tools)
            self._program = await self._resources.enter_async_context(running)
        program = self._program
        move = self._turns.begin(prompt, self._messages)
        fault = await wait_for_end(program, self._sessions, player.clock, move)
        if move.done():
            return move.result()
        if not fault and not self._sessions.at_limit:
            fault = "ended without a move before the end of the episode"
        if fault:
            await program.kill()
        self._check(fault)
        return ""

    @override
    async def close(self) -> None:
        self._turns.end()
        if self._program is not None and self.over is not None:  # the episode has not failed
            await asyncio.wait({self._program.ended}, timeout=_END_S)
        await super().close()
