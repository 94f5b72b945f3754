"""Agent programs: what is refused before a run, and sandboxes. `test_examples` trains one."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from gateway_episodes import TASK, make_test_renderer
from shared_runs import here

from agentrl import Rollout
from agentrl.config.agent import AgentConfig
from agentrl.config.rollout import FailureConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.env import Env
from agentrl.core.errors import MissingError
from agentrl.core.types import SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.program import AgentProgram
from agentrl.sandbox.registry import backend_class
from agentrl.testing import ScriptedSampler


def test_a_program_that_does_not_exist_is_told_before_anything_starts(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"prompt": "a"}\n')
    done = here(
        "train", "--env", "single_turn", "data.path=train.jsonl", "reward=exact_match", "data.label_key=prompt",
        "rollout.agent.command=no-such-agent", "run.dir=run", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stdout + done.stderr
    assert "rollout.agent.command=no-such-agent: there is no program no-such-agent" in done.stderr.replace("\n", " ")
    assert not (tmp_path / "run").exists()


SANDBOXED = """
import json, os, socket, urllib.error, urllib.request
from urllib.parse import urlsplit

gateway = urlsplit(os.environ["OPENAI_BASE_URL"])


def attempt(action):
    try:
        return str(action())
    except Exception as error:
        return type(error).__name__


body = json.dumps({"messages": [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
results = {
    "reply": reply,
    "directly": attempt(lambda: socket.create_connection((gateway.hostname, gateway.port), 5)),
    "elsewhere": attempt(lambda: urllib.request.urlopen(f"http://{gateway.hostname}:1/")),
    "home": attempt(lambda: os.listdir(HOME)),
}
json.dump(results, open("answer.txt", "w"))
"""


def test_a_program_in_bubblewrap_reaches_only_the_gateway(tmp_path: Path) -> None:
    (tmp_path / "agent.py").write_text(SANDBOXED.replace("HOME", repr(str(tmp_path))))
    renderer = make_test_renderer()
    try:
        backend_class("bubblewrap").check(SandboxConfig())
    except MissingError as error:
        pytest.skip(f"bubblewrap: {error}")
    results: list[dict[str, str]] = []

    class Reader:
        group = False

        async def grade(self, rollouts: Sequence[Rollout], tools: object = None) -> None:
            for rollout in rollouts:
                results.append(json.loads(Path(rollout.metadata["agent_folder"], "answer.txt").read_text()))

    config = AgentConfig(command="python3 agent.py", files=tmp_path, sandbox="bubblewrap")
    sampler = ScriptedSampler(["one"], encode=renderer.encode, end_token_id=renderer.end_token_id)
    context = EpisodeContext(Env, renderer, sampler, {}, Limits(4, 4096, 60.0, 64), SamplingParams(seed=5))
    settings = EpisodeSettings(context, AgentProgram(config, SandboxConfig()), Reader())
    runner = EpisodeRunner({"": settings}, FailurePolicy(FailureConfig(max_failed_share=1)), EpisodeSlots(4))
    (rollout,) = asyncio.run(runner.run_many([Job(TASK, 1, "e")]))
    assert rollout.failure is None, rollout.failure
    refusals = {"directly": "ConnectionRefusedError", "elsewhere": "HTTPError", "home": "FileNotFoundError"}
    assert results == [{"reply": "one", **refusals}]
