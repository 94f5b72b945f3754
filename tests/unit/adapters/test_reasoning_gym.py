"""reasoning-gym: its own scores, seeds, composites, levels of curricula, and answers that are code."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from preloaded import Adopted, Forked, Request, preloaded_process

from agentrl import ConfigError, Message, Task
from agentrl.adapters.reasoning_gym import LevelCurriculum, ReasoningGymEnv, library
from agentrl.adapters.reasoning_gym.env import Score, read_answer, score_answer
from agentrl.adapters.reasoning_gym.library import Entry, LibraryError, makers, scorers
from agentrl.adapters.reasoning_gym.tasks import EVAL_SEEDS, TaskOptions, open_split
from agentrl.core import worker_process
from agentrl.core.errors import UnknownNameError
from agentrl.core.task import task_from_dict, task_to_dict
from agentrl.data.task_sources import EnvTasks, read_split
from agentrl.testing import check_env, play_episode

SAMPLED = (
    "basic_arithmetic", "binary_matrix", "boxnet", "chain_sum", "countdown", "knights_knaves", "n_queens",
    "polynomial_multiplication", "prime_factorization", "shortest_path", "simple_integration", "string_insertion",
)  # fmt: skip
HOSTILE = (
    "", " ", "None", "[", "[[1]]", "x" * 5000, "(" * 300, "<answer>", "\x00", "{}", "nan", "-1e999", "1/0", "\\boxed{1}",
    "лучший", "𝟙", "x.subs(x, 1)", "'a'*9", "lambda: 1",
)  # fmt: skip
"""Answers that no scorer runs for long."""
OWN_SCORES = """
import json, sys
from reasoning_gym.factory import create_dataset

def main():
    out, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        request = json.loads(line)
        dataset = create_dataset(request["dataset"], seed=request["seed"], size=3)
        entry = dataset[1]
        replies = []
        for answer in request["answers"]:
            try:
                replies.append(float(dataset.score_answer(answer, entry)))
            except Exception:
                replies.append(None)
        print(json.dumps({"question": entry["question"], "scores": replies}), file=out, flush=True)
"""


class ForkedWorker(Adopted):
    """A worker as ``subprocess.Popen`` has it: a fork of the process at ``address``."""

    def __init__(self, address: str, module: str, env: Mapping[str, str]) -> None:
        (reading, inputs), (outputs, writing) = os.pipe(), os.pipe()
        files = {0: reading, 1: writing, 2: 2}
        super().__init__(address, Request(f"{module}:main", [], os.getcwd(), env, files))
        os.close(reading)
        os.close(writing)
        self.stdin, self.stdout = os.fdopen(inputs, "wb"), os.fdopen(outputs, "rb")

    def poll(self) -> int | None:
        if self.returncode is None and (status := os.waitpid(self.pid, os.WNOHANG))[0]:
            self.returncode = os.waitstatus_to_exitcode(status[1])
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


class ForkedWorkers:
    """Takes the place of ``subprocess`` where workers are started."""

    PIPE, DEVNULL = subprocess.PIPE, subprocess.DEVNULL

    def __init__(self, address: str) -> None:
        self._address = address

    def Popen(self, command: Sequence[str], *, env: Mapping[str, str], **_: Any) -> ForkedWorker:
        assert command[:2] == [sys.executable, "-m"]
        return ForkedWorker(self._address, command[2], env)


@pytest.fixture(autouse=True, scope="module")
def library_process() -> Iterator[str]:
    """The address of a process that has imported reasoning-gym, which takes two seconds of CPU; workers are its forks.

    ``test_shipped_configuration[learning/reasoning_gym.yaml]`` starts one as users do.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONHASHSEED", "0")
        with preloaded_process("agentrl.adapters.reasoning_gym.worker", "reasoning_gym") as address:
            patch.setattr(worker_process, "subprocess", ForkedWorkers(address))
            yield address
            makers().close()
            scorers().close()


