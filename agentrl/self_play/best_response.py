"""Exact best responses and exploitability in small games of two players, by a walk over the whole game tree."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

from agentrl.core.game_tree import CHANCE, GameTree

S = TypeVar("S", bound=Hashable)
Strategy = Mapping[Hashable, Mapping[str, float]]
"""By information set: the probability of each action."""


def expected_payoff(game: GameTree[S], strategies: Sequence[Strategy], player: int) -> float:
    """Return the payoff of ``player`` if both follow their strategies, by seat."""
    payoffs: dict[S, float] = {}

    def value(state: S) -> float:
        if state not in payoffs:
            mover = game.player(state)
            if mover is None:
                payoffs[state] = game.payoff(state, player)
            else:
                chances = game.chances(state) if mover == CHANCE else _chances(game, state, strategies[mover])
                payoffs[state] = sum(p * value(game.child(state, action)) for action, p in chances.items() if p)
        return payoffs[state]

    return value(game.root())


def best_response_payoff(game: GameTree[S], opponent: Strategy, player: int) -> float:
    """Return what ``player`` gets with a best response to the opponent's strategy.

    States that the player cannot tell apart are walked together, with the probability with which chance and the opponent
    reach each: at every information set the player takes the action that is best for all of them.
    """
    payoffs: dict[S, float] = {}

    def value(states: list[tuple[float, S]]) -> float:
        """Return the sum of payoffs, weighted by the probabilities of the states."""
        if len(states) > 1:
            return walk(states)
        weight, state = states[0]  # what follows depends on the state alone
        if state not in payoffs:
            payoffs[state] = walk([(1.0, state)])
        return weight * payoffs[state]

    def walk(states: list[tuple[float, S]]) -> float:
        total, stack = 0.0, list(states)
        mine: dict[Hashable, list[tuple[float, S]]] = {}
        while stack:
            weight, state = stack.pop()
            mover = game.player(state)
            if mover is None:
                total += weight * game.payoff(state, player)
            elif mover == player:
                mine.setdefault(game.information_set(state), []).append((weight, state))
            else:
                chances = game.chances(state) if mover == CHANCE else _chances(game, state, opponent)
                stack += [(weight * p, game.child(state, action)) for action, p in chances.items() if p]
        for indistinguishable in mine.values():
            actions = game.actions(indistinguishable[0][1])
            total += max(
                value([(weight, game.child(state, action)) for weight, state in indistinguishable])
                for action in actions
            )
        return total

    return value([(1.0, game.root())])


def exploitability(game: GameTree[S], strategies: Sequence[Strategy]) -> float:
    """Return ``NashConv / 2``: what a player gains in the mean over both seats by a best response to the other's strategy.

    0 is a Nash equilibrium. Source: Lanctot et al., arXiv:1711.00832, section 4.
    """
    gains = [
        best_response_payoff(game, strategies[1 - player], player) - expected_payoff(game, strategies, player)
        for player in (0, 1)
    ]
    return sum(gains) / 2


def average_strategies(game: GameTree[S], mixed: Sequence[Sequence[Strategy]]) -> tuple[Strategy, Strategy]:
    """Return, by seat, the strategy that plays like a player who draws one of ``mixed`` before each game, all equally probable.

    At an information set each strategy has the weight with which its player's own actions lead there, which is the same
    for all states in it (perfect recall). Where none leads, all have the same weight. Source: Kuhn (1953).

    Args:
        game: of two players.
        mixed: each by seat, with the probabilities of all legal actions.
    """
    averages: tuple[dict[Hashable, dict[str, float]], ...] = ({}, {})

    def walk(state: S, reach: tuple[tuple[float, ...], tuple[float, ...]]) -> None:
        """Go on from a state, with the probability of each strategy's own actions so far, by seat."""
        mover = game.player(state)
        if mover is None:
            return
        if mover == CHANCE:
            for event in game.chances(state):
                walk(game.child(state, event), reach)
            return
        information_set, mine = game.information_set(state), reach[mover]
        chances = [_chances(game, state, strategies[mover]) for strategies in mixed]
        weights = mine if sum(mine) > 0 else (1.0,) * len(mixed)
        averages[mover][information_set] = {
            action: sum(weight * strategy.get(action, 0.0) for weight, strategy in zip(weights, chances, strict=True))
            / sum(weights)
            for action in game.actions(state)
        }
        for action in game.actions(state):
            next_reach = tuple(
                weight * strategy.get(action, 0.0) for weight, strategy in zip(mine, chances, strict=True)
            )
            walk(game.child(state, action), (next_reach, reach[1]) if mover == 0 else (reach[0], next_reach))

    begin = (1.0,) * len(mixed)
    walk(game.root(), (begin, begin))
    return averages[0], averages[1]


def legal_actions(game: GameTree[S]) -> tuple[dict[Hashable, tuple[str, ...]], dict[Hashable, tuple[str, ...]]]:
    """Return the legal actions at each information set, by seat."""
    actions_by_seat: tuple[dict[Hashable, tuple[str, ...]], dict[Hashable, tuple[str, ...]]] = ({}, {})
    stack = [game.root()]
    while stack:
        state = stack.pop()
        mover = game.player(state)
        if mover is not None:
            actions = tuple(game.chances(state) if mover == CHANCE else game.actions(state))
            stack += [game.child(state, action) for action in actions]
            if mover != CHANCE:
                actions_by_seat[mover][game.information_set(state)] = actions
    return actions_by_seat


def _chances(game: GameTree[S], state: S, strategy: Strategy) -> Mapping[str, float]:
    """Return the probabilities of the actions that a strategy takes in a state.

    Raises:
        ValueError: the strategy lacks the information set, or its probabilities of the legal actions do not sum up to 1.
    """
    information_set, legal = game.information_set(state), game.actions(state)
    probabilities = strategy.get(information_set)
    if (
        probabilities is None
        or set(probabilities) - set(legal)
        or abs(sum(probabilities.values()) - 1) > 1e-6
        or min(probabilities.values()) < 0
    ):
        raise ValueError(
            f"the strategy has {probabilities!r} at {information_set!r}, where the legal actions are {', '.join(legal)}"
        )
    return probabilities
