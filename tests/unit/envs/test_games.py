"""Games of two players: contracts, rules, and exact strength of the scripted players."""

from fractions import Fraction
from functools import cache
from itertools import permutations

import numpy as np
import pytest
from agentrl_envs.kuhn_poker import KuhnPokerEnv
from agentrl_envs.kuhn_poker.players import NASH
from agentrl_envs.kuhn_poker.rules import CARDS, legal_moves
from agentrl_envs.negotiation import NegotiationEnv
from agentrl_envs.tictactoe import TicTacToeEnv, lines_text
from agentrl_envs.tictactoe.board import EMPTY, best_cells, free_cells, opponent_mark, put, winner

from agentrl import Message
from agentrl.testing import check_multi_agent_env

GAMES = (TicTacToeEnv, KuhnPokerEnv, NegotiationEnv)


def play(env, players, seed=0):
    """Play a game of scripted players; return all messages read, the rewards and the last infos."""
    views, infos = env.reset(seed=seed)
    made = {agent: env.players[name](np.random.default_rng([seed, seat]))
            for seat, (agent, name) in enumerate(zip(env.agents, players, strict=True))}  # fmt: skip
    read, totals = [], dict.fromkeys(env.agents, 0.0)
    while env.agents:
        (agent,) = env.acting
        agent_messages = views[agent]["messages"]
        messages = getattr(agent_messages, "messages", agent_messages)
        read.append(messages[-1].content)
        move = made[agent].act(messages, infos[agent]["legal_moves"])
        views, rewards, _, _, infos = env.step({agent: Message("assistant", move)})
        for one, reward in rewards.items():
            totals[one] += reward
    return read, totals, infos


@pytest.mark.parametrize("game", GAMES)
def test_contract(game):
    check_multi_agent_env(game)


@pytest.mark.parametrize("game", GAMES)
def test_an_illegal_move_costs_the_player_alone(game):
    env = game(illegal_cost=0.25)
    env.reset(seed=1)
    (agent,) = env.acting
    _, rewards, terminations, _, infos = env.step({agent: Message("assistant", "I pass")})
    assert rewards == {agent: game.worst_payoff - 0.25, env.next_to_move(agent): 0.0}
    assert all(terminations.values())
    assert (infos[agent]["metrics"]["illegal"], infos[env.next_to_move(agent)]["metrics"]["illegal"]) == (1.0, 0.0)
    assert env.forfeit(agent) == {agent: rewards[agent]}


@pytest.mark.parametrize("text", ["5", " [5]. ", "<think>1, 2 or 9?</think>\n5"])
def test_a_move_is_what_follows_the_reasoning(text):
    env = TicTacToeEnv()
    env.reset(seed=0)
    env.step({"player_0": Message("assistant", text)})
    assert env.board == "....X...."


def test_minimax_has_its_exact_results_against_random():
    @cache
    def wins(board, mark, minimax):
        """Probability that the perfect player wins, with ``mark`` to move."""
        if winner(board):
            return Fraction(winner(board) == minimax)
        cells = best_cells(board, mark) if mark == minimax else free_cells(board)
        return sum((wins(put(board, cell, mark), opponent_mark(mark), minimax) for cell in cells), Fraction()) / (
            len(cells) or 1
        )

    assert round(float(wins(EMPTY, "X", "X")), 3) == 0.968
    assert round(float(wins(EMPTY, "X", "O")), 3) == 0.777
    read, totals, infos = play(TicTacToeEnv(), ("minimax", "minimax"))
    assert totals == {"player_0": 0.0, "player_1": 0.0}
    assert infos["player_0"]["metrics"] == {"win": 0.0, "draw": 1.0, "loss": 0.0, "illegal": 0.0, "moves": 5.0}
    assert read[0] == "Tic-tac-toe. You are X. Answer with the number of a free cell.\n1 2 3\n4 5 6\n7 8 9"


def test_nash_has_the_value_of_the_game():
    def value(cards, history):
        seat = len(history) % 2
        env = KuhnPokerEnv()
        env.reset(seed=0)
        env.cards = dict(zip(env.agents, cards, strict=True))
        env.history = list(history)
        bets = NASH[cards[seat], " ".join(history) or "none"]
        total = 0.0
        for move, chance in zip(legal_moves(history), (1 - bets, bets), strict=True):
            env.history = list(history)
            payoffs = env.play(env.agents[seat], move)
            total += chance * (payoffs["player_0"] if payoffs is not None else value(cards, (*history, move)))
        return total

    deals = list(permutations(CARDS, 2))
    assert sum(value(cards, ()) for cards in deals) / len(deals) == pytest.approx(-1 / 18)


