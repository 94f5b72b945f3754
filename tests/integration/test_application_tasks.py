"""A run that trains on the sessions of an application in production, which brings the tasks; it is killed and resumed."""

import itertools
import json
import signal
import threading
from pathlib import Path
from typing import Any

import httpx
from shared_runs import IN_PROCESS_LEARNER, ONE_THREAD, Running, Services, metrics
from test_agent_elsewhere import free_port

from agentrl.gateway.client import AgentClient

STEPS = 2


class Application:
    """Answers requests of its users, one session each, until the run is over; the reward is the share of vowels."""

    def __init__(self, url: str) -> None:
        self._client = AgentClient(url, patience_s=1)
        self.is_over = threading.Event()
        self._numbers = itertools.count()
        self.answers: dict[str, tuple[str, float]] = {}
        """What was sampled for a request, and the reward, of sessions that were ended."""
        self.thread = threading.Thread(target=self._work, daemon=True)

    def _work(self) -> None:
        while not self.is_over.is_set():
            number = next(self._numbers)
            try:
                session = self._client.start({"id": f"request-{number}", "prompt": f"Say {number}."}, wait_s=5)
            except (httpx.TransportError, TimeoutError):
                continue  # the run was killed, or is over
            if session is None:
                return
            try:
                with session:
                    body = {"messages": session.task["prompt"]}
                    reply = httpx.post(f"{session.session_url}/chat/completions", json=body, timeout=120, verify=False)
                    message = reply.raise_for_status().json()["choices"][0]["message"]
                    text = message.get("reasoning_content", "") + message["content"]
                    reward = sum(letter in "aeiou" for letter in text) / max(1, len(text))
                    session.end(reward)
                    self.answers[session.task["id"]] = (text, reward)
            except httpx.HTTPError:
                pass  # the run was killed: the request is not trained


def test_requests_of_an_application_are_trained_as_they_were_sampled_and_at_most_once(
    tmp_path: Path, services: Services
) -> None:
    port = free_port()
    words = [
        *ONE_THREAD, "--env", "single_turn", "model.path=multihop-warm", "rollout.batch_size=4", "rollout.n_samples_per_prompt=1",
        "algo.advantage.name=reinforce_plus_plus", "rollout.max_tokens=64", f"train.steps={STEPS}", "train.eval_every=0",
        "train.save_every=1", "train.eval_first=false", "run.dir=run", "sampler.max_new_tokens=8", "obs.rollouts=all",
        f"sampler.url={services.engine()}", f"rollout.agent={{port: {port}, reward: session, tasks: application}}",
    ]  # fmt: skip
    application = Application(f"http://127.0.0.1:{port}")
    run = Running("train", *words, cwd=tmp_path, target=IN_PROCESS_LEARNER)
    try:
        application.thread.start()
        run.wait_for(lambda: (tmp_path / "run/checkpoints/step_000001").exists())
        run.send(signal.SIGKILL)
        assert run.finish() != 0
    finally:
        run.end()
    services.engine()  # has no request of the killed run any more
    run = Running("train", "--resume", "run.dir=run", cwd=tmp_path, target=IN_PROCESS_LEARNER)
    try:
        assert run.finish() == 0, run.output()
    finally:
        run.end()
        application.is_over.set()
        application.thread.join(60)
    assert not application.thread.is_alive()
    rollouts: list[dict[str, Any]] = [
        json.loads(line) for path in sorted((tmp_path / "run/rollouts").glob("step_*.jsonl")) for line in path.open()
    ]
    assert sorted(rollout["rollout_id"] for rollout in rollouts) == [
        f"{step}/{task}/0" for step in range(1, STEPS + 1) for task in range(4)
    ]
    trained = {rollout["metadata"]["application_task"]: rollout for rollout in rollouts}
    assert len(trained) == len(rollouts)
    for name, rollout in trained.items():
        assert (rollout["failure"], rollout["dropped"]) == (None, False)
        text, reward = application.answers[name]
        (turn,) = rollout["turns"]
        assert turn["action"].replace("<think>", "").replace("</think>", "").split() == text.split()
        assert rollout["reward"] == reward
    assert len({rollout["reward"] for rollout in rollouts}) > 1
    steps = [row for row in metrics(tmp_path / "run") if "train/reward" in row]
    assert [row["step"] for row in steps][-STEPS:] == list(range(1, STEPS + 1))
    assert all(row["train/grad_norm"] > 0 for row in steps)
