"""Games whose players move one after the other."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl.core.errors import ConfigError
from agentrl.core.multi_agent_env import MultiAgentEnv, MultiReset, MultiStep, View
from agentrl.core.task import MadeTasks, Task
from agentrl.core.types import Info, Message, Rewrite


class TurnGame(MultiAgentEnv):
    """A game in which one player moves at a time. A subclass implements `deal`, `legal_moves`, `state_text` and `play`.

    A turn is the text of a legal move, after ``</think>`` if there is reasoning; case, brackets and a full stop do not count.
    An illegal move ends the game: it costs `worst_payoff` and ``illegal_cost``, and the other players get 0.

    Args:
        illegal_cost: of an illegal move, on top of the worst payoff.
    """

    worst_payoff: ClassVar[float] = -1.0
    """The lowest payoff of a game with legal moves."""
    remembers: ClassVar[bool] = False
    """Whether a player reads the whole conversation. Otherwise `state_text` replaces it, so each turn is a separate row."""
    state_fields: ClassVar[tuple[str, ...]] = ()
    """JSON-able attributes that `deal` and `play` set."""

    def __init__(self, illegal_cost: float = 0.5) -> None:
        """Make a game.

        Raises:
            ConfigError: the cost is negative.
        """
        if illegal_cost < 0:
            raise ConfigError(f"env.options.illegal_cost={illegal_cost} must not be negative")
        self.illegal_cost = illegal_cost
        self._moves: dict[str, int] = {}

    @abstractmethod
    def deal(self) -> None:
        """Set up a game, with ``self.np_random``."""

    @abstractmethod
    def legal_moves(self) -> list[str]:
        """Return the moves of the player who moves next, in lower case."""

    @abstractmethod
    def state_text(self, agent: str) -> str:
        """Return what ``agent`` reads before its move."""

    @abstractmethod
    def play(self, agent: str, move: str) -> Mapping[str, float] | None:
        """Make a legal move. Return the payoff of each agent if the game is over, otherwise None."""

    def next_to_move(self, agent: str) -> str:
        """Return the player who moves after ``agent``: the next one in the order of seats."""
        return self.possible_agents[(self.possible_agents.index(agent) + 1) % len(self.possible_agents)]

    def read_move(self, text: str) -> str:
        """Return the move in the text of a turn; it may be illegal."""
        return text.rpartition("</think>")[2].strip().strip("[].").strip().lower()

    @classmethod
    def example_task(cls) -> Task:
        """Return a task of this game."""
        return Task(f"{cls.metadata['name']}/example", ())

    @classmethod
    def tasks(cls, split: str, seed: int) -> MadeTasks:
        """Return 1000 tasks; the seed of an episode decides about its cards or values."""
        return _Games(split, cls.metadata["name"])

    def reset(self, seed: int | None = None, options: dict[str, Any] | None = None) -> MultiReset:
        """Deal; the first seat begins. Moves in the task's metadata under ``opening`` have been made already.

        Raises:
            ConfigError: a move of the opening is illegal, or ends the game.
        """
        super().reset(seed, options)
        self._moves = dict.fromkeys(self.agents, 0)
        self.acting = (self.possible_agents[0],)
        self.deal()
        for move in self.task.metadata.get("opening", ()):
            (agent,) = self.acting
            if move not in self.legal_moves() or self.play(agent, move) is not None:
                raise ConfigError(f"task {self.task.id!r}: the opening's move {move!r} is illegal or ends the game")
            self.acting = (self.next_to_move(agent),)
        return self._views(), self._infos()

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Make the move of the player whose turn it is."""
        (agent,) = self.acting
        message = actions.get(agent)
        move = self.read_move(message.content) if message is not None else ""
        legal = move in self.legal_moves()
        self._moves[agent] += 1
        payoffs = self.play(agent, move) if legal else {**dict.fromkeys(self.agents, 0.0), **self.forfeit(agent)}
        players = list(self.agents)
        if payoffs is None:
            self.acting = (self.next_to_move(agent),)
            still = dict.fromkeys(players, False)
            return self._views(), dict.fromkeys(players, 0.0), still, dict(still), self._infos()
        self.agents, self.acting = [], ()
        infos: dict[str, Info] = {
            player: {"metrics": self._metrics(player, payoffs, illegal=not legal and player == agent)}
            for player in players
        }
        views: dict[str, View] = {player: {"messages": ()} for player in players}
        rewards = {player: float(payoffs[player]) for player in players}
        return views, rewards, dict.fromkeys(players, True), dict.fromkeys(players, False), infos

    def forfeit(self, agent: str) -> dict[str, float]:
        """Return the reward of an illegal move."""
        return {agent: self.worst_payoff - self.illegal_cost}

    def _metrics(self, agent: str, payoffs: Mapping[str, float], *, illegal: bool) -> dict[str, float]:
        best = max(payoffs[player] for player in payoffs if player != agent)
        return {
            "win": float(payoffs[agent] > best),
            "draw": float(payoffs[agent] == best),
            "loss": float(payoffs[agent] < best),
            "illegal": float(illegal),
            "moves": float(self._moves[agent]),
        }

    def _views(self) -> dict[str, View]:
        views: dict[str, View] = {agent: {"messages": ()} for agent in self.agents}
        (agent,) = self.acting
        text = (Message("user", self.state_text(agent)),)
        views[agent] = {"messages": text if self.remembers or not self._moves[agent] else Rewrite(text)}
        return views

    def _infos(self) -> dict[str, Info]:
        return {agent: {"legal_moves": self.legal_moves()} if agent in self.acting else {} for agent in self.agents}

    def get_state(self) -> dict[str, Any]:
        """Return the state of the game."""
        game = {name: getattr(self, name) for name in self.state_fields}
        return super().get_state() | {"moves": dict(self._moves), "game": game}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restore the state of the game."""
        super().set_state(state)
        self._moves = dict(state["moves"])
        for name, value in state["game"].items():
            setattr(self, name, value)


class _Games(MadeTasks):
    """Tasks that differ in nothing but their ids."""

    def __init__(self, split: str, name: str) -> None:
        super().__init__(split, 1000)
        self._name = name

    def make(self, index: int) -> Task:
        """Return a task without a prompt."""
        return Task(f"{self._name}/{self.split}/{index}", ())
