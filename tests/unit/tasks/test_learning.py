"""The small tasks of ``agentrl bench learning``: their answers, their experts, and what a policy's answers score."""

from functools import partial

import numpy as np
import pytest
from agentrl_envs.alphabet_sort import AlphabetSortEnv
from agentrl_tasks.learning import AlphabetSort, Arithmetic, GuessPositions, OwnAnswers, ReverseText
from agentrl_tasks.learning.guesses import NumberGuesser, WordGuesser, basic_words, give_feedback
from agentrl_tasks.learning.make_policy import SENTENCES
from agentrl_tasks.learning.rewards import reverse_text

from agentrl import ConfigError, Message, Rollout, Sample, StopReason
from agentrl.adapters.textarena import TextArenaEnv
from agentrl.core.errors import TaskError, UnknownNameError
from agentrl.core.types import FinishReason, Turn
from agentrl.testing import check_env

NUMBERS = {"game": "GuessTheNumber-v0", "game_options": {"max_number": 50, "max_turns": 6}}


def say(taskset, task, seed=0, observation=()):
    return taskset.demonstrator(task, np.random.default_rng(seed)).act(observation or task.prompt)


def score(text, label):
    rollout = Rollout("t", "r", [], 0.0, StopReason.TERMINATED, turns=[Turn(text, "", FinishReason.STOP)], label=label)
    return reverse_text(Sample.from_rollout(rollout))


def play(env, task, answers):
    """Play the answers; return the messages of the user and the last step."""
    env.reset(seed=0, options={"task": task})
    read = []
    for answer in answers:
        messages, reward, ended, _, info = env.step(Message("assistant", answer))
        read += [message.content for message in messages]
    assert ended
    return read, reward, info["metrics"]


def guess(env, player, seed):
    """Play a game; return its reward and metrics."""
    views, _ = env.reset(seed=seed)
    while env.agents:
        views, rewards, _, _, infos = env.step(
            {"player_0": Message("assistant", player.act(views["player_0"]["messages"], ()))}
        )
    return rewards["player_0"], infos["player_0"]["metrics"]


@pytest.mark.parametrize("taskset", [ReverseText, AlphabetSort, Arithmetic])
def test_equal_options_give_equal_tasks_and_the_splits_differ(taskset):
    train, held_out = taskset(seed=3).split("train"), taskset(seed=3).split("eval")
    assert [*train[:20]] == [*taskset(seed=3).split("train")[:20]]
    assert [*held_out[:20]] == [*taskset(seed=4).split("eval")[:20]], "the seed is for training"
    assert [task.prompt for task in train[:20]] != [task.prompt for task in taskset(seed=4).split("train")[:20]]
    assert [task.prompt for task in train[:20]] != [task.prompt for task in held_out[:20]]
    with pytest.raises(UnknownNameError, match="split"):
        taskset().split("test")
    with pytest.raises(UnknownNameError, match="fault"):
        taskset(faults={"sleep": 0.5})
    with pytest.raises(ConfigError, match=r"tasks\.options\.eval_size=0"):
        taskset(eval_size=0)


def test_a_text_backwards_and_the_faults_of_its_expert():
    task = ReverseText().split("train")[0]
    text = task.prompt[0].content.split("\n")[1]
    assert task.answer == text[::-1] == say(ReverseText(), task)
    answers = {fault: say(ReverseText(faults={fault: 1.0}), task) for fault in ("drop", "swap", "words", "copy")}
    assert answers["copy"] == text
    assert answers["words"].split() == text.split()[::-1]
    assert len(answers["drop"]) == len(text) - 1
    assert sorted(answers["swap"]) == sorted(text)
    assert score(task.answer, task.answer) == {"score": 1.0, "exact": 1.0}
    for answer in answers.values():
        assert 0 < score(answer, task.answer)["score"] < 1
        assert score(answer, task.answer)["exact"] == 0
    assert score("", task.answer) == {"score": 0.0, "exact": 0.0}
    assert score("x" * 100_000, task.answer)["score"] == 0


def test_a_list_is_scored_in_every_turn():
    check_env(AlphabetSortEnv)
    taskset = AlphabetSort(turns=(3, 3), names=(2, 2))
    task = taskset.split("eval")[0]
    read, reward, metrics = play(AlphabetSortEnv(), task, task.answer)
    assert read == task.metadata["user_turns"]
    assert (reward, metrics) == (1.0, {"exact": 1.0})
    for answer in task.answer[1:]:
        assert answer.count("(new)") == 2
    key = ("first", "last").index(task.prompt[0].content.split()[4])
    ranked = [line.split()[key] for line in task.answer[2].split("\n")]
    assert ranked == sorted(ranked)
    assert len(ranked) == 6
    worse = play(AlphabetSortEnv(), task, [task.answer[0], task.answer[0], task.answer[2]])
    assert 2 / 3 < worse[1] < 1
    assert play(AlphabetSortEnv(power=8), task, [task.answer[0], task.answer[0], task.answer[2]])[1] < worse[1]
    assert play(AlphabetSortEnv(), task, ["", "", ""])[1] == 0
    expert = taskset.demonstrator(task, np.random.default_rng(0))
    assert [expert.act(()) for _ in range(3)] == task.answer
    for fault in ("order", "append", "unmarked", "missing"):
        expert = AlphabetSort(faults={fault: 1.0}).demonstrator(task, np.random.default_rng(1))
        assert play(AlphabetSortEnv(), task, [expert.act(()) for _ in range(3)])[1] < 1, fault


