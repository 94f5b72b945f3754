"""Openings of games: positions of random play in training, whole games in evaluation."""

from collections import Counter

import pytest
from agentrl_tasks.game_openings import GameOpenings

from agentrl import ConfigError, Message, Task
from agentrl.core.errors import UnknownNameError
from agentrl.core.registry import make_any_env


@pytest.mark.parametrize("game", ["kuhn_poker", "tictactoe"])
def test_a_game_begins_after_the_moves_of_its_opening(game):
    env = make_any_env(game)
    tasks = GameOpenings(game, longest=6).split("train")[:200]
    for task in tasks:
        moves = task.metadata["opening"]
        assert task.metadata["opening_moves"] == len(moves) <= 6
        _, infos = env.reset(seed=3, options={"task": task})
        (agent,) = env.acting
        assert agent == env.possible_agents[len(moves) % 2]
        assert infos[agent]["legal_moves"]
        by_hand = make_any_env(game)
        by_hand.reset(seed=3)
        for move in moves:
            by_hand.step({by_hand.acting[0]: Message("assistant", move)})
        assert by_hand.state_text(agent) == env.state_text(agent)
    assert tasks[7] == GameOpenings(game, longest=6).split("train")[7]


def test_lengths_are_uniform_and_openings_differ_by_seed():
    tasks = GameOpenings("tictactoe", longest=4).split("train")[:1000]
    lengths = Counter(task.metadata["opening_moves"] for task in tasks)
    assert set(lengths) == set(range(5))
    assert min(lengths.values()) > 150
    assert tasks[:50] != GameOpenings("tictactoe", longest=4, seed=1).split("train")[:50]


def test_evaluations_are_whole_games():
    assert not any(task.metadata["opening"] for task in GameOpenings("tictactoe", longest=6).split("eval")[:50])


@pytest.mark.parametrize("opening", [["1", "1"], ["1", "4", "2", "5", "3"]], ids=["illegal", "ends the game"])
def test_an_impossible_opening_is_refused(opening):
    with pytest.raises(ConfigError, match=f"move '{opening[-1]}' is illegal or ends the game"):
        make_any_env("tictactoe").reset(options={"task": Task("t", (), metadata={"opening": opening})})


def test_wrong_options_are_refused():
    with pytest.raises(ConfigError, match="longest=-1 must not be negative"):
        GameOpenings("tictactoe", longest=-1)
    with pytest.raises(ConfigError, match=r"tasks\.options\.game=solver_critic"):
        GameOpenings("solver_critic", longest=2)
    with pytest.raises(UnknownNameError, match="split of game_openings"):
        GameOpenings("tictactoe", longest=2).split("test")
