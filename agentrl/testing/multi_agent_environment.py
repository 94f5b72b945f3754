"""Contract check of environments with several agents: PettingZoo's tests, and agentrl's additional rules."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from typing import Any

import numpy as np

from agentrl.core.errors import AgentrlError
from agentrl.core.multi_agent_env import (
    MULTI_RESET_FORM,
    MULTI_STEP_FORM,
    AecAdapter,
    MultiAgentEnv,
    MultiReset,
    MultiStep,
    multi_agent_fault,
)
from agentrl.core.registry import env_class_fault
from agentrl.core.task import Task
from agentrl.core.types import Message
from agentrl.core.user_code import describe, is_finite
from agentrl.testing.contract import (
    ContractError,
    EpisodeRecord,
    call_author_code,
    check_concurrent,
    check_tools,
    global_random_state,
    require,
    require_info,
)

_EPISODES = 6
_STEPS = 32
_CYCLES = 20
"""Number of cycles of PettingZoo's tests."""
_LEGAL = 0.8
"""Share of moves that are legal, if an agent's info lists legal ones."""


def check_multi_agent_env(env_factory: Callable[[], Any], *, task: Task | None = None) -> None:
    """Check an environment of several agents against PettingZoo's contract and agentrl's. Takes about a second.

    Short episodes are run with legal moves, as ``legal_moves`` in the ``info`` lists them, and with random texts.

    - PettingZoo's ``parallel_api_test`` and ``parallel_seed_test`` pass, through `AecAdapter` also ``api_test`` and
      ``seed_test``.
    - Each agent in the episode gets an observation, a finite reward and a JSON-able ``info``; ``acting`` names some of them.
    - Randomness comes from ``self.np_random`` alone: concurrent episodes replay what each returned alone.
    - ``get_state`` is JSON-able, and ``set_state`` on a new environment replays the rest bit for bit.

    Args:
        env_factory: builds the environment; the class itself if it needs no arguments.
        task: of the episodes; by default ``example_task``.

    Raises:
        ContractError: a rule is violated; the message has what the environment does and what it should, in one line.
        ConfigError: the environment's options do not fit.
    """
    random_state = global_random_state()
    env = call_author_code(f"{getattr(env_factory, '__name__', 'the environment')}'s constructor", env_factory)
    require(isinstance(env, MultiAgentEnv), f"{type(env).__name__} must be a subclass of agentrl.MultiAgentEnv")
    name = type(env).__name__
    fault = env_class_fault(type(env))
    require(not fault, f"{name} {fault}")
    agents = getattr(env, "possible_agents", None)
    is_valid = isinstance(agents, list) and agents and all(isinstance(agent, str) and agent for agent in agents)
    require(bool(is_valid), f"{name}.possible_agents must be a list of names, it is {agents!r:.160}")
    require(
        len(set(env.possible_agents)) == len(env.possible_agents), f"{name}.possible_agents has a name twice: {agents}"
    )
    task = task or call_author_code(f"{name}.example_task", env.example_task)
    require(isinstance(task, Task), f"{name}.example_task must return a Task, it returned {task!r:.160}")
    records = [_Record(env_factory, task, seed) for seed in range(_EPISODES)]
    for record in records:
        record.play()
    check_concurrent(records)
    for record in records:
        record.check_state()
    _check_pettingzoo(env_factory, name)
    require(
        random_state == global_random_state(), f"{name} draws from the global random generators; take self.np_random"
    )


def _check_pettingzoo(env_factory: Callable[[], MultiAgentEnv], name: str) -> None:
    from pettingzoo.test import api_test, parallel_api_test, parallel_seed_test, seed_test

    def as_aec() -> AecAdapter:
        return AecAdapter(env_factory())

    tests: dict[str, Callable[[], object]] = {
        "parallel_api_test": lambda: parallel_api_test(env_factory(), _CYCLES),
        "parallel_seed_test": lambda: parallel_seed_test(env_factory, _CYCLES),
        "api_test through AecAdapter": lambda: api_test(as_aec(), _CYCLES),
        "seed_test through AecAdapter": lambda: seed_test(as_aec, _CYCLES),
    }
    for test, run in tests.items():
        try:
            with redirect_stdout(io.StringIO()), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that observations are no arrays
                run()
        except AgentrlError:
            raise
        except Exception as error:
            raise ContractError(f"{name} fails PettingZoo's {test}: {describe(error)}") from error


class _Record(EpisodeRecord[MultiAgentEnv, MultiReset, dict[str, Message], MultiStep]):
    """Record of several agents."""

    def start(self, seed: int) -> tuple[MultiAgentEnv, MultiReset]:
        env = self.factory()
        name = type(env).__name__
        first = call_author_code(f"{name}.reset", lambda: env.reset(seed=seed, options={"task": self.task}))
        fault = multi_agent_fault(env, first, MULTI_RESET_FORM)
        require(not fault, f"{name}.reset {fault}")
        check_tools(env)
        return env, first

    def step(self, env: MultiAgentEnv, actions: dict[str, Message]) -> MultiStep:
        name = type(env).__name__
        text = ", ".join(f"{agent}: {action.content!r:.60}" for agent, action in actions.items())
        step = call_author_code(f"{name}.step", lambda: env.step(actions), f" for the actions {text}; it must take any")
        fault = multi_agent_fault(env, step, MULTI_STEP_FORM)
        require(not fault, f"{name}.step {fault}")
        return step

    def play(self) -> None:
        """Run and check every step."""
        rng = np.random.default_rng(self.seed)
        env, self.first = self.start(self.seed)
        name = type(env).__name__
        infos = self.first[1]
        self._check_infos(env, infos)
        for _ in range(_STEPS):
            if not env.agents:
                break
            self.states.append(self.state(env))
            live = list(env.agents)
            self.actions.append({agent: _action(env, agent, infos, rng) for agent in env.acting})
            self.steps.append(self.step(env, self.actions[-1]))
            _, rewards, terminations, truncations, infos = self.steps[-1]
            require(set(env.agents) <= set(live), f"{name} brings agents back: {env.agents}, before {live}")
            for agent in live:
                reward = rewards.get(agent)
                finite = isinstance(reward, float | int) and is_finite(reward)
                require(finite, f"{name}.step must give {agent!r} a finite float as reward, it gave {reward!r:.100}")
                over = terminations.get(agent) or truncations.get(agent)
                require(
                    over is (agent not in env.agents),
                    f"{name}.agents must hold {agent!r} until it is terminated or truncated, as bool, and no longer",
                )
            self._check_infos(env, infos)
        call_author_code(f"{name}.close", env.close)

    def _check_infos(self, env: MultiAgentEnv, infos: dict[str, Any]) -> None:
        name = type(env).__name__
        for agent, info in infos.items():
            require_info(info, f"{name}, {agent}")
            moves = info.get("legal_moves", [])
            fits = isinstance(moves, list) and all(isinstance(move, str) for move in moves)
            require(fits, f"{name}, {agent}: info['legal_moves'] must be a list of texts, it is {moves!r:.160}")


def _action(env: MultiAgentEnv, agent: str, infos: dict[str, Any], rng: np.random.Generator) -> Message:
    """Return a legal move or a random text."""
    moves = infos[agent].get("legal_moves", [])
    if moves and rng.random() < _LEGAL:
        return Message("assistant", moves[int(rng.integers(len(moves)))])
    env.action_space(agent).seed(int(rng.integers(2**31)))
    sample: Message = env.action_space(agent).sample()
    return sample
