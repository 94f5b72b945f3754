"""Contract check of environments, for their authors' tests: Gymnasium's check, and agentrl's additional rules."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
from gymnasium import Space
from gymnasium.utils.env_checker import check_env as gymnasium_check_env

from agentrl.core.env import RESET_FORM, STEP_FORM, Env, Step, returned_fault
from agentrl.core.registry import env_class_fault
from agentrl.core.task import Task
from agentrl.core.types import (
    Action,
    Info,
    Message,
    Observation,
    Rewrite,
    ToolCall,
    ToolCalls,
    ToolResult,
    ToolResults,
    ToolStatus,
)
from agentrl.core.user_code import describe, is_finite, user_code
from agentrl.testing.contract import (
    ContractError,
    EpisodeRecord,
    call_author_code,
    check_concurrent,
    check_tools,
    global_random_state,
    require,
    require_info,
    require_json,
)

Respond = Callable[[ToolCall], ToolResult]
"""Runs a tool call."""

_EPISODES = 6
_STEPS = 12


def refuse(call: ToolCall) -> ToolResult:
    """Answer a call as a failing tool does."""
    return ToolResult(call.id, ToolStatus.ERROR, f"{call.name} is out of order")


def check_env(
    env_factory: Callable[[], Env], *, task: Task | None = None, respond: Respond = refuse
) -> tuple[str, ...]:
    """Check an environment against Gymnasium's contract and agentrl's. Takes less than a second.

    Short episodes are run with random texts, and with texts in the tags that the environment's stop strings close.

    - Gymnasium's ``check_env`` passes.
    - Observations are in the space, rewards are finite floats, ``info`` is JSON-able, metrics are floats, call ids are
      unique in an episode.
    - Randomness comes from ``self.np_random`` alone: concurrent episodes replay what each returned alone.
    - ``get_state`` is JSON-able, and ``set_state`` on a new environment replays the rest bit for bit. An environment that
      keeps a state and defines neither passes with a note.

    Args:
        env_factory: builds the environment; the class itself if it needs no arguments.
        task: of the episodes; by default ``example_task``.
        respond: answers the tool calls that the environment returns; by default every tool fails.

    Returns:
        notes on what the environment lacks and only some uses need.

    Raises:
        ContractError: a rule is violated; the message has what the environment does and what it should, in one line.
        ConfigError: ``env_factory`` is `agentrl.make_env` and the options do not fit.
    """
    random_state = global_random_state()
    env = call_author_code(f"{getattr(env_factory, '__name__', 'the environment')}'s constructor", env_factory)
    require(isinstance(env, Env), f"{type(env).__name__} must be a subclass of agentrl.Env")
    name = type(env).__name__
    fault = env_class_fault(type(env))
    require(not fault, f"{name} {fault}")
    for attribute in ("stop", "tool_names"):
        value = call_author_code(f"{name}.{attribute}", partial(getattr, env, attribute))
        is_valid = isinstance(value, tuple) and all(isinstance(item, str) and item for item in value)
        require(is_valid, f"{name}.{attribute} must be a tuple of strings that are not empty, it is {value!r}")
    for attribute in ("observation_space", "action_space"):
        space = call_author_code(f"{name}.{attribute}", partial(getattr, env, attribute))
        require(isinstance(space, Space), f"{name}.{attribute} must be a gymnasium.Space, it is {space!r:.160}")
    task = task or call_author_code(f"{name}.example_task", env.example_task)
    require(isinstance(task, Task), f"{name}.example_task must return a Task, it returned {task!r:.160}")
    records = [_Record(env_factory, task, seed, respond) for seed in range(_EPISODES)]
    for record in records:
        record.play()
    _check_gymnasium(env)
    check_concurrent(records)
    notes = _check_states(type(env), records)
    require(
        random_state == global_random_state(), f"{name} draws from the global random generators; take self.np_random"
    )
    return notes


def _check_gymnasium(env: Env) -> None:
    name = type(env).__name__
    test = "gymnasium.utils.env_checker.check_env"
    with user_code(lambda error: ContractError(f"{name} fails {test}: {describe(error)}")):
        gymnasium_check_env(env, skip_render_check=True)


def _check_states(cls: type[Env], records: list[_Record]) -> tuple[str, ...]:
    """Check that episodes continue from their states; return a note if the environment has no such methods and needs them."""
    has_none = cls.get_state is Env.get_state and cls.set_state is Env.set_state
    try:
        for record in records:
            record.check_state()
    except ContractError:
        if not has_none:
            raise
        note = (
            f"{cls.__name__} keeps a state and defines no get_state and set_state. Only resuming an episode between two turns "
            "needs them; training, evaluation and fine-tuning do not"
        )
        return (note,)
    return ()


def _action(env: Env, rng: np.random.Generator) -> Message:
    """Return random text, with or without tags that one of the environment's stop strings closes."""
    env.action_space.seed(int(rng.integers(2**31)))
    sample: Message = env.action_space.sample()
    closing = ["", *env.stop]
    tag = closing[int(rng.integers(len(closing)))]
    opening = "<" + tag[2:] if tag.startswith("</") else ""
    return Message("assistant", f"{opening}{sample.content}{tag}")


