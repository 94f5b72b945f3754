"""One attempt at one episode: token in, token out."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from agentrl.env import Env, Step
from agentrl.episode.envcalls import EnvCalls
from agentrl.episode.limits import Limits
from agentrl.episode.state import EpisodeState
from agentrl.episode.toolcalls import ToolRunner
from agentrl.errors import AgentrlError, TaskError
from agentrl.protocols import Renderer, Sampler, ToolClient
from agentrl.task import Task
from agentrl.types import (
    FinishReason,
    Generation,
    Info,
    Message,
    Observation,
    Prompt,
    SamplingParams,
    StopReason,
    ToolCalls,
    ToolResults,
    Turn,
)

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Services:
    """What episodes run on; one for all of them."""

    env_factory: Callable[[], Env]
    renderer: Renderer
    sampler: Sampler
    tool_clients: Mapping[str, ToolClient]
    limits: Limits
    sampling: SamplingParams
    """``max_new_tokens`` is shrunk to what the limits leave; the environment's stop strings are added."""
    pool: Executor
    """Runs the plain methods of environments."""
    policy: str = "main"
    """Which policy of the sampler speaks."""


class Episode:
    """Plays a task to its end, or goes on with one from its state. ``state`` is always that of the last finished turn.

    Args:
        services: what it runs on.
        task: the problem.
        state: a fresh one, or one from `EpisodeState.from_dict`.
        env_state: the environment's, where the episode is gone on with.
    """

    def __init__(
        self, services: Services, task: Task, state: EpisodeState, env_state: dict[str, object] | None = None
    ) -> None:
        self.state = state
        self._services = services
        self._task = task
        self._env_state = env_state
        self._env = EnvCalls(services.env_factory, services.pool)
        self._tools = ToolRunner(services.tool_clients, state.episode_id)
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """Wall time used."""
        return self.state.seconds + time.monotonic() - self._began

    async def play(self) -> StopReason:
        """Play until the environment or a limit ends it. What an unfinished turn sampled when time is up is left out.

        Raises:
            EpisodeError: something failed; ``state`` holds what there was before.
        """
        self._began = time.monotonic()
        clock = asyncio.timeout(self._services.limits.max_seconds - self.state.seconds)
        try:
            async with clock:
                await self._begin()
                return await self._turns()
        except TimeoutError:
            if not clock.expired():
                raise
            return StopReason.MAX_TIME
        finally:
            await self._close()

    async def snapshot(self) -> dict[str, object]:
        """Return the state as JSON-able data, the environment's within."""
        env_state = await self._env.get_state()
        return replace(self.state, seconds=self.seconds).to_dict(env_state)

    async def _begin(self) -> None:
        observation, info = await self._env.reset(self._task, self.state.seed)
        if self._env_state is not None:
            await self._env.set_state(self._env_state)
            return
        step = await self._settle((observation, 0.0, False, False, info))
        messages = _messages(step[0])
        prompt = self._services.renderer.render(messages, self._env.env.tools)
        limits = self._services.limits
        if limits.room(len(prompt.token_ids)) < 1:
            raise TaskError(
                f"task {self._task.id!r}: its prompt of {len(prompt.token_ids)} tokens leaves no room to answer within "
                f"rollout.max_tokens={limits.max_tokens}"
            )
        self.state.messages.extend(messages)
        self.state.prompt_ids = prompt.token_ids
        self.state.prompt = self._services.renderer.decode(prompt.token_ids)

    async def _turns(self) -> StopReason:
        limits, state = self._services.limits, self.state
        while len(state.turns) < limits.max_turns:
            room = limits.room(len(state.prompt_ids))
            if room < 1:
                return StopReason.MAX_TOKENS
            state.trajectory.extend_to(state.prompt_ids)
            generation = await self._generate(room)
            state.trajectory.append_sampled(generation)
            if generation.finish_reason is FinishReason.ABORT:
                return StopReason.ABORTED
            ended = await self._answer(generation)
            if ended is not None:
                return ended
        return StopReason.MAX_TURNS

    async def _generate(self, room: int) -> Generation:
        services, state, turn = self._services, self.state, len(self.state.turns)
        request_id = f"{state.episode_id}/{turn}"
        sampling = services.sampling
        params = replace(
            sampling,
            max_new_tokens=min(room, sampling.max_new_tokens),
            stop=tuple(dict.fromkeys((*sampling.stop, *self._env.env.stop))),
            stop_token_ids=tuple(dict.fromkeys((*sampling.stop_token_ids, services.renderer.end_token_id))),
            seed=None if sampling.seed is None else _request_seed(sampling.seed, state.seed, request_id),
        )
        try:
            return await services.sampler.generate(
                Prompt(state.prompt_ids),
                params,
                session_id=state.episode_id,
                request_id=request_id,
                policy=services.policy,
            )
        except asyncio.CancelledError:
            await self._abort(request_id)
            raise

    async def _answer(self, generation: Generation) -> StopReason | None:
        """Give the environment (or its tools) what the policy said; return why the episode is over, if it is."""
        state, renderer, tools = self.state, self._services.renderer, self._env.env.tools
        action = renderer.parse(generation.token_ids)
        if action.tool_calls and tools:
            calls = tuple(
                replace(call, id=f"{len(state.turns)}.{number}") for number, call in enumerate(action.tool_calls)
            )
            action = replace(action, tool_calls=calls)
            results = await self._tools.local(calls, tools)
            answers = tuple(Message("tool", result.content, tool_call_id=result.call_id) for result in results)
            step: Step = (answers, 0.0, False, False, {})
        else:
            action = Message("assistant", action.content)
            step = await self._settle(await self._env.step(action))
        observation, reward, terminated, truncated, _ = step
        new = _messages(observation)
        heard = "".join(message.content for message in new)
        state.turns.append(Turn(action.content, heard, generation.finish_reason, reward))
        state.messages.extend((action, *new))
        if terminated or truncated:
            return StopReason.TERMINATED if terminated else StopReason.TRUNCATED
        said = Prompt(state.prompt_ids)
        following = renderer.bridge(said, generation.token_ids, new, tools) or renderer.render(state.messages, tools)
        state.prompt_ids = following.token_ids
        return None

    async def _settle(self, step: Step) -> Step:
        """Run the calls that an environment asks for until it answers with messages; sum the rewards on the way."""
        observation, reward, terminated, truncated, info = step
        total = self._count(reward, info)
        while isinstance(observation, ToolCalls) and not (terminated or truncated):
            results = await self._tools.remote(observation.calls)
            observation, reward, terminated, truncated, info = await self._env.step(ToolResults(results))
            total += self._count(reward, info)
        return observation, total, terminated, truncated, info

    def _count(self, reward: float, info: Info) -> float:
        """Add a reward, take over the latest metrics, and return the reward."""
        self.state.reward += float(reward)
        if "metrics" in info:
            self.state.metrics = {key: float(value) for key, value in info["metrics"].items()}
        return float(reward)

    async def _abort(self, request_id: str) -> None:
        try:
            await self._services.sampler.abort(request_id)
        except AgentrlError as error:
            _log.warning("request %s was not aborted: %s", request_id, error)

    async def _close(self) -> None:
        """End sessions and the environment. What cannot be told is only logged: the episode is over."""
        await self._tools.close()
        try:
            await self._services.sampler.close_session(self.state.episode_id)
            await self._env.close()
        except AgentrlError as error:
            _log.warning("episode %s was not closed: %s", self.state.episode_id, error)


def _messages(observation: Observation) -> tuple[Message, ...]:
    return () if isinstance(observation, ToolCalls) else observation  # calls that came with the end are not run


def _request_seed(run_seed: int, episode_seed: int, request_id: str) -> int:
    """Return a seed that depends on nothing but the request, the same in every process."""
    text = f"{run_seed}/{episode_seed}/{request_id}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "big") >> 1
