"""Calls of an environment from an event loop: synchronous methods in threads, coroutines directly, typed errors."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any, Generic, TypeVar

import gymnasium
from typing_extensions import override

from agentrl.core.env import RESET_FORM, STEP_FORM, AsyncEnv, Env, Step, observation_fault, returned_fault
from agentrl.core.errors import EnvironmentFailure
from agentrl.core.multi_agent_env import (
    MULTI_RESET_FORM,
    MULTI_STEP_FORM,
    MultiAgentEnv,
    MultiReset,
    MultiStep,
    multi_agent_fault,
)
from agentrl.core.task import Task
from agentrl.core.types import Action, Info, Message, Observation, ToolCalls
from agentrl.core.user_code import await_user_code, user_code
from agentrl.episode.context import EpisodeContext
from agentrl.obs.waiting import waiting

T = TypeVar("T")
E = TypeVar("E", Env, MultiAgentEnv)

_CLOSES_NOTHING = (gymnasium.Env.close, MultiAgentEnv.close, AsyncEnv.close)


class _Threaded(Generic[E]):
    """The environment of one episode, built in `reset`; its synchronous methods run in the pool of ``context``, if any.

    What a method raises, or returns against the contract, is an `EnvironmentFailure` that names it.
    """

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context
        self._pool = context.pool
        self._env: E | None = None
        self._busy = False

    @property
    def env(self) -> E:
        """The environment; only after `reset`."""
        assert self._env is not None, "reset comes first"
        return self._env

    @property
    def name(self) -> str:
        """Name of the environment's class."""
        return type(self._env).__name__ if self._env is not None else "the environment"

    def read(self, attribute: str, get: Callable[[E], T]) -> T:
        """Return what ``get`` returns of the environment: an attribute, which may be a property of the author."""
        with user_code(lambda error: self._failure(attribute, error)):
            return get(self.env)

    async def get_state(self) -> dict[str, Any]:
        """Return the environment's state."""
        return await self._call("get_state", self.env.get_state)

    async def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        await self._call("set_state", lambda: self.env.set_state(state))

    async def close(self) -> None:
        """Close the environment, unless one of its methods still runs in a thread that was cancelled."""
        if self._env is not None and not self._busy and type(self._env).close not in _CLOSES_NOTHING:
            await self._call("close", self._env.close)

    def number(self, value: object, name: str) -> float:
        """Return a value of the environment as a number; `EnvironmentFailure` if it is not a finite one."""
        try:
            number = math.nan if isinstance(value, str | bytes) else float(value)  # type: ignore[arg-type]
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvironmentFailure(f"{self.name}: {name} is {value!r:.100}, not a finite number")
        return number

    def metrics(self, info: Info) -> dict[str, float] | None:
        """Return the metrics in an ``info``, if it has some; `EnvironmentFailure` if they are not finite numbers."""
        if "metrics" not in info:
            return None
        metrics = info["metrics"]
        if not isinstance(metrics, Mapping):
            raise EnvironmentFailure(f"{self.name}: info['metrics'] is {metrics!r:.100}, not a dict of numbers")
        return {str(key): self.number(value, f"the metric {key!r}") for key, value in metrics.items()}

    def answer(self, info: Info) -> str | None:
        """Return the final answer in an ``info``, if it has one; `EnvironmentFailure` if it is no text."""
        answer = info.get("final_answer")
        if not isinstance(answer, str | None):
            raise EnvironmentFailure(f"{self.name}: info['final_answer'] is {answer!r:.100}, not a text")
        return answer

    async def _call(self, name: str, method: Callable[[], T], *, blocking: bool = True) -> T:
        """Call a synchronous method, in the pool if it is ``blocking``."""

        def run() -> T:
            try:
                with user_code(lambda error: self._failure(name, error)):
                    return method()
            finally:
                self._busy = False

        with waiting("environment", lambda: f"{self.name}.{name}"):
            if self._pool is None or not blocking:
                return run()
            self._busy = True
            return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    async def _await(self, name: str, method: Callable[[], Awaitable[T]]) -> T:
        with waiting("environment", lambda: f"{self.name}.{name}"), user_code(lambda error: self._failure(name, error)):
            return await await_user_code(method())

    def _failure(self, method: str, error: BaseException) -> EnvironmentFailure:
        call = f"{self.name}.{method}" if self._env is not None else f"{self.name}'s constructor"
        return self._context.author_failure(call, error)


