"""The rules of Kuhn poker: cards, moves, texts and payoffs."""

from __future__ import annotations

from collections.abc import Sequence

CARDS = "JQK"
"""From low to high."""
NAMES = {"J": "jack", "Q": "queen", "K": "king"}
"""Names of the cards, in texts."""


def legal_moves(history: Sequence[str]) -> list[str]:
    """Return the legal moves after the moves of ``history``."""
    return ["fold", "call"] if history and history[-1] == "bet" else ["check", "bet"]


def move_texts(card: str, history: Sequence[str], say_card: bool) -> list[str]:
    """Return the texts of the legal moves; with ``say_card`` they begin with the player's card."""
    return [f"{NAMES[card]} {move}" if say_card else move for move in legal_moves(history)]


def parse_move(text: str) -> str:
    """Return the move in a text of `move_texts`, without the card."""
    return text.rpartition(" ")[2]


def state_text(card: str, history: Sequence[str], say_card: bool = False) -> str:
    """Return what a player reads: its card and the moves so far, from which everything else follows."""
    first, second = move_texts(card, history, say_card)
    return f"Kuhn poker. Your card: {NAMES[card]}. Moves: {' '.join(history) or 'none'}. Answer {first} or {second}."


def payoffs(cards: Sequence[str], history: Sequence[str]) -> tuple[float, float] | None:
    """Return what each seat wins or loses with its card after the moves of ``history``; None if the game continues."""
    last = history[-1] if history else ""
    if last == "fold":  # of the player who moved last
        return (-1.0, 1.0) if len(history) % 2 else (1.0, -1.0)
    if last != "call" and tuple(history) != ("check", "check"):
        return None
    stake = 2.0 if last == "call" else 1.0
    return (stake, -stake) if CARDS.index(cards[0]) > CARDS.index(cards[1]) else (-stake, stake)
