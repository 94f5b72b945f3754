"""The taskset: single positions from random play of a game, each with its legal moves."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, Rewrite, Task, TaskSet, TurnGame, unknown_name
from agentrl.core.registry import make_any_env

SPLITS = ("train", "eval")


class Positions(MadeTasks):
    """Positions of one split, each from another random game."""

    def __init__(self, split: str, size: int, game: TurnGame, seed: int) -> None:
        """Draw positions of ``game``, which differ by ``seed`` and split."""
        super().__init__(split, size)
        self._game = game
        self._seed = [seed, zlib.crc32(split.encode())]

    def make(self, index: int) -> Task:
        """Return one position of a random game, each of its positions with the same probability."""
        rng, game = np.random.default_rng([*self._seed, index]), self._game
        found: list[tuple[tuple[Message, ...], list[str]]] = []
        views, infos = game.reset(seed=int(rng.integers(2**31)))
        while game.acting:
            (agent,) = game.acting
            messages = views[agent]["messages"]
            moves = infos[agent]["legal_moves"]
            found.append((messages.messages if isinstance(messages, Rewrite) else messages, moves))
            views, _, _, _, infos = game.step({agent: Message("assistant", str(rng.choice(moves)))})
        prompt, moves = found[int(rng.integers(len(found)))]
        return Task(f"game_positions/{self.split}/{index}", prompt, answer=moves[0], metadata={"legal_moves": moves})


class RandomExpert:
    """Takes each legal move with the same probability."""

    def __init__(self, task: Task, rng: np.random.Generator) -> None:
        """Move in the position of ``task``."""
        self._moves = task.metadata["legal_moves"]
        self._rng = rng

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return a legal move."""
        return str(self._moves[int(self._rng.integers(len(self._moves)))])


class GamePositions(TaskSet):
    """Positions of a game whose players read one state at a time. Splits: ``train`` and ``eval``."""

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
    ) -> None:
        """Take the game's environment by name, with its options.

        Raises:
            ConfigError: it is no `TurnGame`, or its players remember the conversation.
        """
        env = make_any_env(game, options, "tasks.options.options")
        if not isinstance(env, TurnGame) or env.remembers:
            raise ConfigError(
                f"tasks.options.game={game}: its players do not read one state at a time (TurnGame.remembers)"
            )
        self._game = env
        self._seed = seed
        self._sizes = {"train": train_size, "eval": eval_size}

    def split(self, name: str) -> Positions:
        """Return the positions of a split."""
        if name not in SPLITS:
            raise unknown_name("split of game_positions", name, SPLITS, "tasks.train_split or eval.split")
        return Positions(name, self._sizes[name], self._game, self._seed)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> RandomExpert:
        """Return random legal play."""
        return RandomExpert(task, rng)
