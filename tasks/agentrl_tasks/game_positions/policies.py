"""Folders of the policies shipped with this taskset.

They were made by ``make_policy`` and then ``--config self_play/sft_tictactoe`` on one CPU core; `make policies` makes
them again.
"""

from pathlib import Path

TICTACTOE = Path(__file__).parent / "policies" / "tictactoe"
"""Plays tic-tac-toe at random and mostly by the rules: the start of ``--config self_play/tictactoe``."""
