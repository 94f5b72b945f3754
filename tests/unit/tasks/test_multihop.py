"""The generated world: equal everywhere, held-out words foreign to training, answers that score."""

import asyncio
import pickle
import re
import subprocess
import sys

import numpy as np
import pytest
from agentrl_tasks.multihop import Multihop
from agentrl_tasks.multihop.demonstrator import FAULTS
from agentrl_tasks.multihop.world import RELATIONS, World

from agentrl.core.errors import ConfigError, UnknownNameError
from agentrl.core.registry import make_env, make_tasks, tool_service
from agentrl.core.tool import ToolClient
from agentrl.core.types import Message, ToolCalls, ToolResults


def words(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower()))


@pytest.fixture(scope="module")
def search() -> ToolClient:
    """A client of the search tool with the corpora of the taskset, which no fault changes."""
    return tool_service("search").local_client(Multihop().corpora(), {})


def play(tasks: Multihop, task, search: ToolClient, seed: int = 0) -> tuple[float, dict[str, float], list[str]]:
    """Let the task's expert act in the real environment; return reward, metrics and the expert's turns."""
    env = make_env("search_r1", {"topk": 2})
    expert = tasks.demonstrator(task, np.random.default_rng(seed))
    observation, _ = env.reset(seed=seed, options={"task": task})
    turns: list[str] = []
    while True:
        turns.append(expert.act(observation))
        observation, reward, terminated, truncated, info = env.step(Message("assistant", turns[-1]))
        while isinstance(observation, ToolCalls):
            results = ToolResults(tuple(asyncio.run(search.call(call, episode_id="e")) for call in observation.calls))
            observation, reward, terminated, truncated, info = env.step(results)
        if terminated or truncated:
            return reward, info["metrics"], turns


@pytest.mark.parametrize("seed", [0, 1, 12345])
def test_no_held_out_word_is_seen_in_training(seed: int) -> None:
    tasks = Multihop(seed=seed)
    names = set().union(*(words(name) for name in tasks.held_out_world.kinds))
    seen = set().union(*(words(row["contents"]) for row in tasks.corpora()["train"]))
    for task in [*tasks.split("train")[:600], *tasks.split("validation")]:
        seen |= words(task.question) | words(task.answer[0])
    assert len(names) > 500
    assert not names & seen


def test_equal_options_give_equal_tasks_in_another_process() -> None:
    code = (
        "from agentrl_tasks.multihop import Multihop; t = Multihop(seed=3);"
        "print([x.question for s in ('train', 'eval') for x in t.split(s)[:9]], t.corpora()['train'][17])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    tasks = Multihop(seed=3)
    questions_here = [x.question for s in ("train", "eval") for x in tasks.split(s)[:9]]
    assert run.stdout.strip() == f"{questions_here} {tasks.corpora()['train'][17]}"


def test_seeds_change_the_training_world_only() -> None:
    first_world, two = Multihop(seed=1), Multihop(seed=2)
    assert first_world.split("train")[0] != two.split("train")[0]
    assert list(first_world.split("eval")) == list(two.split("eval"))
    assert Multihop(eval_seed=1).split("eval")[0] != first_world.split("eval")[0]


def test_splits() -> None:
    tasks = make_tasks("multihop", {"train_size": 10**9, "eval_size": 7})
    train, evals = tasks.split("train"), tasks.split("eval")
    assert (len(train), len(evals)) == (10**9, 7)
    assert [task.metadata["hops"] for task in evals] == [1, 2, 3, 1, 2, 3, 1]
    assert train[10**9 - 1] == train[-1]
    assert train[-1].id == "multihop/train/999999999"
    assert [task.id for task in train[2:4]] == ["multihop/train/2", "multihop/train/3"]
    assert {task.metadata["corpus"] for task in evals} == {"heldout"}
    with pytest.raises(IndexError):
        evals[7]
    with pytest.raises(UnknownNameError, match="validation"):
        tasks.split("test")
    assert pickle.loads(pickle.dumps(train[5])) == train[5]


def test_answers_follow_from_the_facts() -> None:
    tasks = Multihop()
    for task in tasks.split("eval"):
        path, relations = task.metadata["path"], task.metadata["relations"]
        for name, relation, value in zip(path[:-1], relations, path[1:], strict=True):
            assert tasks.held_out_world.facts[name, relation] == value
            assert tasks.held_out_world.kinds[value] == RELATIONS[relation].object
        assert task.answer == [path[-1]]
        assert len(set(path)) == len(path) == task.metadata["hops"] + 1
        assert task.question.endswith(f"of {path[0]}?")


def test_gold_answers_score_1() -> None:
    env = make_env("search_r1")
    for task in Multihop().split("eval")[:60]:
        env.reset(options={"task": task})
        _, reward, terminated, _, _ = env.step(Message("assistant", f"<answer> {task.answer[0]} </answer>"))
        assert terminated
        assert reward == 1.0


def test_documents_say_every_fact_and_only_under_their_own_title() -> None:
    world = World(5, held_out=False, scale=0.2)
    assert [d.title for d in world.documents] == list(world.kinds)
    text = {d.title: d.text for d in world.documents}
    for (name, _), value in world.facts.items():
        assert text[name].startswith(name)
        assert value in text[name]


def test_shuffled_titles_leave_no_document_its_own_facts() -> None:
    world = World(5, held_out=True)
    texts = {d.title: d.text for d in world.shuffled_documents()}
    assert set(texts) == set(world.kinds)
    right = np.mean([value in texts[name] for (name, _), value in world.facts.items()])
    assert right < 0.1, "what is left are chance hits among a world's few regions"
    tasks = Multihop(shuffle_titles=True)
    assert list(tasks.split("eval")) == list(Multihop().split("eval"))
    assert tasks.corpora()["heldout"] != Multihop().corpora()["heldout"]


def test_clean_experts_are_always_right(search: ToolClient) -> None:
    tasks = Multihop()
    for task in tasks.split("eval")[:45]:
        reward, metrics, _ = play(tasks, task, search)
        assert reward == 1.0, task.question
        assert metrics["searches"] == task.metadata["hops"]
        assert metrics["valid_format"] == 1.0


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_what_they_say(fault: str, search: ToolClient) -> None:
    tasks = Multihop(faults={fault: 1.0})
    played = [(task, *play(tasks, task, search, seed)) for seed, task in enumerate(tasks.split("eval")[:24])]
    for task, reward, metrics, turns in played:
        hops = task.metadata["hops"]
        assert turns[-1].endswith("</answer>")
        assert metrics["invalid_actions"] == (fault == "format")
        if fault in ("early", "format"):
            assert (reward, metrics["searches"] < hops) == (0.0, True)
        elif fault == "query":
            assert reward == 0.0
            assert 1 <= metrics["searches"] <= hops, "one search of half a name, and at least one hop is missing"
        elif fault == "walk":
            assert metrics["searches"] <= hops
            assert reward == 1.0 or hops > 1
        elif fault == "document":
            assert metrics["searches"] == hops
    assert np.mean([reward for _, reward, *_ in played]) < 0.5


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"faults": {"erly": 0.5}}, "early"),
        ({"faults": {"early": 0.7, "walk": 0.7}}, "tasks.options.faults"),
        ({"hops": [4]}, "tasks.options.hops"),
        ({"scale": 0}, "scale"),
        ({"size": 3}, "train_size"),
    ],
)
def test_mistakes_name_the_option(options: dict, message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        make_tasks("multihop", options)
