"""Ratings recover known strengths, and are the same after a checkpoint."""

import json

import numpy as np
import pytest

from agentrl.self_play.games import POLICY, Game
from agentrl.self_play.ratings import START_SIGMA, Rating, Ratings

STRENGTHS = {"step_000000": -1.5, "step_000020": -0.5, "step_000040": 0.2, "step_000060": 0.9, "fixed:perfect": 1.8}


def games(count, seed, strengths=STRENGTHS):
    """Games of random pairs; the first wins with the probability of Bradley and Terry, and a fifth are draws."""
    rng = np.random.default_rng(seed)
    games = []
    for number in range(count):
        first, second = rng.permutation(list(strengths))[:2].tolist()
        wins = rng.random() < 1 / (1 + np.exp(strengths[second] - strengths[first]))
        rewards = (0.0, 0.0) if rng.random() < 0.2 else (1.0, -1.0) if wins else (-1.0, 1.0)
        games.append(Game(f"{number:05d}", (first, second), rewards))
    return games


@pytest.mark.parametrize("seed", range(3))
def test_ratings_recover_the_order_of_known_strengths(seed):
    ratings = Ratings()
    ratings.update(games(800, seed))
    assert ratings.ranking() == sorted(STRENGTHS, key=STRENGTHS.get, reverse=True)
    assert all(rating.sigma < START_SIGMA / 3 for rating in ratings.table.values())
    assert all(rating.low < rating.mu for rating in ratings.table.values())


def test_the_order_in_which_games_end_changes_nothing():
    played_games = games(60, 1)
    first, second = Ratings(), Ratings()
    first.update(played_games)
    second.update(np.random.default_rng(0).permutation(np.array(played_games, object)).tolist())
    assert first == second


def test_more_games_are_less_uncertainty_and_a_changed_player_is_more_uncertain():
    ratings = Ratings()
    ratings.update(games(20, 0))
    state_before = ratings.rating("step_000040").sigma
    ratings.update(games(20, 1))
    rating_after = ratings.rating("step_000040")
    assert rating_after.sigma < state_before
    ratings.update([], changing={"step_000040": 1.0})
    assert ratings.rating("step_000040") == Rating(rating_after.mu, (rating_after.sigma**2 + 1) ** 0.5)
    ratings.update([], changing={"step_000040": 100.0})
    assert ratings.rating("step_000040").sigma == START_SIGMA, "never more than of an unknown player"


def test_mirror_games_say_nothing_and_a_copy_has_the_rating():
    ratings = Ratings()
    ratings.update([Game("a", (POLICY, POLICY), (1.0, -1.0))])
    assert ratings.table == {}
    ratings.update([Game("a", (POLICY, "fixed:random"), (1.0, -1.0))])
    ratings.copy(POLICY, "step_000020")
    assert ratings.rating("step_000020") == ratings.rating(POLICY)
    assert ratings.rating(POLICY).mu > Rating().mu > ratings.rating("fixed:random").mu


def test_a_checkpoint_has_the_same_ratings():
    ratings = Ratings()
    ratings.update(games(50, 3))
    assert Ratings.from_state(json.loads(json.dumps(ratings.state()))) == ratings


@pytest.mark.parametrize("players", [3, 4, 5])
@pytest.mark.parametrize("opponents", ["one", "different"])
def test_a_player_that_always_wins_against_several_seats_is_rated_higher(players, opponents):
    others = ["step_000000"] * (players - 1) if opponents == "one" else [f"step_{n:06d}" for n in range(players - 1)]
    ratings = Ratings()
    ratings.update(
        Game(f"{number:03d}", tuple(seats := np.roll([POLICY, *others], number).tolist()), scores(seats))
        for number in range(100)
    )
    policy = ratings.rating(POLICY)
    assert policy.low > Rating().mu
    assert policy.sigma < START_SIGMA
    assert all(ratings.rating(player).mu < Rating().mu - 3 for player in others)


def scores(seats):
    return tuple(float(player == POLICY) for player in seats)


@pytest.mark.parametrize("winners", [1, 2])
def test_equal_players_stay_equal_when_one_has_most_of_the_seats(winners):
    """Of three seats one or two win, at random: the policy, which has one seat, wins a share of its games as each seat does."""
    rng = np.random.default_rng(0)
    found = []
    for number in range(600):
        rewards = np.zeros(3)
        rewards[rng.permutation(3)[:winners]] = 1.0
        found.append(Game(f"{number:03d}", (POLICY, "step_000000", "step_000000"), tuple(rewards.tolist())))
    ratings = Ratings()
    ratings.update(found)
    assert abs(ratings.rating(POLICY).mu - ratings.rating("step_000000").mu) < 2


def test_the_seats_of_a_player_do_not_matter():
    first, second = Ratings(), Ratings()
    first.update([Game("a", (POLICY, "step_000000", "step_000000"), (1.0, 0.5, 0.0))])
    second.update([Game("a", ("step_000000", POLICY, "step_000000"), (0.0, 1.0, 0.5))])
    assert first.table.keys() == second.table.keys()
    for player, rating in first.table.items():
        assert rating == pytest.approx(second.rating(player))


def test_two_players_have_the_ratings_of_openskill():
    from openskill.models import PlackettLuce

    ratings = Ratings()
    ratings.update([Game("a", (POLICY, "step_000000"), (1.0, 0.0))])
    model = PlackettLuce(tau=0.0)
    expected = model.rate([[model.create_rating(list(Rating()))] for _ in range(2)], scores=[1.0, 0.0])
    assert [ratings.rating(name) for name in (POLICY, "step_000000")] == [(one.mu, one.sigma) for [one] in expected]
