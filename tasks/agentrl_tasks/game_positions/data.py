"""The taskset: single positions of games between scripted players, each with the move that a player made."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from agentrl import ConfigError, MadeTasks, Message, MultiAgentEnv, Rewrite, Task, TaskSet, unknown_name
from agentrl.core.multi_agent_env import PlayerFactory
from agentrl.core.registry import make_any_env

SPLITS = ("train", "eval")


class Positions(MadeTasks):
    """Positions of one split, each from another game."""

    def __init__(self, split: str, size: int, game: MultiAgentEnv, player: PlayerFactory, seed: int) -> None:
        """Draw positions of ``game`` on its tasks of this split, which differ by ``seed`` and split."""
        super().__init__(split, size)
        self._game = game
        self._player = player
        self._tasks: Sequence[Task] = type(game).tasks(split, seed)
        self._seed = [seed, zlib.crc32(split.encode())]

    def make(self, index: int) -> Task:
        """Return one position of a game, each of its positions with the same probability."""
        rng, game = np.random.default_rng([*self._seed, index]), self._game
        task = self._tasks[int(rng.integers(len(self._tasks)))]
        views, infos = game.reset(seed=int(rng.integers(2**31)), options={"task": task})
        read: dict[str, tuple[Message, ...]] = {}
        """By agent, its conversation."""
        new: dict[str, tuple[Message, ...]] = {}
        """By agent, what it has read since its last turn."""
        players = {agent: self._player(rng) for agent in game.agents}
        positions: list[Task] = []
        while True:
            for agent, view in views.items():
                messages = view["messages"]
                if isinstance(messages, Rewrite):
                    read[agent] = new[agent] = messages.messages
                else:
                    read[agent], new[agent] = read.get(agent, ()) + messages, new.get(agent, ()) + messages
            if not game.acting:
                break
            actions = {}
            for agent in game.acting:
                legal = list(infos[agent].get("legal_moves", ()))
                move = players[agent].act(new[agent], legal)
                name = f"game_positions/{self.split}/{index}"
                positions.append(Task(name, read[agent], answer=move, metadata={"legal_moves": legal}))
                actions[agent] = Message("assistant", move)
                read[agent], new[agent] = (*read[agent], actions[agent]), ()
            views, _, _, _, infos = game.step(actions)
        return positions[int(rng.integers(len(positions)))]


class _Played:
    """Makes the move that was made in the position."""

    def __init__(self, task: Task) -> None:
        self._move = str(task.answer)

    def act(self, observation: tuple[Message, ...]) -> str:
        """Return the move."""
        return self._move


class GamePositions(TaskSet):
    """Positions of a game and the moves of a scripted player in them. Splits: ``train`` and ``eval``."""

    def __init__(
        self,
        game: str,
        options: Mapping[str, Any] | None = None,
        player: str = "random",
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
    ) -> None:
        """Take the game's environment by name, with its options, and the scripted player of all its agents.

        Raises:
            ConfigError: it has one agent, or no such player.
        """
        env = make_any_env(game, options, "tasks.options.options")
        if not isinstance(env, MultiAgentEnv):
            raise ConfigError(f"tasks.options.game={game} has one agent")
        if player not in env.players:
            raise unknown_name(f"player of {game}", player, sorted(env.players), "tasks.options.player")
        self._game = env
        self._player = env.players[player]
        self._seed = seed
        self._sizes = {"train": train_size, "eval": eval_size}

    def split(self, name: str) -> Positions:
        """Return the positions of a split."""
        if name not in SPLITS:
            raise unknown_name("split of game_positions", name, SPLITS, "tasks.train_split or eval.split")
        return Positions(name, self._sizes[name], self._game, self._player, self._seed)

    def demonstrator(self, task: Task, rng: np.random.Generator) -> _Played:
        """Return the scripted player's move."""
        return _Played(task)
