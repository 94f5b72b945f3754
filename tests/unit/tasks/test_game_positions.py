"""Positions of games as single turns, and random legal play as their demonstration."""

from collections import Counter

import numpy as np
import pytest
from agentrl_tasks.game_positions import GamePositions

from agentrl import ConfigError
from agentrl.core.errors import UnknownNameError
from agentrl.core.registry import make_any_env


@pytest.mark.parametrize("game", ["kuhn_poker", "tictactoe"])
def test_every_demonstration_is_a_legal_move_of_its_position(game):
    taskset, env = GamePositions(game), make_any_env(game)
    tasks = taskset.split("train")[:200]
    texts = {task.prompt[-1].content for task in tasks}
    assert len(texts) > 10
    for task in tasks:
        move = taskset.demonstrator(task, np.random.default_rng(0)).act(task.prompt)
        assert move in task.metadata["legal_moves"]
        assert env.read_move(move) == move
    assert tasks[7] == GamePositions(game).split("train")[7]
    assert tasks[7].prompt != GamePositions(game, seed=1).split("train")[7].prompt or game == "kuhn_poker"


def test_all_information_sets_of_kuhn_poker_occur_and_moves_are_random():
    taskset = GamePositions("kuhn_poker")
    tasks = taskset.split("eval")
    assert len({task.prompt[-1].content for task in tasks}) == 12
    moves = Counter(taskset.demonstrator(task, np.random.default_rng(i)).act(()) for i, task in enumerate(tasks))
    assert set(moves) == {"check", "bet", "fold", "call"}
    assert moves["bet"] == pytest.approx(moves["check"], rel=0.35)


def test_a_named_player_demonstrates_all_turns_of_its_conversations():
    taskset = GamePositions("solver_critic", player="careless")
    tasks = taskset.split("train")[:60]
    roles = Counter(tuple(message.role for message in task.prompt) for task in tasks)
    assert set(roles) == {("user",), ("user", "assistant", "user")}
    for task in tasks:
        if len(task.prompt) == 3:
            repeats = taskset.demonstrator(task, np.random.default_rng(0)).act(()) == task.prompt[1].content
            assert repeats == task.prompt[2].content.startswith("right")


def test_positions_are_of_the_tasks_of_their_split():
    taskset = GamePositions("proposer_solver", player="careless", options={"solvers": 1})
    questions = {
        split: {task.question.split(" ")[0] for task in taskset.split(split)[:60]} for split in ("train", "eval")
    }
    assert "Set" in questions["train"]
    assert "Set" not in questions["eval"]


def test_an_environment_of_one_agent_and_an_unknown_player_are_refused():
    with pytest.raises(ConfigError, match="single_turn has one agent"):
        GamePositions("single_turn")
    with pytest.raises(UnknownNameError, match=r"tasks\.options\.player"):
        GamePositions("solver_critic", player="carless")
