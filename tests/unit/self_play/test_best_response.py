"""Best responses against games whose solution is known: matching pennies, Kuhn poker, and a game of perfect information."""

from fractions import Fraction
from itertools import product

import pytest
from agentrl_envs.kuhn_poker.players import NASH
from agentrl_envs.kuhn_poker.tree import KuhnTree, nash_strategy
from hypothesis import given
from hypothesis import strategies as st

from agentrl.self_play.game_scores import (
    average_strategies,
    best_response_payoff,
    expected_payoff,
    exploitability,
    legal_actions,
)


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
        {(where[0], " ".join(moves[move] for move in where[1:]) or "none"): float(p) for where, p in chances.items()}
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
    uniform = [strategy(**dict.fromkeys(information_sets, 0.5)) for information_sets in (FIRST, SECOND)]
    assert best_response_payoff(KuhnTree(), uniform[1], 0) == pytest.approx(0.5)
    assert best_response_payoff(KuhnTree(), uniform[0], 1) == pytest.approx(5 / 12)
    assert exploitability(KuhnTree(), uniform) == pytest.approx(11 / 24)
    always = [strategy(**dict.fromkeys(information_sets, 1)) for information_sets in (FIRST, SECOND)]
    # Fold the jack, call with the queen or fold it, which is equal, and call with the king.
    assert best_response_payoff(KuhnTree(), always[0], 1) == pytest.approx((-1 + 0 + 2) / 3)


def test_in_kuhn_poker_with_cards_in_the_moves_uniform_play_is_as_exploitable():
    game = KuhnTree(say_card=True)
    uniform = {where: dict.fromkeys(moves, 0.5) for seat in legal_actions(game) for where, moves in seat.items()}
    assert {move.split()[0] for moves in uniform.values() for move in moves} == {"jack", "queen", "king"}
    assert exploitability(game, (uniform, uniform)) == pytest.approx(11 / 24)


@given(st.lists(st.floats(0, 1), min_size=12, max_size=12))
def test_a_best_response_is_the_best_of_all_pure_strategies(chances):
    mixed = strategy(**dict(zip((*FIRST, *SECOND), chances, strict=True)))
    actual_best_response_payoff = best_response_payoff(KuhnTree(), mixed, 1)
    pure = [strategy(**dict(zip(SECOND, bets, strict=True))) for bets in product((0, 1), repeat=6)]
    assert actual_best_response_payoff == pytest.approx(
        max(expected_payoff(KuhnTree(), (mixed, pure_strategy), 1) for pure_strategy in pure), abs=1e-9
    )
    assert exploitability(KuhnTree(), (mixed, mixed)) >= -1e-12


def test_the_scripted_player_of_the_environment_is_an_equilibrium():
    scripted = nash_strategy(NASH)
    assert exploitability(KuhnTree(), (scripted, scripted)) == pytest.approx(0, abs=1e-12)


@given(st.lists(st.floats(0, 1), min_size=36, max_size=36))
def test_an_average_strategy_gets_the_mean_payoff_against_every_opponent(chances):
    first_strategy, two, third_strategy = (
        strategy(**dict(zip((*FIRST, *SECOND), chances[at : at + 12], strict=True))) for at in (0, 12, 24)
    )
    first, second = average_strategies(KuhnTree(), [(first_strategy, first_strategy), (two, two)])
    for mixed, seats in ((first, lambda mine: (mine, third_strategy)), (second, lambda mine: (third_strategy, mine))):
        mean = sum(expected_payoff(KuhnTree(), seats(mine), 0) for mine in (first_strategy, two)) / 2
        assert expected_payoff(KuhnTree(), seats(mixed), 0) == pytest.approx(mean, abs=1e-9)


def test_an_average_weights_strategies_by_the_probability_that_they_come_there():
    always, never = (strategy(**dict.fromkeys((*FIRST, *SECOND), bets)) for bets in (1, 0))
    first, _ = average_strategies(KuhnTree(), [(always, never), (never, always)])
    moves = {text: chances for text, chances in first.items() if "card: jack" in text}
    after_check = next(chances for text, chances in moves.items() if "check bet" in text)
    assert after_check == {"fold": 1.0, "call": 0.0}, "only the second checks"
    assert {"check": 0.5, "bet": 0.5} in moves.values()


def test_legal_actions_of_all_information_sets():
    first, second = legal_actions(KuhnTree())
    assert first | second == {where: tuple(moves) for where, moves in nash_strategy(NASH).items()}
    assert not first.keys() & second.keys()
    assert legal_actions(Pennies()) == ({0: ("h", "t")}, {1: ("h", "t")})


def test_matching_pennies():
    even, heads = {"h": 0.5, "t": 0.5}, {"h": 1.0}
    assert exploitability(Pennies(), ({0: even}, {1: even})) == 0
    assert exploitability(Pennies(), ({0: heads}, {1: heads})) == 1.0
    assert best_response_payoff(Pennies(), {0: heads}, 1) == 1.0


@pytest.mark.parametrize("strategy", [{}, {0: {"h": 0.5}}, {0: {"h": 0.5, "x": 0.5}}, {0: {"h": 1.5, "t": -0.5}}])
def test_a_strategy_that_is_none(strategy):
    with pytest.raises(ValueError, match="the legal actions are h, t"):
        best_response_payoff(Pennies(), strategy, 1)
