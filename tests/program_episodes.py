"""Episodes of agent programs as processes, with a scripted policy."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from gateway_episodes import EngineSampler

from agentrl import Message, Rollout, Task
from agentrl.config.agent import AgentConfig
from agentrl.config.rollout import FailureConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.env import Env
from agentrl.core.tool import ToolClient
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.harnesses.recipes import HARNESSES
from agentrl.gateway.program import AgentProgram
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import RecordedRequest, ScriptedSampler

TASK = Task("t", (Message("user", "Write the name Remu into answer.txt, read the file, and say the name."),))
LIMITS = Limits(max_turns=30, max_tokens=1_000_000, max_seconds=120.0, max_new_tokens=4096)
ASSISTANT = "<|im_start|>assistant\n"


class Grader:
    """Gives 1 if the program has written the file."""

    group = False

    async def grade(self, rollouts: list[Rollout], tools: object = None) -> None:
        for rollout in rollouts:
            answer = Path(rollout.metadata.get("agent_folder", "/nowhere"), "answer.txt")
            rollout.reward = float(answer.is_file() and answer.read_text().strip() == "Remu")


class RecordingSampler(ScriptedSampler):
    """Keeps what it returns."""

    generations: list[Generation]

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        generation = await super().generate(prompt, params, session_id=session_id, request_id=request_id, policy=policy)
        self.generations.append(generation)
        return generation


FAKE_HARNESS = """#!/usr/bin/env python3
import json, os, sys, urllib.request

if sys.argv[1:] == ["--version"]:
    print("codex-cli VERSION")
    sys.exit()
prompt = sys.stdin.read()
assert sys.argv[1] == "exec" and prompt.endswith("say the name."), (sys.argv, prompt)
with open(os.environ["HOME"] + "/.codex/config.toml") as file:
    url = next(line for line in file if line.startswith("base_url")).split('"')[1]
with open(os.environ["AGENTRL_TASK"]) as file:
    assert json.load(file)["id"] == "t"
body = json.dumps({"messages": [{"role": "user", "content": prompt}]}).encode()
request = urllib.request.Request(url + "/chat/completions", body, {"x-api-key": os.environ["OPENAI_API_KEY"]})
with open("answer.txt", "w") as file:
    file.write(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"])
"""


def fake_harness(folder: Path, sandbox: str) -> AgentConfig:
    """Install a program with the name and the version of Codex, which requests a turn and writes it into ``answer.txt``."""
    program = folder / "bin" / "codex"
    program.parent.mkdir()
    program.write_text(FAKE_HARNESS.replace("VERSION", HARNESSES["codex"].tried))
    program.chmod(0o755)
    path = f"{program.parent}:/usr/local/bin:/usr/bin:/bin"
    return AgentConfig(harness="codex", sandbox=sandbox, env={"PATH": path})


def play_program(
    config: AgentConfig,
    script: Sequence[str] | Callable[[str], str] | EngineSampler,
    renderer: ChatRenderer,
    sandbox: SandboxConfig | None = None,
    task: Task = TASK,
    *,
    env: Callable[[], Env] = Env,
    clients: Mapping[str, ToolClient] | None = None,
    limits: Limits = LIMITS,
    temperature: float = 1.0,
) -> tuple[Rollout, list[Generation]]:
    """Play an episode, and return what the engine sampled in it, too.

    Args:
        config: of the program.
        script: the turns of a conversation in order, or a function of the prompt's text that returns the turn, or what samples
            them with an engine.
        renderer: of the policy's chat format.
        sandbox: limits of the program's sandbox.
        task: of the episode.
        env: makes the environment, which gives the reward with ``config.reward=environment``.
        clients: of its tools.
        limits: of the episode.
        temperature: of sampling with an engine.
    """

    def speak(request: RecordedRequest) -> str:
        """Return the turn that follows those in the prompt."""
        assert not isinstance(script, EngineSampler)
        prompt = renderer.decode(request.prompt.token_ids)
        return script(prompt) if callable(script) else script[prompt.count(ASSISTANT) - 1]

    sampler: RecordingSampler | EngineSampler
    if isinstance(script, EngineSampler):
        sampler = script
    else:
        sampler = RecordingSampler(speak, encode=renderer.encode, end_token_id=renderer.end_token_id)
        sampler.generations = []
    sampling = SamplingParams(max_new_tokens=limits.max_new_tokens, seed=5, temperature=temperature)
    context = EpisodeContext(env, renderer, sampler, clients or {}, limits, sampling)
    failure = FailureConfig(sampler="drop", agent="drop", max_failed_share=1)
    grader = None if config.reward == "environment" else Grader()
    settings = EpisodeSettings(context, generate=AgentProgram(config, sandbox or SandboxConfig()), grader=grader)
    runner = EpisodeRunner({"": settings}, FailurePolicy(failure), EpisodeSlots(1))

    async def run() -> list[Rollout]:
        try:
            return await runner.run_many([Job(task, 1, "e")])
        finally:
            if isinstance(sampler, EngineSampler):
                await sampler.aclose()

    (rollout,) = asyncio.run(run())
    return rollout, sampler.generations
