"""Write the untrained policy (tokenizer and random weights) with which ``--config learning/TASK`` begins.

``python -m agentrl_tasks.learning.make_policy OUT``
"""

from __future__ import annotations

from pathlib import Path

from agentrl_tasks.small_policy import PolicySize, run_command, save_marker_policy

from .alphabet_sort import FIRST_TURN, NEW, NEXT_TURN
from .reverse_text import PROMPT
from .words import FIRST_NAMES, LAST_NAMES

SIZE = PolicySize(hidden=128, layers=4, heads=4, key_value_heads=2, feed_forward=384)
"""About 0.9M parameters."""

SENTENCES = (
    "system\nTools:",
    "user\n",
    "assistant\n",
    "tool\n",
    PROMPT,
    FIRST_TURN.format(key="first"),
    FIRST_TURN.format(key="last"),
    NEXT_TURN,
    NEW,
    '<tool_call>\n{"name": "calculate", "arguments": {"expression": "',
    '"}}\n</tool_call>',
    "Multiply ",
    "Add ",
    " by ",
    " and ",
    ", then add ",
    ", then subtract ",
    ", then multiply by ",
    "State the final answer to the following arithmetic problem: ",
    "You are Player 0. You are playing Guess The Number.\n",
    "You have to guess the number between 1 and 50 within 6 turns.\n",
    "As you enter your guess, the game will provide you with hints such as 'higher' or 'lower'.\n",
    "You may provide your response in any manner. Only the number that is wrapped in square brackets will be considered as your "
    "guess. For example, [5].\n",
    "As you play, the history of your guesses will be appended below. Use the information to complete the game before you run "
    "out of guesses.\n",
    "Enter your guess.",
    "The target number is higher.",
    "The target number is lower.",
    "You are Playing Wordle.\nA secret 5-letter word has been chosen. You have 6 attempts to guess it.\n",
    "For each guess, wrap your word in square brackets (e.g., '[apple]').\nFeedback for each letter will be given as follows:\n",
    "  - G (green): correct letter in the correct position\n"
    "  - Y (yellow): letter exists in the word but in the wrong position\n",
    "  - X (wrong): letter is not in the word\nEnter your guess to begin.\n",
    "You submitted [",
    "].\nFeedback:\n",
    "\nYou have ",
    " guesses left.",
)
"""One token each: what the tasks say around their words and numbers, which are written letter by letter."""


def save_policy(folder: Path, seed: int = 0) -> None:
    """Write the policy into ``folder``, a Hugging Face model."""
    markers = (*SENTENCES, *FIRST_NAMES, *(f" {name}" for name in LAST_NAMES))
    save_marker_policy(folder, markers, seed=seed, size=SIZE)


def main() -> None:
    """Run from the command line."""
    run_command(__doc__, save_policy)


if __name__ == "__main__":
    main()
