"""Games of TextArena: the contract, and random numbers that are the episode's own."""

import random
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest

from agentrl import ConfigError, Message
from agentrl.adapters.textarena import TextArenaEnv
from agentrl.core.errors import UnknownNameError
from agentrl.testing import check_multi_agent_env


def play(seed, game="KuhnPoker-v0"):
    """Play a game of random players; return all that was read, said and received."""
    env = TextArenaEnv(game)
    views, _ = env.reset(seed=seed)
    players = {
        agent: env.players["random"](np.random.default_rng([seed, seat])) for seat, agent in enumerate(env.agents)
    }
    texts = []
    while env.agents:
        (agent,) = env.acting
        messages = views[agent]["messages"]
        move = players[agent].act(messages, ())
        views, rewards, *_ = env.step({agent: Message("assistant", move)})
        texts.append((messages, move, tuple(rewards.values())))
    return texts


@pytest.mark.parametrize("game", ["KuhnPoker-v0", "TicTacToe-v0", "ConnectFour-v0"])
def test_contract(game):
    check_multi_agent_env(partial(TextArenaEnv, game))


@pytest.mark.parametrize("count", [200, pytest.param(1000, marks=pytest.mark.long)])
def test_concurrent_episodes_replay(count):
    state_before = random.getstate(), np.random.get_state(legacy=True)[1].tobytes()
    with ThreadPoolExecutor(32) as pool:
        together = list(pool.map(play, range(count)))
    assert (random.getstate(), np.random.get_state(legacy=True)[1].tobytes()) == state_before
    for seed in range(0, count, 20):
        play(seed + 1, "TicTacToe-v0")  # another game in between changes nothing
        assert play(seed) == together[seed]
    assert len({str(game) for game in together}) > 0.3 * count


def test_a_player_reads_what_is_new_to_it():
    env = TextArenaEnv("TicTacToe-v0")
    env.reset(seed=0)
    first = env.acting[0]
    views, *_ = env.step({first: Message("assistant", "<think>the middle</think>4")})
    (second,) = env.acting
    text = views[second]["messages"][0].content
    assert "[4]" in text
    assert "Available Moves" in text
    views, *_ = env.step({second: Message("assistant", "[0]")})
    again = views[first]["messages"][0].content
    assert "You are Player" not in again
    assert "'[4]'" not in again


def test_a_second_illegal_move_loses():
    env = TextArenaEnv("TicTacToe-v0", illegal_cost=0.5)
    env.reset(seed=0)
    (agent,) = env.acting
    views, rewards, *_ = env.step({agent: Message("assistant", "hello")})
    assert env.acting == (agent,)
    assert "invalid move" in views[agent]["messages"][0].content
    _, rewards, _, _, infos = env.step({agent: Message("assistant", "hello")})
    assert rewards[agent] == -1.5 == env.forfeit(agent)[agent]
    assert infos[agent]["metrics"] == {"win": 0.0, "loss": 1.0, "illegal": 1.0}


def test_options_that_do_not_fit_are_refused():
    with pytest.raises(UnknownNameError, match=r"Did you mean 'KuhnPoker-v0'\?"):
        TextArenaEnv("KuhnPoker")
    with pytest.raises(ConfigError, match=r"env\.options\.players=0"):
        TextArenaEnv(players=0)
