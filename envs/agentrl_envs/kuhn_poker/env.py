"""Kuhn poker (Kuhn 1950): three cards, an ante of 1, one bet of 1."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from agentrl import RandomPlayer, TurnGame
from agentrl.core.game_tree import GameTree
from agentrl.core.player import PlayerFactory

from .players import NashPlayer

CARDS = "JQK"
"""From low to high."""
NAMES = {"J": "jack", "Q": "queen", "K": "king"}
"""Of the cards, in texts."""


def moves_after(history: Sequence[str]) -> list[str]:
    """Return the legal moves after the moves of ``history``."""
    return ["fold", "call"] if history and history[-1] == "bet" else ["check", "bet"]


def said_moves(card: str, history: Sequence[str], say_card: bool) -> list[str]:
    """Return the texts of the legal moves; with ``say_card`` they begin with the player's card."""
    return [f"{NAMES[card]} {move}" if say_card else move for move in moves_after(history)]


def move_of(said: str) -> str:
    """Return the move in the text of one."""
    return said.rpartition(" ")[2]


def state_text(card: str, history: Sequence[str], say_card: bool = False) -> str:
    """Return what a player reads: its card and the moves so far, from which everything else follows."""
    first, second = said_moves(card, history, say_card)
    return f"Kuhn poker. Your card: {NAMES[card]}. Moves: {' '.join(history) or 'none'}. Answer {first} or {second}."


def payoffs(cards: Sequence[str], history: Sequence[str]) -> tuple[float, float] | None:
    """Return what each seat wins or loses with its card after the moves of ``history``; None if the game goes on."""
    last = history[-1] if history else ""
    if last == "fold":  # of the player who moved last
        return (-1.0, 1.0) if len(history) % 2 else (1.0, -1.0)
    if last != "call" and tuple(history) != ("check", "check"):
        return None
    stake = 2.0 if last == "call" else 1.0
    return (stake, -stake) if CARDS.index(cards[0]) > CARDS.index(cards[1]) else (-stake, stake)


class KuhnPokerEnv(TurnGame):
    """Kuhn poker: the payoff is what a player wins or loses, 1 or 2 chips.

    Args:
        illegal_cost: of an illegal move, on top of the worst payoff.
        say_card: a move begins with the player's card, such as ``king call``. The other player reads the move alone. A small
            policy that learns legal moves before self-play learns to read its card then.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "kuhn_poker"}  # noqa: RUF012
    possible_agents: list[str] = ["player_0", "player_1"]  # noqa: RUF012
    roles: ClassVar[Mapping[str, str]] = {"player_0": "first", "player_1": "second"}
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer, "nash": NashPlayer}
    worst_payoff: ClassVar[float] = -2.0
    state_fields: ClassVar[tuple[str, ...]] = ("cards", "history")
    cards: dict[str, str]
    """Card of each agent: J, Q or K."""
    history: list[str]
    """Moves so far."""

    def __init__(self, illegal_cost: float = 0.5, say_card: bool = False) -> None:
        """Make a game.

        Raises:
            ConfigError: the cost is negative.
        """
        super().__init__(illegal_cost)
        self.say_card = say_card

    def game_tree(self) -> GameTree[Any]:
        """Return the game as a tree."""
        from .tree import KuhnTree

        return KuhnTree(self.say_card)

    def deal(self) -> None:
        """Deal a card to each player."""
        dealt = self.np_random.permutation(list(CARDS))
        self.cards = {agent: str(card) for agent, card in zip(self.agents, dealt, strict=False)}
        self.history = []

    def legal_moves(self) -> list[str]:
        """Return ``check`` and ``bet``, or after a bet ``fold`` and ``call``; with `say_card` after the card's name."""
        (agent,) = self.acting
        return said_moves(self.cards[agent], self.history, self.say_card)

    def state_text(self, agent: str) -> str:
        """Return the player's card and the moves so far."""
        return state_text(self.cards[agent], self.history, self.say_card)

    def play(self, agent: str, move: str) -> Mapping[str, float] | None:
        """Make a move; at a showdown the higher card wins."""
        self.history = [*self.history, move_of(move)]
        found = payoffs([self.cards[one] for one in self.possible_agents], self.history)
        return None if found is None else dict(zip(self.possible_agents, found, strict=True))
