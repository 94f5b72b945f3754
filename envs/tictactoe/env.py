"""Tic-tac-toe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl import RandomPlayer, TurnGame
from agentrl.core.player import PlayerFactory

from .board import EMPTY, LINES, free_cells, other, put, winner
from .players import MinimaxPlayer


def board_text(board: str, mark: str, show_lines: bool = False) -> str:
    """Return what the player of ``mark`` reads: the board, in which free cells are numbers from 1 to 9.

    With ``show_lines`` columns and diagonals follow, from left to right and from top to bottom.
    """
    cells = [str(cell + 1) if owner == "." else owner for cell, owner in enumerate(board)]
    rows = "\n".join(" ".join(cells[cell] for cell in line) for line in LINES[: 8 if show_lines else 3])
    return f"Tic-tac-toe. You are {mark}. Answer with the number of a free cell.\n{rows}"


class TicTacToeEnv(TurnGame):
    """Tic-tac-toe: 1 for the winner, -1 for the loser, 0 for a draw.

    Args:
        illegal_cost: see `TurnGame`.
        show_lines: columns and diagonals follow the board. A small policy needs many games to learn which cells are in a line.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "tictactoe"}  # noqa: RUF012
    possible_agents: list[str] = ["player_0", "player_1"]  # noqa: RUF012
    roles: ClassVar[Mapping[str, str]] = {"player_0": "first", "player_1": "second"}
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer, "minimax": MinimaxPlayer}
    state_fields: ClassVar[tuple[str, ...]] = ("board",)
    board: str
    """Nine characters, row by row: ``X`` (the first seat), ``O`` or ``.``."""

    def __init__(self, illegal_cost: float = 0.5, show_lines: bool = False) -> None:
        super().__init__(illegal_cost)
        self.show_lines = show_lines

    def deal(self) -> None:
        """Empty the board."""
        self.board = EMPTY

    def legal_moves(self) -> list[str]:
        """Return the numbers of the free cells."""
        return [str(cell + 1) for cell in free_cells(self.board)]

    def state_text(self, agent: str) -> str:
        """Return the board."""
        return board_text(self.board, self._mark(agent), self.show_lines)

    def play(self, agent: str, move: str) -> Mapping[str, float] | None:
        """Put a mark."""
        self.board = put(self.board, int(move) - 1, self._mark(agent))
        if winner(self.board):
            return dict.fromkeys(self.agents, -1.0) | {agent: 1.0}
        return None if free_cells(self.board) else dict.fromkeys(self.agents, 0.0)

    def _mark(self, agent: str) -> str:
        return "X" if agent == self.possible_agents[0] else other("X")
