"""The taskset: openings of a game, drawn from random play."""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, Task, TaskSet, TurnGame, unknown_name
from agentrl.core.registry import make_any_env

SPLITS = ("train", "eval")


class Openings(MadeTasks):
    """Openings of one split."""

    def __init__(self, split: str, size: int, game: TurnGame, longest: int, seed: int) -> None:
        """Draw openings of at most ``longest`` moves, which differ by ``seed`` and split."""
        super().__init__(split, size)
        self._game = game
        self._longest = longest
        self._seed = [seed, zlib.crc32(split.encode())]

    def make(self, index: int) -> Task:
        """Return a task with the moves made so far, under ``opening`` in its metadata."""
        rng = np.random.default_rng([*self._seed, index])
        moves = self._moves(int(rng.integers(self._longest + 1)), rng)
        return Task(f"game_openings/{self.split}/{index}", (), metadata={"opening": moves, "opening_moves": len(moves)})

    def _moves(self, count: int, rng: np.random.Generator) -> list[str]:
        """Return random legal moves, ``count`` of them or as many as leave a move to play."""
        game = self._game
        _, infos = game.reset(seed=int(rng.integers(2**31)))
        moves: list[str] = []
        while len(moves) < count:
            (agent,) = game.acting
            move = str(rng.choice(infos[agent]["legal_moves"]))
            _, _, _, _, infos = game.step({agent: Message("assistant", move)})
            if not game.acting:
                break
            moves.append(move)
        return moves


class GameOpenings(TaskSet):
    """A game from positions of random play in the split ``train``, and from its start in ``eval``."""

    def __init__(
        self,
        game: str,
        longest: int,
        options: Mapping[str, Any] | None = None,
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 1000,
    ) -> None:
        """Take the game's environment by name, with its options.

        Raises:
            ConfigError: it is no `TurnGame`, or ``longest`` is negative.
        """
        env = make_any_env(game, options, "tasks.options.options")
        if not isinstance(env, TurnGame):
            raise ConfigError(f"tasks.options.game={game}: its players do not move one after the other (TurnGame)")
        if longest < 0:
            raise ConfigError(f"tasks.options.longest={longest} must not be negative")
        self._game = env
        self._longest = {"train": longest, "eval": 0}
        self._seed = seed
        self._sizes = {"train": train_size, "eval": eval_size}

    def split(self, name: str) -> Openings:
        """Return the openings of a split."""
        if name not in SPLITS:
            raise unknown_name("split of game_openings", name, SPLITS, "tasks.train_split or eval.split")
        return Openings(name, self._sizes[name], self._game, self._longest[name], self._seed)
