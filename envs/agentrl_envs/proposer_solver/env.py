"""Proposer and solvers: one agent sets a problem in arithmetic, several solve it at the same time."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, MultiAgentEnv, MultiReset, MultiStep, Task, View
from agentrl.core.multi_agent_env import PlayerFactory, RandomPlayer

from .players import CarelessPlayer

PROPOSER = "proposer"
_HELD_OUT = 6
"""One of so many pairs of numbers is held out."""
_OPERATIONS = {"+": operator.add, "-": operator.sub, "*": operator.mul}
_PROBLEM = re.compile(r"([0-9]{1,3}) ?([-+*]) ?([0-9]{1,3})(?: = \?)?")


class ProposerSolverEnv(MultiAgentEnv):
    """The proposer sets a problem; it is worth most to it if half of the solvers solve it.

    Args:
        solvers: agents that solve the problem at the same time and independently.
        illegal_cost: of a problem that is none, or of an answer without a number.
        largest: the largest number in a problem.
        operations: that a problem may have, some of ``+``, ``-`` and ``*``.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "proposer_solver"}  # noqa: RUF012
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer, "careless": CarelessPlayer}

    def __init__(self, solvers: int = 4, illegal_cost: float = 0.5, largest: int = 20, operations: str = "+-*") -> None:
        """Make an environment.

        Raises:
            ConfigError: there is no solver, the cost is negative, a number has over three digits, or an operation is unknown.
        """
        if solvers < 1:
            raise ConfigError(f"env.options.solvers={solvers} must be at least 1")
        if illegal_cost < 0:
            raise ConfigError(f"env.options.illegal_cost={illegal_cost} must not be negative")
        if not 1 <= largest <= 999:
            raise ConfigError(f"env.options.largest={largest} must be from 1 to 999")
        if not operations or not set(operations) <= set(_OPERATIONS):
            raise ConfigError(f"env.options.operations={operations!r} must be some of {''.join(_OPERATIONS)}")
        self.possible_agents = [PROPOSER, *(f"solver_{number}" for number in range(solvers))]
        self.illegal_cost = illegal_cost
        self.largest = largest
        self.operations = operations

    def role_of(self, agent: str) -> str:
        """Return ``proposer``, or ``solver`` for all solvers."""
        return agent.partition("_")[0]

    @classmethod
    def tasks(cls, split: str, seed: int) -> MadeTasks:
        """Return 1000 tasks. Each gives the proposer a number to use; in evaluation, the solvers a held-out problem."""
        return _Numbers(split, seed)

    @classmethod
    def example_task(cls) -> Task:
        """Return a task."""
        return Task("proposer_solver/example", (), metadata={"number": 7})

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiReset:
        """Ask the proposer for a problem, or show the solvers a held-out one."""
        super().reset(seed, options)
        self.problem, self.answer, self.number = "", 0, 0
        held_out = self.task.metadata.get("held_out")
        if held_out is not None:
            problems = self._held_out_problems()
            self._set(*problems[int(held_out) % len(problems)])
            return self._show()
        self.acting = (PROPOSER,)
        self.number = int(self.task.metadata.get("number", 1)) % (self.largest + 1)
        request = (
            f"Set a problem with the number {self.number}, such as {self.number} + 3. Numbers up to {self.largest}."
        )
        return self._views({PROPOSER: request}), self._infos([PROPOSER], self._problems())

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Take the problem, or all answers to it."""
        texts_by_agent = {
            agent: _last_line(actions[agent].content) if agent in actions else "" for agent in self.acting
        }
        solvers = self.possible_agents[1:]
        if self.acting == (PROPOSER,):
            problem = self._read_problem(texts_by_agent[PROPOSER])
            if problem is None:
                return self._over(self.forfeit(PROPOSER), {PROPOSER})
            if _is_held_out(problem[0], problem[2]):
                return self._over({}, set())
            self._set(*problem)
            views, infos = self._show()
            still = dict.fromkeys(self.agents, False)
            return views, dict.fromkeys(self.agents, 0.0), still, dict(still), infos
        answers = {agent: re.findall(r"-?[0-9]+", texts_by_agent[agent]) for agent in solvers}
        illegal = {agent for agent in solvers if not answers[agent]}
        correct = {agent: bool(answers[agent]) and self._is_answer(answers[agent][-1]) for agent in solvers}
        share = float(np.mean([correct[agent] for agent in solvers]))
        rewards = {agent: float(correct[agent]) - self.illegal_cost * (agent in illegal) for agent in solvers}
        if "held_out" not in self.task.metadata:
            rewards[PROPOSER] = 4 * share * (1 - share)
        return self._over(rewards, illegal, share)

    def _is_answer(self, digits: str) -> bool:
        return len(digits) < 100 and int(digits) == self.answer  # Python reads no number of thousands of digits

    def forfeit(self, agent: str) -> dict[str, float]:
        """Return the reward of an illegal turn."""
        return {agent: -self.illegal_cost}

    def _read_problem(self, text: str) -> tuple[int, str, int] | None:
        """Return the problem in a text, with the number of the task; None if it is none."""
        match = _PROBLEM.fullmatch(text.strip())
        if match is None:
            return None
        a, sign, b = int(match[1]), match[2], int(match[3])
        fits = max(a, b) <= self.largest and self.number in (a, b) and sign in self.operations
        return (a, sign, b) if fits else None

    def _set(self, a: int, sign: str, b: int) -> None:
        self.problem, self.answer = f"{a} {sign} {b}", _OPERATIONS[sign](a, b)

    def _show(self) -> MultiReset:
        """Let the solvers read the problem."""
        solvers = self.possible_agents[1:]
        self.acting = tuple(solvers)
        numbers = [str(number) for number in range(-self.largest, 2 * self.largest + 1)]
        return self._views(dict.fromkeys(solvers, f"{self.problem} = ?")), self._infos(solvers, numbers)

    def _over(self, rewards: Mapping[str, float], illegal: set[str], share: float | None = None) -> MultiStep:
        """End the episode; without ``share`` there was no problem to solve."""
        agents, self.agents, self.acting = list(self.agents), [], ()
        views: dict[str, View] = {agent: {"messages": ()} for agent in agents}
        solved = {} if share is None else {"solved": share}
        infos: dict[str, dict[str, Any]] = {
            agent: {"metrics": {f"{self.role_of(agent)}_illegal": float(agent in illegal), **solved}}
            for agent in agents
        }
        all_rewards = {agent: float(rewards.get(agent, 0.0)) for agent in agents}
        return views, all_rewards, dict.fromkeys(agents, True), dict.fromkeys(agents, False), infos

    def _held_out_problems(self) -> list[tuple[int, str, int]]:
        """Return all held-out problems, in random order."""
        numbers = range(self.largest + 1)
        pairs = [(a, b) for a in numbers for b in numbers if _is_held_out(a, b)]
        problems = [(a, sign, b) for a, b in pairs for sign in self.operations]
        return [problems[index] for index in np.random.default_rng(0).permutation(len(problems))]

    def _views(self, texts: Mapping[str, str]) -> dict[str, View]:
        return {
            agent: {"messages": (Message("user", texts[agent]),) if agent in texts else ()} for agent in self.agents
        }

    def _infos(self, agents: list[str], moves: list[str]) -> dict[str, dict[str, Any]]:
        return {agent: {"legal_moves": moves} if agent in agents else {} for agent in self.agents}

    def _problems(self) -> list[str]:
        return [f"{self.number} {sign} {number}" for sign in self.operations for number in range(self.largest + 1)]

    def get_state(self) -> dict[str, Any]:
        """Return the state of the episode."""
        return super().get_state() | {"problem": self.problem, "answer": self.answer}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the episode."""
        super().set_state(state)
        self.problem, self.answer = state["problem"], state["answer"]


def _last_line(text: str) -> str:
    lines = text.rpartition("</think>")[2].strip().splitlines()
    return lines[-1] if lines else ""


def _is_held_out(a: int, b: int) -> bool:
    return (min(a, b) + 2 * max(a, b)) % _HELD_OUT == 0


class _Numbers(MadeTasks):
    """Tasks with a number each; in evaluation with the index of a held-out problem."""

    def __init__(self, split: str, seed: int) -> None:
        super().__init__(split, 1000)
        self._held_out = split != "train"
        rng = np.random.default_rng([seed, 0])
        self._numbers = range(1000) if self._held_out else rng.integers(0, 1000, 1000)

    def make(self, index: int) -> Task:
        """Return a task without a prompt."""
        key = "held_out" if self._held_out else "number"
        return Task(f"proposer_solver/{self.split}/{index}", (), metadata={key: int(self._numbers[index])})
