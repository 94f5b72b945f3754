"""Kuhn poker (Kuhn 1950): three cards, an ante of 1, one bet of 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from agentrl import RandomPlayer, TurnGame
from agentrl.core.multi_agent_env import GameTree, PlayerFactory

from .players import NashPlayer
from .rules import CARDS, move_texts, parse_move, payoffs, state_text
from .tree import KuhnTree


class KuhnPokerEnv(TurnGame):
    """Kuhn poker: the payoff is what a player wins or loses, 1 or 2 chips.

    Args:
        illegal_cost: of an illegal move, on top of the worst payoff.
        say_card: a move begins with the player's card, such as ``king call``. The other player reads the move alone. A small
            policy that learns legal moves before self-play learns to read its card then.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "kuhn_poker"}  # noqa: RUF012
    possible_agents: list[str] = ["player_0", "player_1"]  # noqa: RUF012
    blocking: ClassVar[bool] = False
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
        return KuhnTree(self.say_card)

    def deal(self) -> None:
        """Deal a card to each player."""
        dealt = self.np_random.permutation(list(CARDS))
        self.cards = {agent: str(card) for agent, card in zip(self.agents, dealt, strict=False)}
        self.history = []

    def legal_moves(self) -> list[str]:
        """Return ``check`` and ``bet``, or after a bet ``fold`` and ``call``; with `say_card` after the card's name."""
        (agent,) = self.acting
        return move_texts(self.cards[agent], self.history, self.say_card)

    def state_text(self, agent: str) -> str:
        """Return the player's card and the moves so far."""
        return state_text(self.cards[agent], self.history, self.say_card)

    def play(self, agent: str, move: str) -> Mapping[str, float] | None:
        """Make a move; at a showdown the higher card wins."""
        self.history = [*self.history, parse_move(move)]
        chips = payoffs([self.cards[player] for player in self.possible_agents], self.history)
        return None if chips is None else dict(zip(self.possible_agents, chips, strict=True))