class _Record(EpisodeRecord[Env, tuple[Observation, Info], Action, Step]):
    """Record of one agent, whose tool calls ``respond`` answers."""

    def __init__(self, factory: Callable[[], Env], task: Task, seed: int, respond: Respond) -> None:
        super().__init__(factory, task, seed)
        self.respond = respond

    def start(self, seed: int) -> tuple[Env, tuple[Observation, Info]]:
        env = self.factory()
        name = type(env).__name__
        first = call_author_code(f"{name}.reset", lambda: env.reset(seed=seed, options={"task": self.task}))
        fault = returned_fault(first, RESET_FORM)
        require(not fault, f"{name}.reset {fault}")
        check_tools(env)
        return env, first

    def step(self, env: Env, action: Action) -> Step:
        name = type(env).__name__
        text = f"the action {action.content!r:.60}" if isinstance(action, Message) else "tool results"
        step = call_author_code(f"{name}.step", lambda: env.step(action), f" for {text}; it must take any")
        fault = returned_fault(step, STEP_FORM)
        require(not fault, f"{name}.step {fault}")
        return step

    def play(self) -> None:
        """Run and check every step."""
        rng = np.random.default_rng(self.seed)
        env, self.first = self.start(self.seed)
        observation, info = self.first
        require(not isinstance(observation, Rewrite), f"{type(env).__name__}.reset gives a Rewrite; only step may")
        require(observation != (), f"{type(env).__name__}.reset returned no message for the policy to read")
        self._check_observation(env, observation, info, set())
        known_calls: set[str] = set()
        for _ in range(_STEPS):
            self.states.append(self.state(env))
            action: Action = _action(env, rng)
            if isinstance(observation, ToolCalls):
                action = ToolResults(tuple(self.respond(call) for call in observation.calls))
            self.actions.append(action)
            self.steps.append(self.step(env, action))
            observation, reward, terminated, truncated, info = self.steps[-1]
            name = type(env).__name__
            finite = isinstance(reward, float | int) and is_finite(reward)
            require(finite, f"{name}.step must give a finite float as reward, it gave {reward!r:.100}")
            for flag, value in (("terminated", terminated), ("truncated", truncated)):
                require(isinstance(value, bool), f"{name}.step must give {flag} as bool, it gave {value!r}")
            self._check_observation(env, observation, info, known_calls)
            if terminated or truncated:
                require(not isinstance(observation, ToolCalls), f"{name} ends an episode and asks for tools to be run")
                break
        call_author_code(f"{type(env).__name__}.close", env.close)

    def _check_observation(self, env: Env, observation: Observation, info: Info, known_calls: set[str]) -> None:
        name = type(env).__name__
        require(
            env.observation_space.contains(observation),
            f"{name}.observation_space does not contain the observation {observation!r:.160}",
        )
        if isinstance(observation, ToolCalls):
            require(bool(observation.calls), f"{name} asks for tools to be run and names none")
            for call in observation.calls:
                require(call.id not in known_calls, f"{name} uses the call id {call.id!r} twice in an episode")
                known_calls.add(call.id)
                tool_names = {*env.tool_names, *(tool.name for tool in env.tools)}
                require(
                    call.name in tool_names,
                    f"{name} calls {call.name!r}, which is neither in its tool_names nor its tools",
                )
                require_json(call.arguments, f"{name}: the arguments of a call to {call.name!r}")
        require_info(info, name)