class ThreadedEnv(_Threaded[Env]):
    """The environment of one agent."""

    async def reset(self, task: Task, seed: int) -> tuple[Observation, Info]:
        """Build the environment and start an episode."""
        options = {"task": task}

        def build() -> tuple[Observation, Info] | None:
            env = self._context.env_factory()
            assert isinstance(env, Env), "the runner knows the environment's class"
            self._env = env
            return None if isinstance(env, AsyncEnv) else env.reset(seed=seed, options=options)

        started = await self._call("reset", build)
        if isinstance(self._env, AsyncEnv):
            started = await self._await("areset", partial(self._env.areset, seed=seed, options=options))
        result: tuple[Observation, Info] = self._check_returned("reset", started, RESET_FORM)
        return result

    async def step(self, action: Action) -> Step:
        """Take an action."""
        env = self.env
        if isinstance(env, AsyncEnv):
            stepped = await self._await("astep", partial(env.astep, action))
        else:
            stepped = await self._call("step", lambda: env.step(action), blocking=env.blocking)
        result: Step = self._check_returned("step", stepped, STEP_FORM)
        return result

    async def truncate(self) -> tuple[float, Info] | ToolCalls:
        """Return the last reward of an episode that a limit ends, or the calls that score it; none while a step still runs."""
        env = self._env
        if env is None or self._busy or type(env).truncate is Env.truncate:
            return 0.0, {}
        if isinstance(env, AsyncEnv):
            returned = await self._await("atruncate", env.atruncate)
        else:
            returned = await self._call("truncate", env.truncate)
        if isinstance(returned, ToolCalls) and not observation_fault(returned):
            return returned
        if not isinstance(returned, tuple) or len(returned) != 2 or not isinstance(returned[1], dict):
            raise EnvironmentFailure(
                f"{self.name}.truncate must return (reward, info) or ToolCalls, it returned {returned!r:.160}"
            )
        return returned

    @override
    async def close(self) -> None:
        if isinstance(self._env, AsyncEnv):
            await self._await("aclose", self._env.aclose)
        await super().close()

    def _check_returned(self, method: str, returned: Any, form: str) -> Any:
        """Return what a method returned if it has the form."""
        if fault := returned_fault(returned, form):
            raise EnvironmentFailure(f"{self.name}.{method} {fault}")
        return returned


class ThreadedMultiAgentEnv(_Threaded[MultiAgentEnv]):
    """The environment of several agents."""

    async def reset(self, task: Task, seed: int) -> MultiReset:
        """Build the environment and start an episode."""

        def build() -> MultiReset:
            env = self._context.env_factory()
            assert isinstance(env, MultiAgentEnv), "the runner knows the environment's class"
            self._env = env
            return env.reset(seed=seed, options={"task": task})

        started = await self._call("reset", build)
        if fault := multi_agent_fault(self.env, started, MULTI_RESET_FORM):
            raise EnvironmentFailure(f"{self.name}.reset {fault}")
        return started

    async def step(self, actions: dict[str, Message]) -> MultiStep:
        """Take the actions of the agents that act."""
        stepped = await self._call("step", lambda: self.env.step(actions), blocking=self.env.blocking)
        if fault := multi_agent_fault(self.env, stepped, MULTI_STEP_FORM):
            raise EnvironmentFailure(f"{self.name}.step {fault}")
        return stepped

    async def forfeit(self, agent: str) -> dict[str, float]:
        """Return the rewards if an agent can act no more."""
        return await self._call("forfeit", lambda: self.env.forfeit(agent))

    async def act(self, who: str, act: Callable[[], T]) -> T:
        """Let a scripted player act; its exceptions are failures of the environment."""
        return await self._call(f"players[{who!r}]", act)
