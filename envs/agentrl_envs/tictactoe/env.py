"""Tic-tac-toe."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl import RandomPlayer, TurnGame
from agentrl.core.multi_agent_env import PlayerFactory

from .board import EMPTY, LINES, free_cells, opponent_mark, put, winner
from .players import MinimaxPlayer


def board_text(board: str, mark: str) -> str:
    """Return what the player of ``mark`` reads: the board, in which free cells are numbers from 1 to 9."""
    cells = [str(cell + 1) if owner == "." else owner for cell, owner in enumerate(board)]
    rows = "\n".join(" ".join(cells[cell] for cell in line) for line in LINES[:3])
    return f"Tic-tac-toe. You are {mark}. Answer with the number of a free cell.\n{rows}"


_LINE_ORDER = ("+-", "__", "-_", "+_", "--", "++")
"""Two cells of a line, own marks first: by the number of marks of a player who can still complete it."""


def relative_board(board: str, mark: str) -> str:
    """Return the board with ``+`` for the marks of ``mark``, ``-`` for the other player's and ``_`` for free cells."""
    return board.translate({ord(mark): "+", ord(opponent_mark(mark)): "-", ord("."): "_"})


def lines_through(view: str, cell: int) -> list[str]:
    """Return the other two cells of each line through a free cell, ordered by `_LINE_ORDER`."""
    pairs = [[view[neighbour] for neighbour in line if neighbour != cell] for line in LINES if cell in line]
    return sorted(("".join(sorted(pair, key="+-_".index)) for pair in pairs), key=_LINE_ORDER.index)


def cell_row(view: str, cell: int) -> str:
    """Return the row of a free cell: the lines through it without spaces, and the cell's number."""
    return f"{''.join(lines_through(view, cell))}{cell + 1}"


def lines_text(board: str, mark: str) -> str:
    """Return what the player of ``mark`` reads with ``show_lines``: the board, and the row of each free cell."""
    view = relative_board(board, mark)
    rows = [view[start : start + 3] for start in (0, 3, 6)]
    rows += [cell_row(view, cell) for cell in free_cells(board)]
    return "Tic-tac-toe. You are +. Answer with a row that has a number.\n" + "\n".join(rows)


class TicTacToeEnv(TurnGame):
    """Tic-tac-toe: 1 for the winner, -1 for the loser, 0 for a draw.

    Args:
        illegal_cost: see `TurnGame`.
        show_lines: a row for each free cell follows the board, with the lines through it and its number, and a move is
            one of these rows (`lines_text`). A small policy needs many games to learn which cells are in a line.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "tictactoe"}  # noqa: RUF012
    possible_agents: list[str] = ["player_0", "player_1"]  # noqa: RUF012
    blocking: ClassVar[bool] = False
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
        """Return the numbers of the free cells, with ``show_lines`` their rows."""
        free = free_cells(self.board)
        if not self.show_lines:
            return [str(cell + 1) for cell in free]
        view = relative_board(self.board, self._mark(self.acting[0]))
        return [cell_row(view, cell) for cell in free]

    def state_text(self, agent: str) -> str:
        """Return the board."""
        return (lines_text if self.show_lines else board_text)(self.board, self._mark(agent))

    def play(self, agent: str, move: str) -> Mapping[str, float] | None:
        """Put a mark."""
        self.board = put(self.board, int(move[-1]) - 1, self._mark(agent))
        if winner(self.board):
            return dict.fromkeys(self.agents, -1.0) | {agent: 1.0}
        return None if free_cells(self.board) else dict.fromkeys(self.agents, 0.0)

    def _mark(self, agent: str) -> str:
        return "X" if agent == self.possible_agents[0] else opponent_mark("X")
