"""The text protocol, for policies without tool calls: ``<bash>command</bash>``. Pure functions, which raise for no text."""

from __future__ import annotations

OPENING, CLOSING = "<bash>", "</bash>"
STOP = (CLOSING,)
"""Ends a turn."""
TOOLS_PROMPT = (
    "{instruction}\n\nYou work in a shell of a Linux machine, with the tool `bash`. When the task is done, answer without a "
    "call."
)
TEXT_PROMPT = (
    "{instruction}\n\nYou work in a shell of a Linux machine. Write a command between <bash> and </bash>, and you get what it "
    "prints between <output> and </output>. When the task is done, answer without a command."
)
NEXT_STEP = "This step is over. The next one:\n\n{instruction}"


def parse_command(content: str) -> str | None:
    """Return the command of a turn; None: it has none.

    The first closing tag ends the turn, as the stop string does, and the command begins at the nearest opening tag. A turn that
    opens a command and does not close it has none, and neither has an empty one.
    """
    head, closing, _ = content.partition(CLOSING)
    _, opening, command = head.rpartition(OPENING)
    return command.strip() if opening and closing and command.strip() else None


def output_text(text: str) -> str:
    """Return the observation with what a command printed."""
    return f"<output>\n{text.strip()}\n</output>"
