"""Negotiation over items with private values, after "Deal or No Deal" (Lewis et al. 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
from typing import Any, ClassVar

from agentrl import ConfigError, Message, MultiStep, RandomPlayer, TurnGame
from agentrl.core.multi_agent_env import PlayerFactory

from .players import GreedyPlayer

ITEMS = ("books", "hats", "balls")
_MAX_COUNT = 3
"""Items of a kind."""
_TOTAL_VALUE = 10
"""What all items are worth to each player."""
_MAX_TALK_CHARS = 200
"""Characters of what a player says before its move that the other one reads."""


class NegotiationEnv(TurnGame):
    """Players offer in turn how to divide the items; the reward is the share of the items' value that a player gets.

    Args:
        illegal_cost: what an illegal move costs; no player gets an item then.
        max_offers: after so many offers without a deal no player gets an item.
    """

    metadata: dict[str, Any] = {"render_modes": [], "name": "negotiation"}  # noqa: RUF012
    possible_agents: list[str] = ["player_0", "player_1"]  # noqa: RUF012
    blocking: ClassVar[bool] = False
    roles: ClassVar[Mapping[str, str]] = {"player_0": "first", "player_1": "second"}
    players: ClassVar[Mapping[str, PlayerFactory]] = {"random": RandomPlayer, "greedy": GreedyPlayer}
    worst_payoff: ClassVar[float] = 0.0
    remembers: ClassVar[bool] = True
    state_fields: ClassVar[tuple[str, ...]] = ("counts", "values", "offers", "talk")
    counts: list[int]
    """Number of items of each kind."""
    values: dict[str, list[int]]
    """Value of one item of each kind, by agent."""
    offers: list[list[int]]
    """What the player who made the offer keeps, of each kind."""
    talk: str
    """What the last player said before its move."""

    def __init__(self, illegal_cost: float = 0.5, max_offers: int = 6) -> None:
        """Make a negotiation.

        Raises:
            ConfigError: the cost is negative, or there are no offers.
        """
        super().__init__(illegal_cost)
        if max_offers < 1:
            raise ConfigError(f"env.options.max_offers={max_offers} must be at least 1")
        self.max_offers = max_offers

    def deal(self) -> None:
        """Draw the items and their values: together they are worth 10 to each player."""
        self.offers, self.talk = [], ""
        choices: list[list[int]] = []
        while len(choices) < 2:  # some numbers of items have no or one choice of values
            self.counts = [int(number) for number in self.np_random.integers(1, _MAX_COUNT + 1, len(ITEMS))]
            price_lists = product(*(range(_TOTAL_VALUE // count + 1) for count in self.counts))
            choices = [list(values) for values in price_lists if self._worth(self.counts, values) == _TOTAL_VALUE]
        drawn = self.np_random.choice(len(choices), len(self.agents), replace=False)
        self.values = {agent: choices[int(index)] for agent, index in zip(self.agents, drawn, strict=True)}

    def legal_moves(self) -> list[str]:
        """Return all offers, and ``accept`` if there is one to accept."""
        offers = product(*(range(count + 1) for count in self.counts))
        return [*(["accept"] if self.offers else []), *(f"keep {a} {b} {c}" for a, b, c in offers)]

    def read_move(self, text: str) -> str:
        """Return the last line of a turn; what is before it is said to the other player."""
        lines = text.rpartition("</think>")[2].strip().splitlines()
        self.talk = " ".join(lines[:-1])[:_MAX_TALK_CHARS]
        return super().read_move(lines[-1] if lines else "")

    def state_text(self, agent: str) -> str:
        """Return the rules with the player's values in its first turn, and the last offer."""
        offers_left = self.max_offers - len(self.offers)
        quote = f'The other player says "{self.talk}". ' if self.talk else ""
        last = f"{quote}The other player keeps {_numbers(self.offers[-1])}." if self.offers else ""
        question = f"Accept, or keep A B C. Offers left: {offers_left}."
        if self._moves[agent]:
            return f"{last} {question}"
        stock = zip(self.counts, ITEMS, self.values[agent], strict=True)
        items = ", ".join(f"{count} {name} worth {value} each" for count, name, value in stock)
        return f"Divide {items}. {last} {question}" if last else f"Divide {items}. {question}"

    def play(self, agent: str, move: str) -> Mapping[str, float] | None:
        """Make an offer, or accept the last one."""
        if move == "accept":
            offer = self.offers[-1]
            remainder = [count - number for count, number in zip(self.counts, offer, strict=True)]
            partner = self.next_to_move(agent)
            return {
                agent: self._worth(remainder, self.values[agent]) / _TOTAL_VALUE,
                partner: self._worth(offer, self.values[partner]) / _TOTAL_VALUE,
            }
        self.offers = [*self.offers, [int(number) for number in move.split()[1:]]]
        return dict.fromkeys(self.agents, 0.0) if len(self.offers) == self.max_offers else None

    def step(self, actions: dict[str, Message]) -> MultiStep:
        """Make a move; the metrics of the last step have ``deal``."""
        views, rewards, terminations, truncations, infos = super().step(actions)
        for info in infos.values():
            if "metrics" in info:
                info["metrics"]["deal"] = float(any(rewards.values()) and min(rewards.values()) >= 0)
        return views, rewards, terminations, truncations, infos

    def _worth(self, numbers: list[int], values: list[int] | tuple[int, ...]) -> int:
        return sum(number * value for number, value in zip(numbers, values, strict=True))


def _numbers(offer: list[int]) -> str:
    return " ".join(str(number) for number in offer)