def split(name: str = "train", **options: Any) -> Any:
    return open_split(TaskOptions(**options), name)


def own_scores(address: str, folder: Path, lines: Sequence[str]) -> list[str]:
    """Return the lines that reasoning-gym alone prints for lines of datasets and answers."""
    (folder / "own_scores.py").write_text(OWN_SCORES)
    (folder / "in.jsonl").write_text("\n".join(lines))
    with (folder / "in.jsonl").open() as requests, (folder / "out.jsonl").open("w") as out:
        files = {0: requests.fileno(), 1: out.fileno(), 2: 2}
        env = {"PYTHONHASHSEED": "0", "PATH": "/usr/bin:/bin"}
        assert Forked(Request("own_scores:main", [], str(folder), env, files), address).wait(240) == 0
    return (folder / "out.jsonl").read_text().splitlines()


def score_as_the_library_does(
    address: str, folder: Path, datasets: Sequence[str], answers_each: int
) -> tuple[int, list[str]]:
    """Score gold, wrong, hostile and empty answers by reasoning-gym alone and by ours; return their number and differences."""
    requests: list[tuple[Task, list[str | None]]] = []
    for number, dataset in enumerate(datasets):
        tasks = split(dataset=dataset, size=3)
        gold = tasks[1].answer
        hostile = [HOSTILE[(number * 7 + index) % len(HOSTILE)] for index in range(answers_each - 5)]
        wrong = [gold[::-1], f"{gold} x"] if gold else ["left", "0"]
        requests.append((tasks[1], [gold, None, *wrong, tasks[2].answer, *hostile]))
    lines = [
        json.dumps({"dataset": task.metadata["dataset"], "seed": 0, "answers": answers}) for task, answers in requests
    ]
    count, differences = 0, []
    for (task, answers), line in zip(requests, own_scores(address, folder, lines), strict=True):
        reply = json.loads(line)
        if reply["question"] != task.question:
            differences.append(f"{task.id}: another question")
        for answer, own_score in zip(answers, reply["scores"], strict=True):
            count += 1
            score = score_answer(task, answer)
            if score != (Score(0.0, unreadable=True) if own_score is None else Score(own_score)):
                differences.append(f"{task.id}: {answer!r:.60} has {score}, and by itself {own_score}")
    return count, differences


def test_scores_are_those_of_the_library(library_process: str, tmp_path: Path) -> None:
    count, differences = score_as_the_library_does(library_process, tmp_path, SAMPLED, 10)
    assert (count, differences) == (120, [])


@pytest.mark.long
def test_1000_scores_of_all_datasets_are_those_of_the_library(library_process: str, tmp_path: Path) -> None:
    datasets = makers().call(list[str], "list_datasets")
    count, differences = score_as_the_library_does(library_process, tmp_path, datasets, 12)
    assert len(datasets) == 105
    assert count >= 1000
    assert differences == []


@pytest.mark.long
def test_answers_of_all_datasets_tell_gold_from_random() -> None:
    """Of the tasks of each dataset the own answer has the best score, and a random one a lower one in the mean."""
    for dataset in makers().call(list[str], "list_datasets"):
        tasks = split(dataset=dataset, size=6)
        made = [tasks[index] for index in range(6)]
        assert [task_from_dict(json.loads(json.dumps(task_to_dict(task)))) for task in made] == made
        if made[0].answer is None:
            continue  # the answers are many, and the entry has none
        gold = [score_answer(task, task.answer).value for task in made]
        random = [sum(score_answer(task, text).value for task in made) for text in ("@@ nothing", "")]
        assert gold == [1.0] * 6, dataset
        assert min(random) < 6.0, dataset


