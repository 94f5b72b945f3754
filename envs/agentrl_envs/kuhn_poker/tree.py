"""Kuhn poker as a game tree, for exact payoffs and best responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import permutations

from .rules import CARDS, legal_moves, move_texts, parse_move, payoffs, state_text

Deal = tuple[str, ...]
"""The cards by seat, and then the moves; empty before the deal."""


class KuhnTree:
    """Kuhn poker. An information set is the text that the player reads, so a strategy is what a policy does with it.

    Args:
        say_card: see `KuhnPokerEnv`.
    """

    def __init__(self, say_card: bool = False) -> None:
        """Make the tree."""
        self.say_card = say_card

    def root(self) -> Deal:
        """Return the state before the deal."""
        return ()

    def player(self, state: Deal) -> int | None:
        """Return the seat that moves, -1 for the deal, None at the end."""
        if not state:
            return -1
        return None if payoffs(state[:2], state[2:]) is not None else len(state) % 2

    def chances(self, state: Deal) -> Mapping[str, float]:
        """Return the probability of each deal."""
        return dict.fromkeys(("".join(cards) for cards in permutations(CARDS, 2)), 1 / 6)

    def actions(self, state: Deal) -> Sequence[str]:
        """Return the legal moves."""
        return move_texts(state[len(state) % 2], state[2:], self.say_card)

    def child(self, state: Deal, action: str) -> Deal:
        """Return the state after a deal or a move."""
        return (*state, parse_move(action)) if state else tuple(action)

    def information_set(self, state: Deal) -> str:
        """Return what the player who moves reads."""
        return state_text(state[len(state) % 2], state[2:], self.say_card)

    def payoff(self, state: Deal, player: int) -> float:
        """Return a seat's payoff."""
        chips = payoffs(state[:2], state[2:])
        assert chips is not None, "the game is over"
        return chips[player]


def nash_strategy(bets: Mapping[tuple[str, str], float]) -> dict[str, dict[str, float]]:
    """Return a strategy from the probability of ``bet`` or ``call`` by card and moves so far, such as `players.NASH`."""
    strategy = {}
    for (card, moves), chance in bets.items():
        history = () if moves == "none" else tuple(moves.split())
        passive, active = legal_moves(history)
        strategy[state_text(card, history)] = {passive: 1 - chance, active: chance}
    return strategy
