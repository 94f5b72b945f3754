"""Episodes that hang: a report names rollout, turn, and what it is that does not answer."""

import asyncio
import threading

from deadlines import until

from agentrl.config.rewards import RewardConfig
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.task import Task
from agentrl.core.types import Message, SamplingParams, ToolCall, ToolCalls, ToolResults
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.obs.watchdog import Watchdog
from agentrl.rewards.grader import make_grader
from agentrl.testing import ScriptedSampler

STUCK_S = 0.3


class Talk(Env):
    """Goes on after every word but ``done``; looks up ``search`` at a server; ``block`` never returns."""

    tool_names = ("search",)
    go_on = threading.Event()

    def step(self, action):
        if isinstance(action, ToolResults):
            return (), 0.0, True, False, {}
        if action.content == "search":
            return ToolCalls((ToolCall("search-1", "search", {}),)), 0.0, False, False, {}
        if action.content == "block":
            self.go_on.wait(10)
        return (Message("user", "yes"),), 0.0, action.content in ("done", "block"), False, {}


class Silent:
    """A tool client that never answers."""

    async def call(self, call, *, episode_id):
        await asyncio.Event().wait()

    async def close_session(self, episode_id):
        """Nothing to close."""


def reports(renderer, script, *, generate=None, reward=None, silent=False):
    """Play an episode until it was reported as stuck, and return the report."""
    notes = []

    async def play():
        gate = asyncio.Event() if silent else None
        sampler = ScriptedSampler(script, encode=renderer.encode, end_token_id=renderer.end_token_id, gate=gate)
        runner = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=Talk,
                        renderer=renderer,
                        sampler=sampler,
                        tool_clients={"search": Silent()},
                        limits=Limits(max_turns=8, max_tokens=4096, max_seconds=30.0, max_new_tokens=128),
                        sampling=SamplingParams(max_new_tokens=128),
                    ),
                    generate=generate,
                    grader=make_grader(RewardConfig(function=reward)) if reward else None,
                )
            },
            FailurePolicy(FailureConfig()),
            EpisodeSlots(4),
        )
        with Watchdog(STUCK_S, notes.append):
            job = Job(Task("t", (Message("user", "task"),)), 0, "3/0/1")
            running = asyncio.create_task(runner.run_many([job]))
            await until(lambda: notes or running.done())
            assert not running.done()
            Talk.go_on.set()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)

    Talk.go_on.clear()
    asyncio.run(play())
    return notes[0]


def test_a_tool_that_never_answers(renderer):
    report = reports(renderer, ["hello", "search"])
    assert "rollout 3/0/1, turn 2: tool search, call search-1, server search, since " in report
    assert report.count("since") == 1


def test_an_environment_method_that_blocks(renderer):
    report = reports(renderer, ["block"])
    assert "rollout 3/0/1, turn 1: environment Talk.step, since " in report
    assert "event loop" not in report


def test_a_function_in_place_of_the_environment(renderer):
    async def generate(task, agent):
        chat = agent.chat(task.prompt)
        await chat.sample()
        await agent.call("search")

    report = reports(renderer, ["hello"], generate=generate)
    assert "rollout 3/0/1, turn 1, rollout.generate=" in report
    assert "generate: tool search, call search-1, server search, since " in report


def test_a_reward_function_that_does_not_return(renderer, tmp_path):
    file = tmp_path / "slow.py"
    file.write_text("import asyncio\n\nasync def score(sample):\n    await asyncio.sleep(60)\n")
    report = reports(renderer, ["done"], reward=f"{file}:score")
    assert f"reward of rollout 3/0/1: reward function {file}:score, since " in report


def test_a_sampler_that_does_not_answer(renderer):
    report = reports(renderer, ["hello"], silent=True)
    assert "rollout 3/0/1, turn 1: sampling 3/0/1/0, since " in report
