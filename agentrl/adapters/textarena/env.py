"""Adapter of TextArena's games."""

from __future__ import annotations

from collections.abc import Mapping
from difflib import get_close_matches
from typing import Any, ClassVar

from agentrl.adapters.base import Json, SeededTasks, text_after_reasoning
from agentrl.adapters.textarena.players import RandomPlayer
from agentrl.adapters.textarena.random_state import GlobalRandom
from agentrl.adapters.textarena.word_lists import note_words, read_words_once, use_word_lists
from agentrl.core.errors import ConfigError, unknown_name
from agentrl.core.extras import require
from agentrl.core.multi_agent_env import MultiAgentEnv, MultiReset, MultiStep, PlayerFactory, View
from agentrl.core.task import Task
from agentrl.core.types import Message

_PART = 1.0 - 1e-6
"""A game of one player gives 1 for its end, and less for a part of the way."""


class TextArenaEnv(MultiAgentEnv):
    """A game of TextArena. Each episode has a separate random state, whatever else runs in the process.

    Args:
        game: its id in TextArena, such as ``KuhnPoker-v0``.
        players: number of players.
        illegal_cost: of a game that a player loses by illegal moves, on top of TextArena's reward.
        game_options: keyword arguments of the game in place of those of its id, such as ``{"max_turns": 6}``.
        word_lists: where games of words have them from: ``nltk``, which downloads them, or ``bundled``, a list of common nouns
            that needs no network.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "textarena"}  # noqa: RUF012
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer}

    def __init__(
        self,
        game: str = "KuhnPoker-v0",
        players: int = 2,
        illegal_cost: float = 0.0,
        game_options: Mapping[str, object] = {},
        word_lists: str = "nltk",
    ) -> None:
        """Make a game.

        Raises:
            MissingError: TextArena is not installed.
            ConfigError: it has no such game, or an option is out of range.
        """
        require("textarena", "env.name=textarena")
        with GlobalRandom(0).lent():  # packages that it imports draw random numbers
            from textarena.envs.registration import ENV_REGISTRY

        if game not in ENV_REGISTRY:
            close = get_close_matches(game, ENV_REGISTRY, n=5, cutoff=0.4)  # there are hundreds
            raise unknown_name("game of TextArena", game, close, "env.options.game")
        if players < 1:
            raise ConfigError(f"env.options.players={players} must be at least 1")
        if illegal_cost < 0:
            raise ConfigError(f"env.options.illegal_cost={illegal_cost} must not be negative")
        use_word_lists(word_lists)
        self.word_lists = word_lists
        self.game = game
        self.game_options = dict(game_options)
        self.illegal_cost = illegal_cost
        self.possible_agents = [f"player_{number}" for number in range(players)]
        self._draw = 0.0 if players > 1 else _PART
        """A player with a higher reward has won."""

    @classmethod
    def tasks(cls, split: str, seed: int) -> SeededTasks:
        """Return 1000 tasks; the seed of an episode decides about the game."""
        return SeededTasks("textarena", split)

    @classmethod
    def example_task(cls) -> Task:
        """Return a task."""
        return Task("textarena/example", ())

    def reset(self, seed: int | None = None, options: Json | None = None) -> MultiReset:
        """Begin a game."""
        super().reset(seed, options)
        self._begin(int(self.np_random.integers(2**31)))
        return self._views(), self._infos()

    def _begin(self, game_seed: int) -> None:
        import textarena

        self.game_seed = game_seed
        self.moves: list[str] = []
        self._random = GlobalRandom(game_seed)
        with self._random.lent():
            try:
                read_words_once(self.game)
                self._env = textarena.make(self.game, **self.game_options)
            except TypeError as error:
                if not self.game_options:
                    raise
                options = f"env.options.game_options={self.game_options}"
                raise ConfigError(f"{options}: {self.game} refuses them: {error}") from error
            self._env.reset(num_players=len(self.possible_agents), seed=game_seed)
        self._base = self._env
        while hasattr(self._base, "env"):  # observations come from the game itself, without the wrappers' history
            self._base = self._base.env
        note_words(self._base, self.word_lists)
        self._next()

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Make the move of the player whose turn it is."""
        (agent,) = self.acting
        text = text_after_reasoning(actions[agent]) if agent in actions else ""
        agents = list(self.agents)
        if not self._move(text):
            self._next()
            still = dict.fromkeys(agents, False)
            return self._views(), dict.fromkeys(agents, 0.0), still, dict(still), self._infos()
        with self._random.lent():
            rewards, game_info = self._env.close()
        self.agents, self.acting = [], ()
        views: dict[str, View] = {player: {"messages": ()} for player in agents}
        numbers, infos = {}, {}
        for number, player in enumerate(agents):
            illegal = bool((game_info or {}).get(number, {}).get("invalid_move", False))
            numbers[player] = float((rewards or {}).get(number, 0.0)) - self.illegal_cost * illegal
            metrics = {
                "win": float(numbers[player] > self._draw),
                "loss": float(numbers[player] < 0),
                "illegal": float(illegal),
            }
            infos[player] = {"metrics": metrics}
        return views, numbers, dict.fromkeys(agents, True), dict.fromkeys(agents, False), infos

    def forfeit(self, agent: str) -> dict[str, float]:
        """Return the reward of a game lost by illegal moves."""
        return {agent: -1.0 - self.illegal_cost}

    def _move(self, text: str) -> bool:
        """Make a move; return whether the game is over."""
        self.moves = [*self.moves, text]
        with self._random.lent():
            done, _ = self._env.step(action=text)
        return bool(done)

    def _next(self) -> None:
        self.acting = (self.possible_agents[self._base.state.current_player_id],)

    def _views(self) -> dict[str, View]:
        """Return what is new for the player who moves next; the others read it when they move."""
        player, observed = self._base.get_observation()
        names = self._base.state.role_mapping
        lines = [
            text if sender == -1 else f"[{names.get(sender, f'Player {sender}')}] {text}"
            for sender, text, _ in observed
            if sender != player
        ]
        text = "\n".join(lines) or "It is your turn again."
        views: dict[str, View] = {agent: {"messages": ()} for agent in self.agents}
        views[self.possible_agents[player]] = {"messages": (Message("user", text),)}
        return views

    def _infos(self) -> dict[str, Json]:
        return {agent: {} for agent in self.agents}

    def get_state(self) -> Json:
        """Return the game's seed and all moves: `set_state` plays them again."""
        return super().get_state() | {"game_seed": self.game_seed, "moves": list(self.moves)}

    def set_state(self, state: Json) -> None:
        """Play the moves of a game again."""
        self._begin(state["game_seed"])
        for move in state["moves"]:
            self._views()  # a game forgets what its player has read
            self._move(move)
        self._views()
        super().set_state(state)
