"""Best responses against games whose solution is known: matching pennies, Kuhn poker, and a game of perfect information."""

from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.selfplay.best_response import CHANCE, best_response_payoff, expected_payoff, exploitability


class Pennies:
    """The first wins if both choose the same; the second does not see the first's choice."""

    def root(self):
        return ""

    def player(self, state):
        return len(state) if len(state) < 2 else None

    def actions(self, state):
        return ("h", "t")

    def child(self, state, action):
        return state + action

    def information_set(self, state):
        return len(state)

    def payoff(self, state, player):
        return (1.0 if state[0] == state[1] else -1.0) * (1 if player == 0 else -1)


class Kuhn:
    """States are the two cards and the moves: ``k`` check or fold, ``b`` bet or call."""

    DEALS = tuple("".join(pair) for pair in permutations("JQK", 2))

    def root(self):
        return ""

    def player(self, state):
        if not state:
            return CHANCE
        moves = state[2:]
        return None if moves in ("kk", "bk", "bb", "kbk", "kbb") else len(moves) % 2

    def chances(self, state):
        return dict.fromkeys(self.DEALS, 1 / 6)

    def actions(self, state):
        return ("k", "b")

    def child(self, state, action):
        return state + action

    def information_set(self, state):
        return state[len(state[2:]) % 2] + state[2:]

    def payoff(self, state, player):
        moves = state[2:]
        better = 0 if "JQK".index(state[0]) > "JQK".index(state[1]) else 1
        wins = {"bk": 0, "kbk": 1}.get(moves, better)
        amount = 2.0 if moves.endswith("bb") else 1.0
        return amount if wins == player else -amount


def bets(**chances):
    return {where: {"b": float(p), "k": 1 - float(p)} for where, p in chances.items()}


def nash(alpha):
    """The equilibria of Kuhn (1950): one for each alpha from 0 to 1/3."""
    first = bets(J=alpha, Q=0, K=3 * alpha, Jkb=0, Qkb=alpha + Fraction(1, 3), Kkb=1)
    second = bets(Jk=Fraction(1, 3), Qk=0, Kk=1, Jb=0, Qb=Fraction(1, 3), Kb=1)
    return first, second


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 9), Fraction(1, 5), Fraction(1, 3)])
def test_the_equilibria_of_kuhn_poker_have_its_value_and_cannot_be_exploited(alpha):
    strategies = nash(alpha)
    assert expected_payoff(Kuhn(), strategies, 0) == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response_payoff(Kuhn(), strategies[1], 0) == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response_payoff(Kuhn(), strategies[0], 1) == pytest.approx(1 / 18, abs=1e-12)
    assert exploitability(Kuhn(), strategies) == pytest.approx(0, abs=1e-12)


def test_strategies_of_kuhn_poker_with_known_best_responses():
    uniform = [bets(**dict.fromkeys(one, 0.5)) for one in nash(0)]
    assert best_response_payoff(Kuhn(), uniform[1], 0) == pytest.approx(0.5)
    assert best_response_payoff(Kuhn(), uniform[0], 1) == pytest.approx(5 / 12)
    assert exploitability(Kuhn(), uniform) == pytest.approx(11 / 24)
    always = [bets(**dict.fromkeys(one, 1)) for one in nash(0)]
    # Fold the jack, call with the queen or fold it, which is equal, and call with the king.
    assert best_response_payoff(Kuhn(), always[0], 1) == pytest.approx((-1 + 0 + 2) / 3)


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_a_best_response_is_the_best_of_all_pure_strategies(chances):
    first, second = nash(0)
    mixed = bets(**dict(zip([*first, *second], chances, strict=True)))
    found = best_response_payoff(Kuhn(), mixed, 1)
    pure = [bets(**dict(zip(second, (number >> bit & 1 for bit in range(6)), strict=True))) for number in range(64)]
    assert found == pytest.approx(max(expected_payoff(Kuhn(), (mixed, one), 1) for one in pure), abs=1e-9)
    assert exploitability(Kuhn(), (mixed, mixed)) >= -1e-12


def test_matching_pennies():
    even, heads = {"h": 0.5, "t": 0.5}, {"h": 1.0}
    assert exploitability(Pennies(), ({0: even}, {1: even})) == 0
    assert exploitability(Pennies(), ({0: heads}, {1: heads})) == 1.0
    assert best_response_payoff(Pennies(), {0: heads}, 1) == 1.0


@pytest.mark.parametrize("strategy", [{}, {0: {"h": 0.5}}, {0: {"h": 0.5, "x": 0.5}}, {0: {"h": 1.5, "t": -0.5}}])
def test_a_strategy_that_is_none(strategy):
    with pytest.raises(ValueError, match="the legal actions are h, t"):
        best_response_payoff(Pennies(), strategy, 1)
