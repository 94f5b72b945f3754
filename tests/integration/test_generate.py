"""``rollout.generate`` through the command line: a loop of the user's own in a fresh directory, with the real search."""

import json
from pathlib import Path

import pytest
from runs import agentrl, metrics

pytestmark = pytest.mark.timeout(300)

LOOP = '''
import re

from agentrl import Agent, Message, Rollout, Task, ToolStatus


async def generate(task: Task, agent: Agent) -> Rollout:
    """Ask, search, answer: the protocol that the default model knows."""
    question = (
        "Answer the given question. You must conduct reasoning inside <think> and </think> first every time you get "
        f"new information. Question: {task.question}\\n"
    )
    chat = agent.chat([Message("user", question)])
    found, reward = 0, 0.0
    while (said := await chat.sample(stop=("</search>", "</answer>"))) is not None:
        answer = re.search(r"<answer>(.*?)</answer>", said.content)
        if answer:
            reward = float(answer[1].strip() in task.answer)
            break
        query = re.search(r"<search>(.*?)</search>", said.content)
        if query is None:
            break
        result = await agent.call("search", {"query": query[1], "corpus": task.metadata["corpus"]})
        assert result.status is ToolStatus.OK, result.content
        found += len(result.data)
        text = "".join(f"Doc {n}(Title: {hit['document']['contents']})" for n, hit in enumerate(result.data, 1))
        chat.add(Message("user", f"\\n\\n<information>{text}</information>\\n\\n", inline=True))
    return chat.rollout(reward, metrics={"documents": found})
'''


def test_a_generate_function_trains(tmp_path: Path) -> None:
    (tmp_path / "my_loop.py").write_text(LOOP)
    done = agentrl(
        "train", "--env", "search_r1", "rollout.generate=my_loop.py:generate", "run.dir=run", "train.steps=1",
        "rollout.batch_size=4", "rollout.n_samples_per_prompt=4", "train.eval_first=false", "train.eval_every=0",
        "eval.size=8", "obs.progress=plain", "obs.tensorboard=false", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = [row for row in metrics(tmp_path / "run") if "rollout/documents" in row]
    assert row["rollout/documents"] > 1
    rollouts = [json.loads(line) for line in (tmp_path / "run/rollouts/step_000001.jsonl").read_text().splitlines()]
    assert len(rollouts) == 16
    searched = [rollout for rollout in rollouts if len(rollout["turns"]) > 1]
    assert searched, "no episode searched"
    for rollout in rollouts:
        assert rollout["prompt"].count("You must conduct reasoning") == 1
        (tokens,) = rollout["rows"]
        assert [version == 0 for version in tokens["versions"]] == [mask == 1 for mask in tokens["mask"]]
        assert tokens["request_ids"] == [f"{rollout['rollout_id']}/{turn}" for turn in range(len(rollout["turns"]))]
    assert "<information>" in searched[0]["turns"][0]["observation"]


def test_a_function_that_cannot_be_used_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "my_loop.py").write_text("def generate(task, agent): ...\n")
    done = agentrl("train", "--env", "search_r1", "rollout.generate=my_loop.py:generate", "run.dir=run", cwd=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.generate=my_loop.py:generate must be a coroutine" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()
