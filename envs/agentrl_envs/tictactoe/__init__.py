"""Tic-tac-toe for two players."""

from .env import TicTacToeEnv, board_text, lines_text
from .players import MinimaxPlayer

__all__ = ["MinimaxPlayer", "TicTacToeEnv", "board_text", "lines_text"]
