"""A run of container tasks that is killed again and again in the middle of its episodes.

Each episode has six commands, which do not depend on what the policy samples, and writes a number into a file with each. The
tests of the task give 1 only if every command ran exactly once, in order: so rewards say whether one was lost or ran twice.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from pathlib import Path

import pytest
from dockerd import DockerHost

from agentrl.obs.journal import read_journal
from tests.fake_machine import write_task
from tests.integration.shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running

KILLS = int(os.environ.get("AGENTRL_TEST_KILLS", "20"))
COMMANDS = 6
ENVIRONMENT = '''
import os
from pathlib import Path

from agentrl import Message
from agentrl_envs.terminal import TerminalEnv

EVENTS = Path(os.environ.get("AGENTRL_TEST_EVENTS", "events.txt")).resolve()


def note(event):
    with EVENTS.open("a") as file:
        file.write(event + "\\n")


class Driven(TerminalEnv):
    """Runs commands that the policy does not choose."""

    def __init__(self):
        super().__init__(protocol="text")

    def step(self, action):
        was_open = self._is_open
        if isinstance(action, Message):
            number = self._calls + 1
            text = f"<bash>sleep 0.3; echo {number} >> log.txt</bash>" if number <= COMMANDS else "Done."
            action = Message("assistant", text)
            note(f"turn {self._machine} {number}")
        step = super().step(action)
        if self._is_open and not was_open:
            note(f"open {self._machine}")
        return step

    def set_state(self, state):
        super().set_state(state)
        note(f"continue {self._machine}")
'''.replace("COMMANDS", str(COMMANDS))
SCRIPT = f"""#!/bin/sh
seq {COMMANDS} > /tmp/expected.txt
cmp /app/log.txt /tmp/expected.txt && score=1 || score=0
printf $score > /logs/verifier/reward.txt
"""
BATCH, SAMPLES, STEPS = 2, 2, 8


def read_events(cwd: Path) -> list[list[str]]:
    file = cwd / "events.txt"
    return [line.split() for line in file.read_text().splitlines()] if file.exists() else []


def wait_for_turns(run: Running, cwd: Path, count: int) -> None:
    run.wait_for(
        lambda: sum(event[0] == "turn" for event in read_events(cwd)) >= count or run.process.poll() is not None
    )


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_episodes_go_on_with_their_machines_after_every_kill(dockerd: DockerHost, tmp_path: Path) -> None:
    for number in range(4):
        write_task(tmp_path / "tasks" / f"task-{number}", dockerd.image, SCRIPT)
    (tmp_path / "driven.py").write_text(ENVIRONMENT)
    state = tmp_path / "state"
    words = [
        *(
            "train",
            "--env",
            "driven.py:Driven",
            "data.path=tasks",
            "run.dir=run",
            f"train.steps={STEPS}",
            "eval.size=1",
        ),
        *(
            "train.eval_every=0",
            "train.eval_first=false",
            "train.save_every=1",
            "train.save_episodes_s=0",
            "train.keep=1",
        ),
        *(
            f"rollout.batch_size={BATCH}",
            f"rollout.n_samples_per_prompt={SAMPLES}",
            "sampler.max_new_tokens=4",
            "obs.tensorboard=false",
        ),
        *(
            "rollout.max_tokens=2048",
            "sampler.embedded.context=2048",
            f"containers.hosts=[{dockerd.url}]",
            f"containers.state={state}",
            f"containers.machines={BATCH * SAMPLES}",
            "containers.lease_s=60",
            *ONE_THREAD,
        ),
    ]
    rng = random.Random(0)
    kills, runs = 0, 0
    while True:
        resume = (tmp_path / "run" / "config.yaml").exists()
        run = Running(
            *(["train", "run.dir=run", "--resume"] if resume else words), cwd=tmp_path, target=IN_PROCESS_LEARNER
        )
        runs += 1
        try:
            if kills == KILLS:
                assert run.finish(600) == 0, run.output()[-5000:]
                break
            begun = sum(event[0] == "turn" for event in read_events(tmp_path))
            wait_for_turns(run, tmp_path, begun + rng.randint(3, 9))
            time.sleep(rng.random() * 0.3)
            assert run.process.poll() is None, run.output()[-5000:]
            run.send(signal.SIGKILL)
            run.finish()
            kills += 1
        finally:
            run.end()
    events = Counter(event[0] for event in read_events(tmp_path))
    files = sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    trained = Counter(rollout["rollout_id"] for rollout in rollouts)
    assert len(trained) == STEPS * BATCH * SAMPLES
    assert set(trained.values()) == {1}, "none is trained twice"
    dropped = [rollout for rollout in rollouts if rollout["stop_reason"] == "failed"]
    wrong = [rollout for rollout in rollouts if rollout not in dropped and rollout["reward"] != 1.0]
    assert wrong == [], "no command is lost or ran twice"
    journal = read_journal(tmp_path / "run")
    assert journal is not None
    again = events["open"] - len(trained)
    print(
        f"{kills} kills, {runs} runs: {len(trained)} episodes; {events['continue']} continued, {again} sampled again, "
        f"{len(dropped)} dropped"
    )
    assert events["continue"] > 0
    records = [json.loads(file.read_text()) for file in (state / "terminal").rglob("*.json")]
    assert sum(record["grade"] is None for record in records) <= again, (
        "no episode that was trained has left its machine"
    )