def test_lists_that_cannot_be_are_refused():
    with pytest.raises(ConfigError, match="need more than 25 names"):
        AlphabetSort(turns=(1, 9), names=(1, 9))
    with pytest.raises(ConfigError, match=r"env\.options\.power=0"):
        AlphabetSortEnv(power=0)
    task = AlphabetSortEnv.example_task()
    with pytest.raises(TaskError, match="has 2 turns"):
        AlphabetSortEnv().reset(options={"task": type(task)(task.id, task.prompt, "Ada", task.metadata)})


def test_a_calculation_its_expression_and_the_faults_of_its_expert():
    taskset = Arithmetic()
    for task in taskset.split("train")[:50]:
        assert str(eval(task.metadata["expression"])) == task.answer
    call = say(taskset, task)
    assert f'{{"name": "calculate", "arguments": {{"expression": "{task.metadata["expression"]}"}}}}' in call
    assert task.metadata["expression"] not in say(Arithmetic(faults={"copy": 1.0}), task)
    guessed = say(Arithmetic(faults={"guess": 1.0}), task)
    assert len(guessed) == len(task.answer)
    expert = Arithmetic(faults={"read": 1.0}).demonstrator(task, np.random.default_rng(0))
    assert expert.act(task.prompt) == call
    assert expert.act((Message("tool", task.answer),)) != task.answer


def test_answers_of_an_environment_are_demonstrated(tmp_path):
    file = tmp_path / "sums.py"
    file.write_text(
        "from agentrl import Env, Message, Task\n"
        "class Sums(Env):\n"
        "    @classmethod\n"
        "    def configured_tasks(cls, split, seed, options):\n"
        "        return [Task(f'{split}/{n}', (Message('user', f'{n} + {seed} ='),), options['right'] + n) for n in range(5)]\n"
    )
    task = OwnAnswers(f"{file}:Sums", {"right": 100}).split("eval")[3]
    assert (task.id, task.answer) == ("eval/3", 103)
    assert say(OwnAnswers(f"{file}:Sums", {"right": 100}), task) == "103"
    for fault in ("digit", "guess"):
        wrong = say(OwnAnswers(f"{file}:Sums", {"right": 100}, faults={fault: 1.0}), task)
        assert (len(wrong), wrong == "103") == (3, False)
    with pytest.raises(ConfigError, match="has no answer to demonstrate"):
        say(OwnAnswers(f"{file}:Sums"), type(task)("t", task.prompt))


def test_a_player_who_uses_the_hints_finds_each_number():
    env = TextArenaEnv(players=1, **NUMBERS)
    results = {
        skill: [guess(env, NumberGuesser(np.random.default_rng(seed), skill), seed) for seed in range(30)]
        for skill in (0.0, 1.0)
    }
    assert {(reward, metrics["win"]) for reward, metrics in results[1.0]} == {(1.0, 1.0)}
    wins = [metrics["win"] for _, metrics in results[0.0]]
    assert 0 < sum(wins) < 15
    assert all((reward == 1) == metrics["win"] for reward, metrics in results[0.0]), "a part of the way is no win"
    assert all(metrics["illegal"] == 0 for _, metrics in results[0.0])


def test_a_player_who_uses_the_feedback_finds_each_bundled_word():
    env = partial(TextArenaEnv, "Wordle-v0", players=1, word_lists="bundled")()
    results = {
        skill: [guess(env, WordGuesser(np.random.default_rng(seed), skill), seed) for seed in range(8)]
        for skill in (0.0, 1.0)
    }
    assert {reward for reward, _ in results[1.0]} == {1.0}
    assert np.mean([reward for reward, _ in results[0.0]]) < 0.5
    assert len(basic_words()) == 119
    with pytest.raises(ConfigError, match=r"word_lists=nltk: another game of this process has bundled"):
        TextArenaEnv("Wordle-v0", players=1).reset(seed=0)
    assert len(TextArenaEnv(players=1, **NUMBERS).reset(seed=0)[0]) == 1, "a game without words"


@pytest.mark.parametrize(
    ("guessed", "secret", "feedback"),
    [
        ("stone", "stone", "GGGGG"),
        ("apple", "plane", "YYXYG"),
        ("sheep", "peach", "XYYXY"),
        ("mouse", "daisy", "XXXGX"),
    ],
)
def test_feedback_counts_each_letter_once(guessed, secret, feedback):
    assert give_feedback(guessed, secret) == feedback


def test_positions_show_a_guess_in_the_words_of_the_game():
    taskset = GuessPositions("GuessTheNumber-v0", "number", NUMBERS["game_options"], skill=1.0)
    tasks = taskset.split("train")[:20]
    assert max(len(task.prompt) for task in tasks) > 1
    for task in tasks:
        assert task.prompt[0].content.replace("\n", "") in "".join(SENTENCES).replace("\n", ""), "one token a sentence"
        assert say(taskset, task) == task.answer
        assert task.answer[0] + task.answer[-1] == "[]"
    with pytest.raises(ConfigError, match=r"tasks\.options\.skill=2"):
        GuessPositions("GuessTheNumber-v0", "number", skill=2)
    with pytest.raises(UnknownNameError, match="player"):
        GuessPositions("GuessTheNumber-v0", "chess")


def test_options_that_a_game_does_not_take_are_refused():
    with pytest.raises(ConfigError, match=r"env\.options\.game_options=.*most"):
        TextArenaEnv("GuessTheNumber-v0", players=1, game_options={"most": 9}).reset(seed=0)
    with pytest.raises(UnknownNameError, match="word list"):
        TextArenaEnv(word_lists="mine")
