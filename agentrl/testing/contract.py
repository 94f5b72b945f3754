"""The error of all contract checks, helpers that they share, and episodes that they run alone, then again among others."""

from __future__ import annotations

import json
import logging
import math
import os
import random
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np

from agentrl.core.env import Env, tools_fault
from agentrl.core.errors import UserError
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.tool_arguments import schema_problem
from agentrl.core.types import Info
from agentrl.core.user_code import describe, user_code

T = TypeVar("T")

_log = logging.getLogger(__name__)
SLOW_S = 10.0
"""Seconds after which a method of the plugin that has not returned is named."""


class ContractError(UserError, AssertionError):
    """A plugin violates a contract; the message has what it does and what it should."""


def require(holds: bool, message: str, cause: BaseException | None = None) -> None:
    """Raise `ContractError` unless ``holds``."""
    if not holds:
        raise ContractError(message) from cause


def call_author_code(description: str, method: Callable[[], T], hint: str = "") -> T:
    """Call a method of the plugin and return its result. An exception is a violation of the contract, and so is another working
    directory afterwards.

    A method that takes longer than `SLOW_S` is named in the log meanwhile: it may never return.
    """
    folder = os.getcwd()
    timer = threading.Timer(SLOW_S, _log.warning, ("%s has not returned for %g s", description, SLOW_S))
    timer.daemon = True
    timer.start()
    try:
        with user_code(lambda error: ContractError(f"{description} raised {describe(error)}{hint}")):
            returned = method()
    finally:
        timer.cancel()
    require(
        os.getcwd() == folder,
        f"{description} changes the working directory to {os.getcwd()}, for the whole process; use absolute paths",
    )
    return returned


def check_schemas(name: str, tools: Iterable[Tool]) -> None:
    """Check that calls can fit the JSON Schemas of tools; ``name`` is who offers them."""
    for tool in tools:
        problem = schema_problem(tool.parameters)
        require(not problem, f"{name}: no call of the tool {tool.name!r} could fit: {problem}")


def check_tools(env: Env | MultiAgentEnv) -> None:
    """Check that the tools of an environment are tools, and that calls can fit their schemas."""
    name = type(env).__name__
    tools = call_author_code(f"{name}.tools", lambda: env.tools)
    fault = tools_fault(tools)
    require(not fault, f"{name}.{fault}")
    check_schemas(name, tools)


def require_json(value: object, description: str) -> None:
    """Raise `ContractError` unless ``value`` is JSON-able; of a dict the message has the first key whose value is not."""
    fault = _json_fault(value)
    items = value.items() if fault and isinstance(value, dict) else ()
    key, item = next(((key, item) for key, item in items if _json_fault(item)), (None, value))
    location = description if item is value else f"{description}[{key!r}]"
    require(not fault, f"{location} must be JSON-able: {fault}; it is {item!r:.100}")


def _json_fault(value: object) -> str:
    try:
        json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:  # also of cycles, and of integers that are too long
        return str(error)
    return ""


def require_info(info: Info, name: str) -> None:
    """Raise `ContractError` unless the ``info`` of the environment ``name`` is JSON-able, with floats as metrics."""
    metrics = info.get("metrics", {})
    fits = isinstance(metrics, dict) and all(
        isinstance(key, str) and type(value) is float and math.isfinite(value) for key, value in metrics.items()
    )
    require(fits, f"{name}: info['metrics'] must be a dict of finite floats by name, it is {metrics!r}")
    answer = info.get("final_answer")
    require(isinstance(answer, str | None), f"{name}: info['final_answer'] must be a str, it is {answer!r:.160}")
    require_json(info, f"{name}: info")


def global_random_state() -> tuple[Any, ...]:
    """Return the states of the generators of ``random`` and NumPy."""
    _, words, position, *_ = np.random.get_state(legacy=True)
    return random.getstate(), np.asarray(words).tobytes(), position


def differences(expected: tuple[Any, ...], returned: tuple[Any, ...]) -> str:
    """Return the first part in which two results of an environment differ."""
    expected_part, returned_part = next(
        (pair for pair in zip(expected, returned, strict=False) if pair[0] != pair[1]), (expected, returned)
    )
    return f"first {expected_part!r:.80}, then {returned_part!r:.80}"


E = TypeVar("E", bound=Env | MultiAgentEnv)
F = TypeVar("F", bound=tuple[Any, ...])
"""What ``reset`` returns."""
A = TypeVar("A")
S = TypeVar("S", bound=tuple[Any, ...])
"""What ``step`` returns."""


class EpisodeRecord(ABC, Generic[E, F, A, S]):
    """One episode run alone: its actions, its steps, and the state before each step."""

    def __init__(self, factory: Callable[[], E], task: Task, seed: int) -> None:
        self.factory = factory
        self.task = task
        self.seed = seed
        self.first: F | None = None
        self.actions: list[A] = []
        self.steps: list[S] = []
        self.states: list[str] = []

    @abstractmethod
    def start(self, seed: int) -> tuple[E, F]:
        """Return a new environment, and what its ``reset`` returns."""

    @abstractmethod
    def step(self, env: E, action: A) -> S:
        """Take a step, and check its form."""

    @abstractmethod
    def play(self) -> None:
        """Run and check every step."""

    def state(self, env: E) -> str:
        """Return the environment's state as JSON."""
        name = type(env).__name__
        state = call_author_code(f"{name}.get_state", env.get_state)
        require_json(state, f"{name}.get_state")
        text = json.dumps(state)
        require(json.loads(text) == state, f"{name}.get_state changes when it goes through JSON: {state!r}")
        return text

    def replay(self) -> Iterator[None]:
        """Run the same actions again, one step at a time."""
        env, first = self.start(self.seed)
        self._require_same("reset", self.first, first)
        for index, action in enumerate(self.actions):
            yield
            self._require_same(f"step {index}", self.steps[index], self.step(env, action))
        env.close()

    def check_state(self) -> None:
        """Continue from every state in a new environment with another seed."""
        for cut, state in enumerate(self.states):
            env, _ = self.start(self.seed + 1000)
            name = type(env).__name__
            call_author_code(f"{name}.set_state", partial(env.set_state, json.loads(state)))
            same = json.loads(self.state(env)) == json.loads(state)
            require(same, f"{name}.set_state does not bring back the state of step {cut}")
            for index in range(cut, len(self.actions)):
                replayed = self.step(env, self.actions[index])
                require(
                    self.steps[index] == replayed,
                    f"{name}.get_state leaves out something that step depends on: with the state of step {cut}, "
                    f"step {index} differs: {differences(self.steps[index], replayed)}",
                )
            env.close()

    def _require_same(self, location: str, expected: Any, returned: Any) -> None:
        require(
            expected == returned,
            f"an episode does not replay with seed {self.seed}: all randomness must come from self.np_random, and nothing be "
            f"shared between environments; {location} differs: {differences(expected, returned)}",
        )


def check_concurrent(records: Sequence[EpisodeRecord[Any, Any, Any, Any]]) -> None:
    """Run all episodes again at the same time."""
    running = [record.replay() for record in records]
    while running:
        # A round drops the episodes that are over; the others take a step each, in turn.
        running = [episode for episode in running if next(episode, StopIteration) is not StopIteration]
