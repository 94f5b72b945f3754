"""The final answer of an agent program, and its reward by the environment, which grades an episode of its own the same."""

import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from agentrl import Env, Message, Rollout, Sample, Task, ToolCall, ToolResult
from agentrl.config.agent import AgentConfig
from agentrl.config.rewards import RewardConfig
from agentrl.config.rollout import FailureConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.registry import make_any_env
from agentrl.core.types import FailureKind, SamplingParams, ToolStatus
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.program import AgentProgram
from agentrl.render.renderer import ChatRenderer
from agentrl.rewards.grader import RewardGrader
from agentrl.runtime.checks import check_episodes
from agentrl.testing import ScriptedSampler

TESTS = {"inputs": ["1 2 3\n", "-5 5\n"], "outputs": ["6\n", "0\n"]}
PROGRAM = """
import json, os, sys, urllib.request

body = json.dumps({"messages": [{"role": "user", "content": os.environ["AGENTRL_PROMPT"]}]}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
reply = json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"]
print(reply[::-1], end="")
print("a warning", file=sys.stderr)
open("answer.txt", "w").write(reply + reply)
"""


class Judge:
    """Accepts each test if the program is right."""

    def __init__(self) -> None:
        self.programs: list[str] = []

    async def call(self, call: ToolCall, *, episode_id: str) -> ToolResult:
        arguments: Mapping[str, Any] = call.arguments
        self.programs.append(arguments["program"])
        right = "sum" in arguments["program"]
        verdicts = ["accepted", "accepted" if right else "wrong_answer"]
        return ToolResult(call.id, ToolStatus.OK, "", data={"verdicts": verdicts})

    async def close_session(self, episode_id: str) -> None:
        pass

    async def aclose(self) -> None:
        pass


def play(
    renderer: ChatRenderer,
    env: str | type[Env],
    task: Task,
    turn: str,
    agent: AgentConfig | None = None,
    clients: Mapping[str, Any] | None = None,
    reward: str | None = None,
) -> Rollout:
    """Play an episode of one turn, by a program or by the environment itself."""
    sampler = ScriptedSampler([turn], encode=renderer.encode, end_token_id=renderer.end_token_id)
    limits = Limits(max_turns=4, max_tokens=4096, max_seconds=30.0, max_new_tokens=512)

    def make() -> Any:
        return env() if isinstance(env, type) else make_any_env(env, {"max_tries": 0} if env == "code_contest" else {})

    context = EpisodeContext(make, renderer, sampler, clients or {}, limits, SamplingParams(seed=5))
    settings = EpisodeSettings(
        context,
        None if agent is None else AgentProgram(agent, SandboxConfig()),
        None if reward is None else RewardGrader(RewardConfig(function=reward)),
    )
    runner = EpisodeRunner({"": settings}, FailurePolicy(FailureConfig(max_failed_share=1)), EpisodeSlots(1))
    (rollout,) = asyncio.run(runner.run_many([Job(task, 1, "e")]))
    return rollout


@pytest.fixture
def program(tmp_path: Path) -> str:
    file = tmp_path / "agent.py"
    file.write_text(PROGRAM)
    return f"{sys.executable} {file}"


def contest(text: str) -> tuple[Task, str]:
    return Task("t", (Message("user", text),), answer=TESTS), f"So:\n```python\n{text}\n```"


@pytest.mark.parametrize(("code", "reward"), [("print(sum(map(int, input().split())))", 1.0), ("print(6)", 0.5)])
def test_a_judged_task_has_the_reward_and_metrics_of_its_environment(
    renderer: ChatRenderer, program: str, code: str, reward: float
) -> None:
    task, turn = contest(code)
    judges = [Judge(), Judge()]
    by_environment = play(renderer, "code_contest", task, turn, clients={"judge": judges[0]})
    config = AgentConfig(command=program, reward="environment")
    by_program = play(renderer, "code_contest", task, turn, config, {"judge": judges[1]})
    assert by_program.failure is None, by_program.failure
    assert (by_program.reward, by_program.metrics) == (by_environment.reward, by_environment.metrics)
    assert by_program.reward == reward
    assert judges[0].programs == judges[1].programs == [f"{code}\n"]
    assert by_program.prompt == by_environment.prompt, "the environment writes the prompt"
    (row,), (other,) = by_program.rows, by_environment.rows
    assert (row.token_ids == other.token_ids).all()


@pytest.mark.parametrize(
    ("answer", "turn", "final"),
    [
        ("message", "Remu", "Remu"),
        ("output", "umeR", "Remu"),
        ("file:answer.txt", "Re", "ReRe"),
        ("file:b.txt", "Re", ""),
    ],
)
def test_the_final_answer_is_the_last_turn_the_output_or_a_file(
    renderer: ChatRenderer, program: str, answer: str, turn: str, final: str
) -> None:
    config = AgentConfig(command=program, reward="environment", answer=answer)
    task = Task("t", (Message("user", "Who?"),), answer="Remu")
    rollout = play(renderer, "single_turn", task, turn, config, reward="exact_match")
    assert rollout.failure is None, rollout.failure
    assert Sample.from_rollout(rollout).final == final
    assert rollout.reward == float(final == "Remu")


class Ends(Env):
    """Gives 0.25, and ends or not."""

    goes_on = True

    def step(self, action: Any) -> Any:
        assert action == Message("assistant", "Remu"), action
        return (Message("user", "And?"),), 0.25, not self.goes_on, False, {"metrics": {"seen": 1.0}}


class Fails(Env):
    def step(self, action: Any) -> Any:
        raise KeyError("answer")


def test_an_environment_that_goes_on_has_given_its_reward_and_one_that_raises_has_failed(
    renderer: ChatRenderer, program: str
) -> None:
    config, task = AgentConfig(command=program, reward="environment"), Task("t", (Message("user", "Who?"),))
    rollout = play(renderer, Ends, task, "Remu", config)
    assert (rollout.reward, rollout.metrics) == (0.25, {"seen": 1.0})
    failed = play(renderer, Fails, task, "Remu", config)
    assert failed.failure is not None
    assert (failed.failure.kind, failed.dropped) == (FailureKind.ENVIRONMENT, True)
    assert "Fails.step raised KeyError" in failed.failure.message


@pytest.mark.parametrize(
    ("env", "agent", "message"),
    [
        ("kuhn_poker", {"reward": "environment"}, "which has several agents: a final answer is that of one"),
        ("single_turn", {"reward": "environment"}, "sets no reward: set reward.function"),
        ("single_turn", {"reward": "function"}, "sets no reward: set reward.function"),
    ],
)
def test_a_reward_that_nothing_gives_is_refused(env: str, agent: dict[str, Any], message: str) -> None:
    config = Config.model_validate({"env": {"name": env}, "rollout": {"agent": {"command": sys.executable, **agent}}})
    with pytest.raises(ConfigError, match=message):
        check_episodes(config)


@pytest.mark.parametrize("answer", ["file:", "file:/etc/passwd", "stdout"])
def test_answers_that_are_none(answer: str) -> None:
    with pytest.raises(ValueError, match="is no final answer"):
        AgentConfig(answer=answer)