@pytest.mark.parametrize(
    "dataset", ["countdown", "simple_integration", "string_insertion", "n_queens", "binary_matrix"]
)
def test_answers_are_not_run(dataset: str, tmp_path: Any) -> None:
    task, file = split(dataset=dataset, size=1)[0], tmp_path / "written"
    for code in (f"open({str(file)!r}, 'w')", f"__import__('os').system('touch {file}')", "S(latex(x))"):
        assert score_answer(task, code).value < 0.1
    assert not file.exists()


def test_an_answer_that_never_ends_has_no_score_and_the_next_one_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "CPU_S", 0.3)
    task = split(dataset="countdown", size=1)[0]
    assert score_answer(task, "9**9**9**9") == Score(0.0, over_limit=True)
    assert score_answer(task, task.answer) == Score(1.0)


def test_a_scorer_that_fails_for_its_own_answer_is_a_failure() -> None:
    task = split(dataset="prime_factorization", size=1)[0]
    entry = task.metadata["entry"].replace(repr(task.answer), "'none'")
    broken = Task("broken", task.prompt, "none", {**task.metadata, "entry": entry})
    with pytest.raises(LibraryError, match="score_answer raised ValueError"):
        score_answer(broken, "2 x 3")
    assert score_answer(task, "text") == Score(0.0, unreadable=True)


def test_contract() -> None:
    assert check_env(ReasoningGymEnv) == ()


def test_an_episode() -> None:
    task = split(dataset="chain_sum", size=1)[0]
    assert [message.role for message in task.prompt] == ["system", "user"]
    right = play_episode(ReasoningGymEnv, task, [f"<think>1</think>It is <answer>{task.answer}</answer>."])
    assert right.reward == 1.0
    assert right.metrics == {"score/chain_sum": 1.0, "no_answer": 0.0, "unreadable": 0.0, "over_limit": 0.0}
    assert play_episode(ReasoningGymEnv, task, [task.answer]).metrics["no_answer"] == 1.0
    assert play_episode(lambda: ReasoningGymEnv(answer="text"), task, [task.answer]).reward == 1.0


@pytest.mark.parametrize(
    ("turn", "form", "answer"),
    [
        ("<answer>1</answer> or <answer> 2\n</answer>", "tags", "2"),
        ("<think><answer>1</answer></think> 2", "tags", None),
        ("<think>1</think> 2 ", "text", "2"),
        ("<answer>1", "tags", None),
        ("", "text", ""),
    ],
)
def test_answers_of_turns(turn: str, form: str, answer: str | None) -> None:
    assert read_answer(turn, form) == answer


def test_splits_have_different_seeds_and_the_same_tasks_each_time() -> None:
    options = {"dataset": "basic_arithmetic", "size": 50, "eval_size": 20, "system_prompt": None}
    train, evaluation = split(**options), split("eval", **options)
    assert (len(train), len(evaluation)) == (50, 20)
    questions = [[task.question for task in tasks] for tasks in (train, evaluation)]
    assert not set(questions[0]) & set(questions[1])
    assert [task.question for task in split(**options)] == questions[0]
    entry = makers().call(
        Entry,
        "make_entry",
        spec=json.dumps(
            {
                "size": 9,
                "seed": 5,
                "datasets": [
                    {"name": "basic_arithmetic", "weight": 1, "config": {"seed": EVAL_SEEDS}, "level": None},
                ],
            }
        ),
        index=3,
    )
    assert entry.question == questions[1][3]


