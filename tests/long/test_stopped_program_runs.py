"""A run whose agent program works in machines of container tasks, stopped by Ctrl-C, killed, and resumed.

The program has four turns, whatever the policy samples, and writes a number with each. The task's tests give 1 only if every
number is there once, so that an episode that went on with another one's files would have 0.
"""

import json
import signal
from collections import Counter
from pathlib import Path

import docker
import pytest
from dockerd import DockerHost

from agentrl.containers.leases import KEY_LABEL, MACHINE_LABEL
from tests.fake_machine import write_task
from tests.integration.shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running

TURNS = 4
AGENT = f"""
import json, os, time, urllib.request

for number in range(1, {TURNS} + 1):
    messages = [{{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}}]
    body = json.dumps({{"model": os.environ["OPENAI_MODEL"], "messages": messages}}).encode()
    headers = {{"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}}
    urllib.request.urlopen(urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)).read()
    with open("log.txt", "a") as log:
        print(number, file=log)
    time.sleep(0.5)
"""
SCRIPT = f"""#!/bin/sh
seq {TURNS} > /tmp/expected.txt
cmp /app/log.txt /tmp/expected.txt && score=1 || score=0
printf $score > /logs/verifier/reward.txt
"""
BATCH, SAMPLES, STEPS = 2, 2, 3


class Machines:
    """What is left of machines at a daemon, by one owner's runs."""

    def __init__(self, url: str) -> None:
        self.api = docker.APIClient(base_url=url, timeout=60)
        self._before = {*self.ids()}

    def ids(self) -> list[str]:
        """Return the containers of machines."""
        rows = self.api.containers(all=True, filters={"label": [MACHINE_LABEL, KEY_LABEL]})
        return [row["Id"] for row in rows]

    def opened(self) -> list[str]:
        """Return those that were not there at the beginning."""
        return [container for container in self.ids() if container not in self._before]


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_episodes_of_programs_begin_again_after_ctrl_c_and_after_a_kill(dockerd: DockerHost, tmp_path: Path) -> None:
    for number in range(4):
        write_task(tmp_path / "tasks" / f"task-{number}", dockerd.image, SCRIPT)
    (tmp_path / "agent").mkdir()
    (tmp_path / "agent" / "agent.py").write_text(AGENT)
    machines = Machines(dockerd.url)
    words = [
        "train",
        *("--env", "terminal", "env.options.protocol=program", "data.path=tasks", "run.dir=run"),
        *("rollout.agent.command=python3 agent.py", "rollout.agent.files=agent"),
        *("rollout.agent.sandbox=container", "rollout.agent.reward=environment"),
        *(f"train.steps={STEPS}", "train.eval_every=0", "train.eval_first=false", "train.save_every=1", "eval.size=1"),
        *(f"rollout.batch_size={BATCH}", f"rollout.n_samples_per_prompt={SAMPLES}", "sampler.max_new_tokens=4"),
        *("rollout.max_tokens=1024", "sampler.embedded.context=1024", "obs.tensorboard=false", *ONE_THREAD),
        *(f"containers.hosts=[{dockerd.url}]", f"containers.state={tmp_path / 'state'}"),
        *(f"containers.machines={2 * BATCH * SAMPLES}", "containers.lease_s=60"),
    ]
    resume = ["train", "run.dir=run", "--resume"]
    for stop, arguments in ((signal.SIGINT, words), (signal.SIGKILL, resume), (None, resume)):
        run = Running(*arguments, cwd=tmp_path, target=IN_PROCESS_LEARNER)
        try:
            if stop is None:
                assert run.finish(900) == 0, run.output()[-5000:]
                break
            run.wait_for(lambda: len(machines.opened()) >= BATCH)
            if stop is signal.SIGINT:
                run.interrupt()
                assert machines.opened() == [], "a run that ends in order closes its machines"
            else:
                run.send(stop)
                run.finish()
                assert machines.opened(), "those of episodes that were in progress"
        finally:
            run.end()
    assert machines.opened() == []
    files = sorted((tmp_path / "run" / "rollouts").glob("*.jsonl"))
    rollouts = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    assert set(Counter(rollout["rollout_id"] for rollout in rollouts).values()) == {1}, "none is trained twice"
    assert len(rollouts) == STEPS * BATCH * SAMPLES
    assert [rollout["reward"] for rollout in rollouts] == [1.0] * len(rollouts)
