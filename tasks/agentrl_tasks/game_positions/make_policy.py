"""Write the untrained policy (tokenizer and random weights) that ``--config self_play/sft_tictactoe`` starts from.

``python -m agentrl_tasks.game_positions.make_policy OUT``
"""

from __future__ import annotations

from collections.abc import Iterator

from agentrl_tasks.small_policy import PolicySize, run_command, save_policy

from .data import GamePositions

_POSITIONS = 3000
_VOCABULARY = 512
"""Enough for a token of each row of the observation, without its number."""
SIZE = PolicySize(hidden=128, layers=3, heads=4, key_value_heads=2, feed_forward=256)
"""About 0.5M parameters."""


def texts() -> Iterator[str]:
    """Yield texts that the policy reads and writes: positions of random play. Each move is a row of its position."""
    for task in GamePositions("tictactoe", {"show_lines": True}, seed=9000).split("train")[:_POSITIONS]:
        yield task.prompt[-1].content


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, lambda out, seed: save_policy(out, texts(), vocabulary=_VOCABULARY, seed=seed, size=SIZE))


if __name__ == "__main__":
    main()