def test_composites_mix_by_weight() -> None:
    datasets = {"chain_sum": {"weight": 3, "config": {"max_terms": 2}}, "basic_arithmetic": {"level": 1}}
    tasks = read_split(EnvTasks(ReasoningGymEnv, 0, {"datasets": datasets, "size": 200}), "train", "tasks.train_split")
    made = list(tasks)
    shares = [task.metadata["dataset"] for task in made].count("chain_sum") / 200
    assert 0.65 < shares < 0.85
    assert all(score_answer(task, task.answer) == Score(1.0) for task in made[:8])
    assert {task.id.split("/")[-2] for task in made} == {"chain_sum", "level-1"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dataset": "chain_sums"}, "chain_sum"),
        ({"datasets": {"nothing": {}}}, "env.options.datasets"),
        ({"dataset": "chain_sum", "config": {"min_terms": 9, "max_terms": 2}}, "reasoning-gym: chain_sum: "),
        ({"dataset": "chain_sum", "config": {"terms": 2}}, "terms"),
        ({"dataset": "chain_sum", "level": 99}, "chain_sum has 11 levels, from 0, and not level 99"),
        (
            {"dataset": "chain_sum", "config": {"seed": 1}},
            r"env\.options\.config\.seed is derived; set env\.options\.seed",
        ),
        ({"dataset": "chain_sum", "datasets": {"chain_sum": {}}}, "leave out one"),
        ({"datasets": {"chain_sum": {"share": 1}}}, r"env\.options\.datasets\.chain_sum="),
        ({"datasets": {"chain_sum": {"weight": 0}}}, r"weight=0 must be above 0"),
        ({"size": 0}, r"env\.options\.size=0"),
        ({"answer": "box"}, r"env\.options\.answer=box"),
        ({"name": "chain_sum"}, r"env\.options: .*'name'"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, UnknownNameError), match=message):
        ReasoningGymEnv.configured_tasks("train", 0, options)


def test_levels_rise_and_fall_with_success_and_go_on_after_a_restart() -> None:
    tasks = split(datasets={"chain_sum": {}, "gsm_symbolic": {}}, size=40)
    source = LevelCurriculum(tasks, 0, groups=2, max_level=2)
    assert source.metrics() == {"data/level/chain_sum": 0.0}, "gsm_symbolic has no curriculum"

    def train(reward: float, count: int) -> None:
        names = [task.id for task in source.get_samples(count) if task.metadata["dataset"] == "chain_sum"]
        source.on_trained({name: [reward, reward] for name in names})

    late = [task.id for task in source.get_samples(8)]
    train(1.0, 12)
    assert source.metrics() == {"data/level/chain_sum": 1.0}
    source.on_trained({name: [0.0] for name in late})
    assert source.metrics() == {"data/level/chain_sum": 1.0}, "results of another level do not count"
    train(1.0, 12)
    train(1.0, 12)
    assert source.metrics() == {"data/level/chain_sum": 2.0}
    train(0.5, 12)
    assert source.metrics() == {"data/level/chain_sum": 2.0}
    state = json.loads(json.dumps(source.state()))
    resumed = LevelCurriculum(tasks, 0, groups=2, max_level=2)
    resumed.load_state(state)
    assert [task.id for task in resumed.get_samples(40)] == [task.id for task in source.get_samples(40)]
    train(0.0, 12)
    assert source.metrics() == {"data/level/chain_sum": 1.0}
    assert resumed.metrics() == {"data/level/chain_sum": 2.0}


def test_levels_need_a_curriculum() -> None:
    with pytest.raises(ConfigError, match="no dataset of the run has a curriculum: gsm_symbolic"):
        LevelCurriculum(split(dataset="gsm_symbolic", size=2), 0)
    with pytest.raises(ConfigError, match=r"env\.name=reasoning_gym"):
        LevelCurriculum([Task("t", (Message("user", "a"),))], 0)


def test_24_episodes_at_the_same_time() -> None:
    tasks = split(datasets={"chain_sum": {}, "countdown": {}, "knights_knaves": {}}, size=24)

    async def play(task: Task, answer: str) -> float:
        env = ReasoningGymEnv(answer="text")
        await env.areset(seed=0, options={"task": task})
        return (await env.astep(Message("assistant", answer)))[1]

    async def play_all() -> list[float]:
        made = list(tasks)
        return await asyncio.gather(*(play(task, task.answer if n % 2 else "no") for n, task in enumerate(made)))

    rewards = asyncio.run(play_all())
    assert rewards[1::2] == [1.0] * 12
    assert max(rewards[::2]) < 0.1
