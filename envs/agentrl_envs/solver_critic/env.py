"""Solver and critic: two roles that work together on sums."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, MultiAgentEnv, MultiReset, MultiStep, RandomPlayer, Task, View
from agentrl.core.multi_agent_env import PlayerFactory

from .players import CarelessPlayer

SOLVER, CRITIC = "solver", "critic"
_LARGEST = 20


class SolverCriticEnv(MultiAgentEnv):
    """The solver answers a problem, the critic says whether it is right, the solver answers again.

    Args:
        illegal_cost: of a turn without a number (solver), or that begins with neither ``right`` nor ``wrong`` (critic).
        verdict_reward: what the critic gets for a right verdict, next to the reward that both get for a right last answer.
        first_reward: what the solver gets for a right first answer, when it gives it.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "solver_critic"}  # noqa: RUF012
    possible_agents: list[str] = [SOLVER, CRITIC]  # noqa: RUF012
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer, "careless": CarelessPlayer}

    def __init__(self, illegal_cost: float = 0.1, verdict_reward: float = 0.5, first_reward: float = 0.0) -> None:
        """Make an environment.

        Raises:
            ConfigError: the cost is negative.
        """
        if illegal_cost < 0:
            raise ConfigError(f"env.options.illegal_cost={illegal_cost} must not be negative")
        self.illegal_cost = illegal_cost
        self.verdict_reward = verdict_reward
        self.first_reward = first_reward

    @classmethod
    def tasks(cls, split: str, seed: int) -> Sequence[Task]:
        """Return sums of two numbers; no sum is in both splits."""
        return _Sums(split, seed)

    @classmethod
    def example_task(cls) -> Task:
        """Return a sum."""
        return Task("solver_critic/example", (Message("user", "3 + 4 = ?"),), answer="7")

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiReset:
        """Show the solver the problem."""
        super().reset(seed, options)
        self.acting = (SOLVER,)
        self.answers: list[str] = []
        self.verdict = ""
        self.illegal = dict.fromkeys(self.agents, 0)
        return self._views(SOLVER, self.task.question), self._infos()

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Take the answer of the solver, or the verdict of the critic."""
        (agent,) = self.acting
        text = actions[agent].content.rpartition("</think>")[2].strip() if agent in actions else ""
        legal = self._take(agent, text)
        rewards = dict.fromkeys(self.agents, 0.0)
        if not legal:
            self.illegal[agent] += 1
            rewards[agent] -= self.illegal_cost
        if agent == SOLVER and len(self.answers) == 1:
            rewards[SOLVER] += self.first_reward * self._is_right(0)
        over = len(self.answers) == 2
        if over:
            for player, reward in self._final_rewards().items():
                rewards[player] += reward
            agents, self.agents, self.acting = list(self.agents), [], ()
            views: dict[str, View] = {player: {"messages": ()} for player in agents}
            infos = {player: {"metrics": self._metrics(player)} for player in agents}
            return views, rewards, dict.fromkeys(agents, True), dict.fromkeys(agents, False), infos
        self.acting = (CRITIC if agent == SOLVER else SOLVER,)
        answer = self.answers[-1] or "none"
        shown = (
            f"{self.task.question} Answer: {answer}. Right or wrong?"
            if agent == SOLVER
            else f"{text[:200]} Answer again."
        )
        still = dict.fromkeys(self.agents, False)
        return self._views(self.acting[0], shown), rewards, still, dict(still), self._infos()

    def _take(self, agent: str, text: str) -> bool:
        """Record a turn; return whether it is legal."""
        if agent == SOLVER:
            numbers = re.findall(r"-?[0-9]+", text)
            self.answers = [*self.answers, numbers[-1] if numbers else ""]
            return bool(numbers)
        word = re.match(r"[a-z]*", text.lower())
        self.verdict = word[0] if word and word[0] in ("right", "wrong") else ""
        return bool(self.verdict)

    def _final_rewards(self) -> dict[str, float]:
        team = float(self._is_right(1))
        return {SOLVER: team, CRITIC: team + self.verdict_reward * self._verdict_is_right()}

    def _is_right(self, turn: int) -> bool:
        return self.answers[turn] == str(self.task.answer)

    def _verdict_is_right(self) -> bool:
        return self.verdict == ("right" if self._is_right(0) else "wrong")

    def _metrics(self, agent: str) -> dict[str, float]:
        return {
            "first_right": float(self._is_right(0)),
            "last_right": float(self._is_right(1)),
            "verdict_right": float(self._verdict_is_right()),
            f"{agent}_illegal": float(self.illegal[agent]),
        }

    def _views(self, agent: str, text: str) -> dict[str, View]:
        return {reader: {"messages": (Message("user", text),) if reader == agent else ()} for reader in self.agents}

    def _infos(self) -> dict[str, dict[str, Any]]:
        moves = {SOLVER: [str(number) for number in range(2 * _LARGEST + 1)], CRITIC: ["right", "wrong"]}
        return {agent: {"legal_moves": moves[agent]} if agent in self.acting else {} for agent in self.agents}

    def get_state(self) -> dict[str, Any]:
        """Return the state of the episode."""
        episode_state = {"answers": list(self.answers), "verdict": self.verdict, "illegal": dict(self.illegal)}
        return super().get_state() | episode_state

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the episode."""
        super().set_state(state)
        self.answers, self.verdict = list(state["answers"]), state["verdict"]
        self.illegal = dict(state["illegal"])


class _Sums(MadeTasks):
    """Sums of two numbers from 0 to 20; every fourth pair is for evaluation, in both orders."""

    def __init__(self, split: str, seed: int) -> None:
        pairs = [(a, b) for a in range(_LARGEST + 1) for b in range(_LARGEST + 1)]
        held_out = split != "train"
        self._pairs = [(a, b) for a, b in pairs if ((min(a, b) + 2 * max(a, b)) % 4 == 0) is held_out]
        self._order = np.random.default_rng(seed).permutation(len(self._pairs))
        super().__init__(split, len(self._pairs))

    def make(self, index: int) -> Task:
        """Return a sum."""
        a, b = self._pairs[int(self._order[index])]
        name = f"solver_critic/{self.split}/{index}"
        return Task(name, (Message("user", f"{a} + {b} = ?"),), answer=str(a + b))
