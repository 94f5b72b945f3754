"""Calls of an environment from an event loop: synchronous methods in threads, coroutines directly, typed errors."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import gymnasium

from agentrl.core.env import RESET_FORM, STEP_FORM, AsyncEnv, Env, Step, returned_fault
from agentrl.core.errors import AgentrlError, EnvironmentFailure
from agentrl.core.task import Task
from agentrl.core.types import Action, Info, Observation
from agentrl.episode.context import EpisodeContext
from agentrl.obs.waiting import waiting

T = TypeVar("T")


class ThreadedEnv:
    """The environment of one episode, built in `reset`; its synchronous methods run in the pool of ``context``, if any.

    What a method raises, or returns against the contract, is an `EnvironmentFailure` that names it.
    """

    def __init__(self, context: EpisodeContext) -> None:
        self._context = context
        self._pool = context.pool
        self._env: Env | None = None
        self._busy = False

    @property
    def env(self) -> Env:
        """The environment; only after `reset`."""
        assert self._env is not None, "reset comes first"
        return self._env

    async def reset(self, task: Task, seed: int) -> tuple[Observation, Info]:
        """Build the environment and start an episode."""
        options = {"task": task}

        def build() -> tuple[Observation, Info] | None:
            self._env = self._context.env_factory()
            return None if isinstance(self._env, AsyncEnv) else self._env.reset(seed=seed, options=options)

        started = await self._guard("reset", self._thread(build))
        if isinstance(self._env, AsyncEnv):
            started = await self._guard("areset", self._env.areset(seed=seed, options=options))
        result: tuple[Observation, Info] = self._checked("reset", started, RESET_FORM)
        return result

    async def step(self, action: Action) -> Step:
        """Take an action."""
        env = self.env
        if isinstance(env, AsyncEnv):
            stepped = await self._guard("astep", env.astep(action))
        else:
            stepped = await self._guard("step", self._thread(lambda: env.step(action)))
        result: Step = self._checked("step", stepped, STEP_FORM)
        return result

    async def get_state(self) -> dict[str, Any]:
        """Return the environment's state."""
        return await self._guard("get_state", self._thread(self.env.get_state))

    async def set_state(self, state: dict[str, Any]) -> None:
        """Restore a state that `get_state` returned."""
        await self._guard("set_state", self._thread(lambda: self.env.set_state(state)))

    async def close(self) -> None:
        """Close the environment, unless one of its methods still runs in a thread that was cancelled."""
        if self._env is not None and not self._busy and type(self._env).close is not gymnasium.Env.close:
            await self._guard("close", self._thread(self._env.close))

    async def _thread(self, method: Callable[[], T]) -> T:
        if self._pool is None:
            return method()

        def run() -> T:
            try:
                return method()
            finally:
                self._busy = False

        self._busy = True
        return await asyncio.get_running_loop().run_in_executor(self._pool, run)

    async def _guard(self, what: str, work: Awaitable[T]) -> T:
        try:
            with waiting("environment", lambda: f"{self._name}.{what}"):
                return await work
        except AgentrlError:
            raise
        except Exception as error:
            built = self._env is not None
            who = f"{self._name}.{what}" if built else f"{self._name}'s constructor"
            raise self._context.author_failure(who, error) from error

    def _checked(self, what: str, returned: Any, form: str) -> Any:
        """Return what a method returned if it has the form."""
        if fault := returned_fault(returned, form):
            raise EnvironmentFailure(f"{self._name}.{what} {fault}")
        return returned

    @property
    def _name(self) -> str:
        return type(self._env).__name__ if self._env is not None else "the environment"
