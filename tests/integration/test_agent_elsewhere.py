"""A run whose agent is another process, which starts, plays and ends its episodes over HTTP."""

import json
import shutil
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, Services, environment, here, metrics

APPLICATION = str(Path(__file__).with_name("page_application.py"))
EXAMPLE = Path(__file__).parents[2] / "examples" / "09_agent_program"
AGENT = "{command: null, reward: session, idle_timeout_s: 1.0, prompt: 'Question: {prompt}', port: PORT}"


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def test_an_application_trains_and_the_episode_of_a_killed_one_is_played_again(
    tmp_path: Path, services: Services
) -> None:
    cwd, port = tmp_path / "pages", free_port()
    shutil.copytree(EXAMPLE, cwd, ignore=shutil.ignore_patterns("runs", "__pycache__"))
    words = [
        *ONE_THREAD, "reward.function=null", "reward.key=null", "rollout.batch_size=2", "rollout.n_samples_per_prompt=4",
        "rollout.failure.agent=retry", "rollout.max_tokens=384", "train.steps=2", "train.eval_every=0", "run.dir=run",
        "train.eval_first=false", "data.eval_path=null", "sampler.max_new_tokens=16", f"sampler.url={services.engine()}",
        f"rollout.agent={AGENT.replace('PORT', str(port))}",
    ]  # fmt: skip
    url = f"http://127.0.0.1:{port}"
    run = Running("train", "--config", "config.yaml", *words, cwd=cwd, target=IN_PROCESS_LEARNER)
    applications = []

    def start(*arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, APPLICATION, url, *arguments]
        applications.append(subprocess.Popen(command, cwd=cwd, env=environment(), stdout=subprocess.PIPE, text=True))
        return applications[-1]

    try:
        killed = start("1", "halt")
        assert killed.stdout is not None
        lost = killed.stdout.readline().strip()
        killed.kill()
        application = start("4")
        assert run.finish() == 0, run.output()
        assert application.wait(60) == 0
        assert f"agents start sessions at {url}/v1/sessions" in run.output()
    finally:
        run.end()
        for process in applications:
            process.kill()
            process.communicate()
    rollouts = [
        json.loads(line) for path in sorted((cwd / "run/rollouts").glob("step_*.jsonl")) for line in path.open()
    ]
    # Every episode of both steps is trained once, also that of the killed application.
    assert Counter(rollout["rollout_id"] for rollout in rollouts) == Counter(
        f"{step}/{task}/{sample}" for step in (1, 2) for task in range(2) for sample in range(4)
    )
    (again,) = [rollout for rollout in rollouts if rollout["rollout_id"] == lost]
    assert all(request.startswith(f"{lost}~") for row in again["rows"] for request in row["request_ids"])
    for rollout in rollouts:
        assert (rollout["failure"], rollout["dropped"]) == (None, False)
        assert rollout["reward"] == rollout["metrics"]["pages"] / 4 + rollout["metrics"]["right"] / 2
    rows = [row for row in metrics(cwd / "run") if "train/reward" in row]
    assert [row["step"] for row in rows] == [1, 2]
    audited = here("audit", str(cwd / "run"), cwd=cwd)
    assert audited.returncode == 0, audited.stdout + audited.stderr