def test_with_say_card_a_move_begins_with_the_card_and_the_other_player_does_not_read_it():
    env = KuhnPokerEnv(say_card=True)
    env.reset(seed=0)
    env.cards = {"player_0": "Q", "player_1": "K"}
    assert env.legal_moves() == ["queen check", "queen bet"]
    views = env.step({"player_0": Message("assistant", "queen bet")})[0]
    [read] = views["player_1"]["messages"]
    assert read.content == "Kuhn poker. Your card: king. Moves: bet. Answer king fold or king call."
    assert env.step({"player_1": Message("assistant", "king call")})[1] == {"player_0": -2.0, "player_1": 2.0}
    assert sum(play(KuhnPokerEnv(say_card=True), ("nash", "nash"), 3)[1].values()) == 0


def test_scripted_players_of_kuhn_poker_and_negotiation_make_legal_moves():
    for seed in range(30):
        assert sum(play(KuhnPokerEnv(), ("nash", "nash"), seed)[1].values()) == 0
        for players in (("greedy", "greedy"), ("greedy", "random")):
            _, totals, infos = play(NegotiationEnv(), players, seed)
            assert min(totals.values()) >= 0
            assert infos["player_0"]["metrics"]["illegal"] == infos["player_1"]["metrics"]["illegal"] == 0.0


def test_a_deal_divides_the_items_by_private_values():
    env = NegotiationEnv()
    env.reset(seed=3)
    counts = env.counts
    assert {sum(c * v for c, v in zip(counts, values, strict=True)) for values in env.values.values()} == {10}
    offer = f"I like the first.\nkeep {counts[0]} 0 0"
    views, *_ = env.step({"player_0": Message("assistant", offer)})
    text = views["player_1"]["messages"][0].content
    assert f'The other player says "I like the first.". The other player keeps {counts[0]} 0 0.' in text
    assert text.startswith(f"Divide {counts[0]} books worth {env.values['player_1'][0]} each")
    _, rewards, _, _, infos = env.step({"player_1": Message("assistant", "accept")})
    assert rewards["player_0"] == counts[0] * env.values["player_0"][0] / 10
    assert rewards["player_1"] == 1 - counts[0] * env.values["player_1"][0] / 10
    assert infos["player_0"]["metrics"]["deal"] == 1.0


def test_without_a_deal_the_last_offer_ends_the_negotiation():
    env = NegotiationEnv(max_offers=1)
    env.reset(seed=3)
    _, rewards, terminations, *_ = env.step({"player_0": Message("assistant", "keep 0 0 0")})
    assert set(rewards.values()) == {0.0}
    assert all(terminations.values())


def test_a_row_for_each_free_cell_follows_the_board() -> None:
    text = lines_text("X.O.X....", "O")
    rows = ["-_+", "_-_", "___", "+--_2", "-_-_4", "-_+_6", "+-__-_7", "__-_8", "__+_--9"]
    assert text.splitlines()[1:] == rows


def test_with_show_lines_a_move_is_the_row_of_its_cell() -> None:
    env = TicTacToeEnv(show_lines=True)
    env.reset(seed=0)
    for player, move in (("player_0", "______1"), ("player_1", "____-_3"), ("player_0", "+-__2")):
        assert move in env.legal_moves()
        env.step({player: Message("assistant", move)})
    views, _, _, _, infos = env.step({"player_1": Message("assistant", "__-_8")})
    [read] = views["player_0"]["messages"].messages
    rows = ["__+_4", "+-__-_+_5", "__-_6", "-_-_+_7", "-_-_+_9"]
    assert read.content.splitlines()[1:] == ["++-", "___", "_-_", *rows]
    assert infos["player_0"]["legal_moves"] == rows
    assert env.step({"player_0": Message("assistant", "4")})[1]["player_0"] == -1.5


def test_the_perfect_player_reads_the_lines_too() -> None:
    for seed in range(20):
        assert set(play(TicTacToeEnv(show_lines=True), ("minimax", "minimax"), seed)[1].values()) == {0.0}
