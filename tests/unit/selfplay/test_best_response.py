"""Best responses against games whose solution is known: matching pennies, Kuhn poker, and a game of perfect information."""

from fractions import Fraction
from itertools import product

import pytest
from agentrl_envs.kuhn_poker.players import NASH
from agentrl_envs.kuhn_poker.tree import KuhnTree, nash_strategy
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.selfplay.best_response import best_response_payoff, expected_payoff, exploitability


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


def strategy(**chances):
    """A strategy from the probability of ``bet`` or ``call``, by card and moves: ``Kkb`` is the king after check and bet."""
    moves = {"k": "check", "b": "bet"}
    return nash_strategy(
        {(where[0], " ".join(moves[one] for one in where[1:]) or "none"): float(p) for where, p in chances.items()}
    )


def nash(alpha):
    """The equilibria of Kuhn (1950): one for each alpha from 0 to 1/3."""
    first = strategy(J=alpha, Q=0, K=3 * alpha, Jkb=0, Qkb=alpha + Fraction(1, 3), Kkb=1)
    second = strategy(Jk=Fraction(1, 3), Qk=0, Kk=1, Jb=0, Qb=Fraction(1, 3), Kb=1)
    return first, second


FIRST, SECOND = ("J", "Q", "K", "Jkb", "Qkb", "Kkb"), ("Jk", "Qk", "Kk", "Jb", "Qb", "Kb")


@pytest.mark.parametrize("alpha", [Fraction(0), Fraction(1, 9), Fraction(1, 5), Fraction(1, 3)])
def test_the_equilibria_of_kuhn_poker_have_its_value_and_cannot_be_exploited(alpha):
    strategies = nash(alpha)
    assert expected_payoff(KuhnTree(), strategies, 0) == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response_payoff(KuhnTree(), strategies[1], 0) == pytest.approx(-1 / 18, abs=1e-12)
    assert best_response_payoff(KuhnTree(), strategies[0], 1) == pytest.approx(1 / 18, abs=1e-12)
    assert exploitability(KuhnTree(), strategies) == pytest.approx(0, abs=1e-12)


def test_strategies_of_kuhn_poker_with_known_best_responses():
    uniform = [strategy(**dict.fromkeys(one, 0.5)) for one in (FIRST, SECOND)]
    assert best_response_payoff(KuhnTree(), uniform[1], 0) == pytest.approx(0.5)
    assert best_response_payoff(KuhnTree(), uniform[0], 1) == pytest.approx(5 / 12)
    assert exploitability(KuhnTree(), uniform) == pytest.approx(11 / 24)
    always = [strategy(**dict.fromkeys(one, 1)) for one in (FIRST, SECOND)]
    # Fold the jack, call with the queen or fold it, which is equal, and call with the king.
    assert best_response_payoff(KuhnTree(), always[0], 1) == pytest.approx((-1 + 0 + 2) / 3)


@settings(max_examples=20)
@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_a_best_response_is_the_best_of_all_pure_strategies(chances):
    mixed = strategy(**dict(zip((*FIRST, *SECOND), chances, strict=True)))
    found = best_response_payoff(KuhnTree(), mixed, 1)
    pure = [strategy(**dict(zip(SECOND, bets, strict=True))) for bets in product((0, 1), repeat=6)]
    assert found == pytest.approx(max(expected_payoff(KuhnTree(), (mixed, one), 1) for one in pure), abs=1e-9)
    assert exploitability(KuhnTree(), (mixed, mixed)) >= -1e-12


def test_the_scripted_player_of_the_environment_is_an_equilibrium():
    scripted = nash_strategy(NASH)
    assert exploitability(KuhnTree(), (scripted, scripted)) == pytest.approx(0, abs=1e-12)


def test_matching_pennies():
    even, heads = {"h": 0.5, "t": 0.5}, {"h": 1.0}
    assert exploitability(Pennies(), ({0: even}, {1: even})) == 0
    assert exploitability(Pennies(), ({0: heads}, {1: heads})) == 1.0
    assert best_response_payoff(Pennies(), {0: heads}, 1) == 1.0


@pytest.mark.parametrize("strategy", [{}, {0: {"h": 0.5}}, {0: {"h": 0.5, "x": 0.5}}, {0: {"h": 1.5, "t": -0.5}}])
def test_a_strategy_that_is_none(strategy):
    with pytest.raises(ValueError, match="the legal actions are h, t"):
        best_response_payoff(Pennies(), strategy, 1)
