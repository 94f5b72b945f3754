"""code_contest with real servers and real sandboxes: by command line, and episodes of a scripted policy."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from agentrl_envs.code_contest import CodeContestEnv
from agentrl_tasks.contest import Contest
from agentrl_tasks.contest.policies import WARM
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, agentrl, metrics

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import reserve_port
from agentrl.core.errors import MissingError, RunStopped
from agentrl.core.registry import tool_service
from agentrl.core.task import Task
from agentrl.core.types import Message, Rollout
from agentrl.sandbox.bubblewrap.backend import BubblewrapBackend
from agentrl.testing import play_episode
from agentrl.toolserver.launch import launch_tool

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("forked_starts")]

SECRET = "31337-is-expected"
TASK = Task(
    "t",
    (Message("user", "Print the square of the number."),),
    answer={"inputs": ["3\n", "5\n", "12\n", "1\n"], "outputs": ["9\n", "25\n", "144\n", SECRET]},
)
"""The last test cannot be passed by a program that squares."""
SQUARES = "```python\nprint(int(input()) ** 2)\n```"
SEARCHES = r"""
import glob, os
found = [f"{key}={value}" for key, value in os.environ.items()]
for name in [*glob.glob("/work/**", recursive=True), *glob.glob("/tmp/**", recursive=True), *glob.glob("/proc/[0-9]*/*")]:
    if os.path.isfile(name) and os.path.basename(name) not in ("kmsg", "pagemap", "mem", "maps", "smaps"):
        try:
            found.append(open(name, errors="replace").read(4000))
        except OSError:
            pass
print(len(found) > 5, "".join(found).count("31337"), end=" ")
print([k for k in ("square", "9\n25") if k in "".join(found)])
"""


@pytest.fixture(scope="module")
def url(forked_starts: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """One server with the policy's tool and the judge."""

    async def try_it() -> None:
        async with BubblewrapBackend(SandboxConfig()):
            pass

    try:
        asyncio.run(try_it())
    except MissingError as error:
        pytest.skip(f"bubblewrap is not usable here: {error}")
    folder = tmp_path_factory.mktemp("server")
    (folder / "both.yaml").write_text("tools: {python: {}, judge: {}}\n")
    with launch_tool("judge", [f"--config={folder / 'both.yaml'}"], log=folder / "both.log") as server:
        yield server.url


def play(url: str, *says: str, max_tries: int = 2) -> Rollout:
    clients = {name: tool_service(name).client(url, {"client": {"retries": 0}}) for name in ("python", "judge")}
    return play_episode(
        lambda: CodeContestEnv(max_tries=max_tries), TASK, list(says), model=str(WARM), tool_clients=clients
    )


def calls(name: str, **arguments: object) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def test_code_is_tried_and_the_program_judged(url: str) -> None:
    rollout = play(url, calls("python", code="print(6 ** 2)"), f"So it is:\n{SQUARES}")
    assert [turn.observation for turn in rollout.turns] == ["36", ""]
    assert rollout.reward == 0.75
    assert rollout.metrics["passed"] == rollout.metrics["wrong_answer"] * 3 == 0.75
    assert (rollout.metrics["tries"], rollout.metrics["solved"]) == (1.0, 0.0)


def test_what_a_try_leaves_is_not_there_when_the_program_is_judged(url: str) -> None:
    leaves = "open('left', 'w').write('9'); open('/tmp/left', 'w').write('9')"
    looks = "import os\nprint('found' if os.path.exists('left') or os.path.exists('/tmp/left') else int(input()) ** 2)"
    rollout = play(url, calls("python", code=leaves), calls("python", code=looks), f"```python\n{looks}\n```")
    assert [turn.observation for turn in rollout.turns] == ["[no output]", "found", ""]
    assert rollout.reward == 0.75


def test_no_try_finds_a_hidden_test(url: str) -> None:
    rollout = play(url, calls("python", code=SEARCHES), SQUARES)
    assert rollout.turns[0].observation == "True 0 []"


def test_the_policy_cannot_call_the_judge(url: str) -> None:
    asks = calls("judge", program="print(9)", inputs=["3\n"], outputs=["9\n"])
    rollout = play(url, asks, SQUARES)
    assert "there is no tool 'judge'" in rollout.turns[0].observation
    assert rollout.reward == 0.75


def test_without_a_judge_the_episode_fails_and_earns_no_zero(url: str) -> None:
    with reserve_port() as nobody:
        clients = {
            "python": tool_service("python").client(url, {}),
            "judge": tool_service("judge").client(f"http://127.0.0.1:{nobody}", {"client": {"retries": 0}}),
        }
        with pytest.raises(RunStopped, match=r"rollout\.failure\.tool=stop"):
            play_episode(CodeContestEnv, TASK, [SQUARES], model=str(WARM), tool_clients=clients)


@pytest.mark.long
def test_training(url: str, tmp_path: Path) -> None:
    done = agentrl(
        *("train", *ONE_THREAD, "--env", "code_contest", f"model.path={WARM}", "train.steps=2", "run.dir=run"),
        *("rollout.batch_size=4", "rollout.n_samples_per_prompt=2", "eval.size=2", "train.eval_first=false"),
        *("tasks.options.hidden=2", "tasks.options.train_size=50"),
        *(f"tools.python.url={url}", "sampler.embedded.slots=8", "obs.progress=plain", "obs.tensorboard=false"),
        cwd=tmp_path,
        target=IN_PROCESS_LEARNER,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [row for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert len(rows) == 2
    tasks = {task.id: task for task in Contest(hidden=2, train_size=50).split("train")}
    for number, row in enumerate(rows, 1):
        assert row["rollout/episodes"] == 8
        assert 0 <= row["rollout/solved"] <= row["rollout/passed"] == pytest.approx(row["train/reward"])
        lines = (tmp_path / "run" / "rollouts" / f"step_{number:06d}.jsonl").read_text().splitlines()
        assert len(lines) == 8
        for rollout in map(json.loads, lines):
            task = tasks[rollout["prompt_id"]]
            transcript = rollout["prompt"] + "".join(turn["action"] + turn["observation"] for turn in rollout["turns"])
            assert not any(text.strip() in transcript for text in task.answer["inputs"])
    assert sum(row["rollout/has_program"] for row in rows) > 1
    log = (tmp_path / "run" / "logs" / "judge.log").read_text()
    assert not any(text.strip() in log for task in tasks.values() for text in task.answer["inputs"])
