"""Scripted players of TextArena's GuessTheNumber and Wordle, and positions of their games for a warm start."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from agentrl import ConfigError, Message, unknown_name
from agentrl_tasks.game_positions import GamePositions

_RANGE = re.compile(r"number between (\d+) and (\d+)")
_HINT = re.compile(r"target number is (higher|lower)")
_BOARD = re.compile(r"^((?:[A-Z] )+[A-Z])\n((?:[GYX] )+[GYX])$", re.MULTILINE)


class NumberGuesser:
    """Guesses a number: with probability ``skill`` one that the hints leave, else any that it has not guessed yet."""

    def __init__(self, rng: np.random.Generator, skill: float) -> None:
        self._rng, self._skill = rng, skill
        self._low = self._high = self._guess = 0
        self._open: set[int] = set()

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a number in brackets."""
        text = "\n".join(message.content for message in messages)
        if bounds := _RANGE.search(text):
            self._low, self._high = int(bounds[1]), int(bounds[2])
            self._open = {*range(self._low, self._high + 1)}
        for hint in _HINT.findall(text):
            if hint == "higher":
                self._low = max(self._low, self._guess + 1)
            else:
                self._high = min(self._high, self._guess - 1)
        if self._rng.random() < self._skill and self._low <= self._high:
            self._guess = (self._low + self._high) // 2
        else:
            numbers = sorted(self._open)
            self._guess = numbers[int(self._rng.integers(len(numbers)))]
        self._open.discard(self._guess)
        return f"[{self._guess}]"


class WordGuesser:
    """Guesses a word: with probability ``skill`` one that fits all feedback, else any that it has not guessed yet.

    It knows the words of NLTK's basic list, from which the game draws.
    """

    def __init__(self, rng: np.random.Generator, skill: float) -> None:
        self._rng, self._skill = rng, skill
        self._open = basic_words()
        self._fitting = list(self._open)

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return a word in brackets."""
        for message in messages:
            for letters, marks in _BOARD.findall(message.content):
                guess, feedback = letters.replace(" ", "").lower(), marks.replace(" ", "")
                self._fitting = [word for word in self._fitting if give_feedback(guess, word) == feedback]
        words = self._fitting if self._rng.random() < self._skill and self._fitting else self._open
        word = words[int(self._rng.integers(len(words)))]
        self._open = [open_word for open_word in self._open if open_word != word]
        self._fitting = [fitting_word for fitting_word in self._fitting if fitting_word != word]
        return f"[{word}]"


def basic_words(letters: int = 5) -> list[str]:
    """Return the words of NLTK's basic list with so many letters, in order."""
    from nltk.corpus import words

    return sorted(
        word for word in words.words("en-basic") if len(word) == letters and word.isalpha() and word.islower()
    )


def give_feedback(guess: str, secret: str) -> str:
    """Return Wordle's feedback: ``G`` right, ``Y`` elsewhere in the word, ``X`` not in it; each letter of it counts once."""
    marks = ["G" if letter == right else "X" for letter, right in zip(guess, secret, strict=True)]
    letters = [right for right, mark in zip(secret, marks, strict=True) if mark == "X"]
    for index, letter in enumerate(guess):
        if marks[index] == "X" and letter in letters:
            letters.remove(letter)
            marks[index] = "Y"
    return "".join(marks)


PLAYERS: Mapping[str, type[NumberGuesser] | type[WordGuesser]] = {"number": NumberGuesser, "word": WordGuesser}


class GuessPositions(GamePositions):
    """Positions of one of TextArena's guessing games, each with the guess of a scripted player. Splits: ``train``, ``eval``."""

    def __init__(
        self,
        game: str,
        player: str,
        game_options: Mapping[str, Any] | None = None,
        word_lists: str = "nltk",
        skill: float = 0.5,
        seed: int = 0,
        train_size: int = 100_000,
        eval_size: int = 384,
    ) -> None:
        """Take the game and the player.

        Args:
            game: its id in TextArena.
            player: ``number`` or ``word``.
            game_options: as ``env.options.game_options`` of ``textarena``.
            word_lists: as ``env.options.word_lists`` of ``textarena``.
            skill: share of guesses that use what the player knows.
            seed: decides about the games.
            train_size: positions in ``train``.
            eval_size: positions in ``eval``.

        Raises:
            ConfigError, UnknownNameError: an option is out of range, or there is no such game or player.
        """
        if player not in PLAYERS:
            raise unknown_name("player", player, PLAYERS, "tasks.options.player")
        if not 0 <= skill <= 1:
            raise ConfigError(f"tasks.options.skill={skill} must be from 0 to 1")
        options = {"game": game, "players": 1, "game_options": dict(game_options or {}), "word_lists": word_lists}
        super().__init__("textarena", options, seed=seed, train_size=train_size, eval_size=eval_size)
        self._player = partial(PLAYERS[player], skill=skill)
