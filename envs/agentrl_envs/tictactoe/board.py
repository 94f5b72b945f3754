"""Boards of tic-tac-toe: texts of nine characters, ``X``, ``O`` or ``.`` for a free cell."""

from __future__ import annotations

from functools import cache

EMPTY = "." * 9
LINES = ((0, 1, 2), (3, 4, 5), (6, 7, 8), (0, 3, 6), (1, 4, 7), (2, 5, 8), (0, 4, 8), (2, 4, 6))
"""Rows, columns, diagonals."""


def free_cells(board: str) -> list[int]:
    """Return the free cells, from 0."""
    return [cell for cell, mark in enumerate(board) if mark == "."]


def put(board: str, cell: int, mark: str) -> str:
    """Return the board with a mark in a cell."""
    return board[:cell] + mark + board[cell + 1 :]


def winner(board: str) -> str:
    """Return the mark that has three in a row; empty if none has."""
    for a, b, c in LINES:
        if board[a] == board[b] == board[c] != ".":
            return board[a]
    return ""


def opponent_mark(mark: str) -> str:
    """Return the other player's mark."""
    return "O" if mark == "X" else "X"


@cache
def value(board: str, mark: str) -> int:
    """Return the result for the player of ``mark``, who moves next, if both play perfectly: 1, 0 or -1."""
    if winner(board):
        return -1  # the other player has just completed a line
    return max((-value(put(board, cell, mark), opponent_mark(mark)) for cell in free_cells(board)), default=0)


def best_cells(board: str, mark: str) -> list[int]:
    """Return the moves with the best result for the player of ``mark``."""
    values = {cell: -value(put(board, cell, mark), opponent_mark(mark)) for cell in free_cells(board)}
    return [cell for cell, score in values.items() if score == max(values.values())]
