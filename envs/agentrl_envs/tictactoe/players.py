"""Scripted players of tic-tac-toe."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from agentrl import Message

from .board import best_cells


class MinimaxPlayer:
    """Plays perfectly, and takes each of the best moves with the same probability."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def act(self, messages: tuple[Message, ...], legal_moves: Sequence[str]) -> str:
        """Return the move in one of the best cells."""
        text, _, rows = messages[-1].content.partition("\n")
        mark = text.partition("You are ")[2][0]
        board = re.sub(r"\d", ".", "".join(rows.split()))[:9]  # lines may follow it
        if mark == "+":
            board, mark = board.translate(str.maketrans("+-_", "XO.")), "X"
        best = best_cells(board, mark)
        number = str(best[int(self._rng.integers(len(best)))] + 1)
        return next(move for move in legal_moves if move.endswith(number))
