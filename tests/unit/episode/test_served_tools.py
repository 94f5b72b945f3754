"""Tools of servers in episodes: offered with the run's options, called by the policy, and there when it is scored."""

import asyncio
import json

import numpy as np
import pytest
from deadlines import until

from agentrl.config.rewards import RewardConfig
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.errors import EnvironmentFailure, RunStopped, SandboxFailure, TaskError, ToolFailure
from agentrl.core.imports import load_object
from agentrl.core.task import Task
from agentrl.core.tool import Tool
from agentrl.core.types import (
    FailureKind,
    Message,
    SamplingParams,
    StopReason,
    ToolCalls,
    ToolResult,
    ToolResults,
    ToolStatus,
)
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.rewards.grader import RewardGrader
from agentrl.sft.demonstrate import demonstrate
from agentrl.testing import ScriptedSampler

SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
SHIPPED = Tool("run_code", "As shipped.", SCHEMA, server="python")
IN_RUN = Tool("run_code", "As the run wants it.", SCHEMA, server="python")


class Coding(Env):
    """The policy calls a server's tool; whatever it says without a call ends the episode."""

    tools = (SHIPPED,)
    tool_names = ("python",)

    def step(self, action):
        return (), 1.0, True, False, {}


class Hearing(Coding):
    """Hears the calls, and passes them on."""

    handles_tool_calls = True

    def step(self, action):
        if isinstance(action, ToolResults):
            heard = "".join(result.content for result in action.results)
            return (Message("user", f"heard {heard}"),), 0.0, False, False, {}
        calls = tuple(call for call in action.tool_calls if call.name == "run_code")
        return (ToolCalls(calls), 0.0, False, False, {}) if calls else ((), 1.0, True, False, {})


class Files:
    """A server whose sessions remember what code they were given. ``faults`` are raised, one a call."""

    def __init__(self, *faults):
        self.faults = list(faults)
        self.sessions = {}
        self.history = []
        self.closed = []

    async def call(self, call, *, episode_id):
        await asyncio.sleep(0)
        assert call.name == "run_code"
        assert episode_id not in self.closed, "the session is closed"
        if self.faults and (fault := self.faults.pop(0)) is not None:
            self.sessions.setdefault(episode_id, [])
            if isinstance(fault, ToolStatus):
                return ToolResult(call.id, fault, "why")
            raise fault
        lines = self.sessions.setdefault(episode_id, [])
        lines.append(call.arguments["code"])
        self.history.append((episode_id, call.id))
        return ToolResult(call.id, ToolStatus.OK, "/".join(lines))

    async def close_session(self, episode_id):
        assert self.sessions.pop(episode_id, None) is not None
        self.closed.append(episode_id)

    async def aclose(self):
        """Nothing to close."""


def calls(*codes):
    return "".join(
        f"<tool_call>{json.dumps({'name': 'run_code', 'arguments': {'code': code}})}</tool_call>" for code in codes
    )


def task(name="t"):
    return Task(name, (Message("user", "task"),))


def build(renderer, script, client, *, env=Coding, grader=None, failure=None, generate=None, cls=ScriptedSampler):
    sampler = cls(script, encode=renderer.encode, end_token_id=renderer.end_token_id)
    runner = EpisodeRunner(
        {
            "": EpisodeSettings(
                EpisodeContext(
                    env_factory=env,
                    renderer=renderer,
                    sampler=sampler,
                    tool_clients={"python": client} if client else {},
                    limits=Limits(8, 4096, 30.0, 512),
                    sampling=SamplingParams(max_new_tokens=512),
                    served={"run_code": IN_RUN},
                ),
                generate=generate,
                grader=grader,
            )
        },
        FailurePolicy(failure or FailureConfig(max_failed_share=1.0)),
        EpisodeSlots(8),
    )
    return runner, sampler


def reward(tmp_path, body, **config):
    """Return a grader whose function is written by ``body``."""
    path = tmp_path / "my_reward.py"
    path.write_text(body)
    return RewardGrader(RewardConfig(function=f"{path}:score", **config)), load_object(f"{path}:seen", "x")


SCORE = """
seen = []
async def score(sample):
    result = await sample.call_tool("run_code", {"code": "scored"})
    seen.append(result.content)
    return float(len(result.content))
"""
GROUP = """
seen = []
async def score(samples):
    for sample in samples:
        seen.append((await sample.call_tool("run_code", {"code": "scored"})).content)
    return [1.0 for sample in samples]
"""


class Images(Files):
    """Remembers the image of each session; allows one."""

    def __init__(self):
        super().__init__()
        self.images = {}

    async def open_session(self, episode_id, *, image):
        assert episode_id not in self.sessions or episode_id in self.images, "opened before its image was known"
        self.sessions.setdefault(episode_id, [])
        if image != "team/a:1":
            raise TaskError(f"{image} is not allowed: sandbox.images")
        self.images[episode_id] = image


@pytest.mark.parametrize(
    ("image", "fault"),
    [
        ("team/a:1", None),
        ("team/b:1", "sandbox.images"),
        ("", "not the name of an image"),
        ("-v", "not the name of an image"),
        (17, "not the name of an image"),
        (None, None),
    ],
)
@pytest.mark.parametrize("env", [Coding, Hearing])
def test_sessions_have_the_image_that_the_task_names(renderer, env, image, fault):
    client = Images()
    runner, _ = build(renderer, [calls("a", "b"), calls("c"), "done"], client, env=env)
    named = Task("t", (Message("user", "task"),), metadata={"sandbox_image": image})
    (rollout,) = asyncio.run(runner.run(named, 1, "e"))
    if fault is None:
        assert rollout.failure is None
        assert set(client.images.values()) == ({image} if image else set())
    else:
        assert rollout.failure.kind is FailureKind.TASK
        assert fault in rollout.failure.message
        assert client.history == []


@pytest.mark.parametrize("env", [Coding, Hearing])
def test_the_policy_calls_a_servers_tool(renderer, env):
    client = Files()
    runner, _ = build(renderer, [calls("a", "b"), calls("c"), "done"], client, env=env)
    (rollout,) = asyncio.run(runner.run(task(), 1, "e"))
    assert rollout.failure is None
    heard = "heard " if env is Hearing else ""
    assert [turn.observation for turn in rollout.turns] == [f"{heard}aa/b", f"{heard}a/b/c", ""]
    assert client.closed == ["e"]
    assert len({call_id for _, call_id in client.history}) == 3
    assert rollout.reward == 1.0


def test_what_the_policy_reads_of_a_tool_is_as_the_run_has_it(renderer):
    offered = []

    class Noting(type(renderer)):
        def render(self, messages, tools=()):
            offered.append([tool.description for tool in tools])
            return super().render(messages, tools)

    noting = object.__new__(Noting)
    noting.__dict__.update(renderer.__dict__)
    runner, _ = build(noting, [calls("a"), "done"], Files())
    asyncio.run(runner.run(task(), 1, "e"))

    async def generate(task, agent):
        chat = agent.chat(task.prompt, tools=[SHIPPED])
        assert (await agent.call("run_code", {"code": "x"})).content == "x"
        await chat.sample()
        branch = chat.branch(task.prompt, tools=[SHIPPED])
        await branch.sample()
        return chat.rollout()

    runner, _ = build(noting, ["a", "b"], Files(), generate=generate)
    (rollout,) = asyncio.run(runner.run(task(), 1, "e"))
    assert rollout.failure is None
    assert offered == [["As the run wants it."]] * 3


def test_a_server_that_the_run_has_not_started(renderer):
    runner, _ = build(renderer, ["done"], None)
    (rollout,) = asyncio.run(runner.run(task(), 1, "e"))
    assert rollout.failure.kind is FailureKind.ENVIRONMENT
    assert "put 'python' into tool_names of the environment" in rollout.failure.message


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        (SandboxFailure("gone"), FailureKind.SANDBOX),
        (ToolFailure("gone"), FailureKind.TOOL),
        (ToolStatus.SANDBOX_FAILURE, FailureKind.SANDBOX),
        (ToolStatus.UNAVAILABLE, FailureKind.TOOL),
    ],
)
def test_a_failed_server_is_tried_again_with_a_new_session_and_never_trained_on(renderer, fault, kind):
    client = Files(fault)
    script = {"e": [calls("a"), "done"], "e~1": [calls("b"), "done"]}
    runner, _ = build(renderer, script, client)
    (rollout,) = asyncio.run(runner.run_many([Job(task(), 1, "e")]))
    assert rollout.failure is None
    assert [turn.observation for turn in rollout.turns] == ["b", ""]
    assert client.closed == ["e", "e~1"]
    client = Files(*[fault] * 3)
    runner, _ = build(renderer, lambda request: calls("a"), client)
    (rollout,) = asyncio.run(runner.run_many([Job(task(), 1, "e")]))
    assert rollout.dropped
    assert rollout.failure.kind is kind
    assert rollout.stop_reason is StopReason.FAILED
    assert client.closed == ["e", "e~1", "e~2"]


def test_a_session_outlives_its_scoring(renderer, tmp_path):
    grader, seen = reward(tmp_path, SCORE)
    client = Files()
    runner, _ = build(renderer, [calls("a"), "done"], client, grader=grader)
    done = []
    rollouts = asyncio.run(runner.run_many([Job(task(), 1, f"e{n}") for n in range(3)], done.append))
    assert seen == ["a/scored"] * 3
    assert [rollout.reward for rollout in rollouts] == [8.0] * 3
    assert sorted(client.closed) == ["e0", "e1", "e2"]
    assert client.sessions == {}
    assert len(done) == 3


def test_a_session_is_opened_for_scoring_where_the_episode_had_none(renderer, tmp_path):
    grader, seen = reward(tmp_path, SCORE)
    client = Files()
    runner, _ = build(renderer, ["done"], client, grader=grader)
    asyncio.run(runner.run_many([Job(task(), 1, "e")]))
    assert seen == ["scored"]
    assert client.closed == ["e"]


def test_a_groups_sessions_stay_until_it_is_graded(renderer, tmp_path):
    grader, seen = reward(tmp_path, GROUP)
    client = Files()
    runner, _ = build(renderer, [calls("a"), "done"], client, grader=grader)
    asyncio.run(runner.run_many([Job(task(), 1, f"e{n}") for n in range(4)]))
    assert seen == ["a/scored"] * 4
    assert sorted(client.closed) == ["e0", "e1", "e2", "e3"]


def test_chats_of_a_generate_function_share_the_session_that_scores_them(renderer, tmp_path):
    grader, seen = reward(tmp_path, SCORE)
    client = Files()

    async def generate(task, agent):
        chats = [agent.chat(task.prompt) for _ in range(2)]
        await agent.call("run_code", {"code": "a"})
        for chat in chats:
            await chat.sample()
        return [chat.rollout() for chat in chats]

    runner, _ = build(renderer, ["x"], client, grader=grader, generate=generate)
    asyncio.run(runner.run_many([Job(task(), 1, "e")]))
    assert seen == ["a/scored", "a/scored/scored"]
    assert client.closed == ["e"]


@pytest.mark.parametrize("body", [SCORE, GROUP])
@pytest.mark.parametrize("on_error", ["score", "drop", "stop"])
def test_an_infrastructure_failure_in_scoring_is_nobodys_reward(renderer, tmp_path, body, on_error):
    grader, _ = reward(tmp_path, body, on_error=on_error)
    client = Files(None, SandboxFailure("gone"))
    runner, _ = build(renderer, [calls("a"), "done"], client, grader=grader)
    (rollout,) = asyncio.run(runner.run_many([Job(task(), 1, "e")]))
    assert rollout.dropped
    assert rollout.failure.kind is FailureKind.SANDBOX
    assert client.closed == ["e"]


def test_sessions_are_closed_where_grading_stops_the_run(renderer, tmp_path):
    grader, _ = reward(tmp_path, "seen = []\nasync def score(samples):\n    raise ValueError('bad')", on_error="stop")
    client = Files()
    runner, _ = build(renderer, [calls("a"), "done"], client, grader=grader)
    jobs = [Job(task("first"), 1, "a0"), Job(task("first"), 1, "a1"), Job(task("second"), 1, "b0")]
    with pytest.raises(RunStopped, match="bad"):
        asyncio.run(runner.run_many(jobs))
    assert client.sessions == {}


class SlowToClose(Files):
    """Needs some rounds of the event loop to close a session."""

    def __init__(self):
        super().__init__()
        self.closing = asyncio.Event()

    async def close_session(self, episode_id):
        self.closing.set()
        for _ in range(5):
            await asyncio.sleep(0)
        await super().close_session(episode_id)


def test_sessions_are_closed_if_the_run_ends_while_they_are_being_closed(renderer, tmp_path):
    client = SlowToClose()
    grader, _ = reward(tmp_path, SCORE)
    runner, _ = build(renderer, [calls("a"), "done"], client, grader=grader)

    async def run():
        running = asyncio.create_task(runner.run_many([Job(task(), 1, "e")]))
        await client.closing.wait()
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    asyncio.run(run())
    assert client.closed == ["e"]


def test_sessions_of_a_group_that_is_never_graded_are_closed(renderer, tmp_path):
    """The second episode of the group fails, and the failure policy stops the run over it."""
    grader, seen = reward(tmp_path, GROUP)
    client = Files()
    script = {"e0": [calls("a"), "done"], "e1": [calls("b"), calls("c"), ToolFailure("late")]}
    runner, _ = build(renderer, script, client, grader=grader, failure=FailureConfig(tool="stop"))
    with pytest.raises(RunStopped, match="late"):
        asyncio.run(runner.run_many([Job(task(), 1, "e0"), Job(task(), 1, "e1")]))
    assert seen == []
    assert client.sessions == {}
    assert sorted(client.closed) == ["e0", "e1"]


class Stuck(ScriptedSampler):
    """Never answers the second request of episode e1."""

    stuck = False

    async def generate(self, prompt, params, *, session_id, request_id, **options):
        if request_id == "e1/1":
            self.stuck = True
            await asyncio.Event().wait()
        return await super().generate(prompt, params, session_id=session_id, request_id=request_id, **options)


def test_ctrl_c_closes_sessions_of_playing_and_of_waiting_episodes(renderer, tmp_path):
    grader, _ = reward(tmp_path, GROUP)
    client = Files()
    script = {"e0": [calls("a"), "done"], "e1": [calls("a")]}

    async def run():
        runner, sampler = build(renderer, script, client, grader=grader, cls=Stuck)
        running = asyncio.create_task(runner.run_many([Job(task(), 1, "e0"), Job(task(), 1, "e1")]))
        await until(lambda: (sampler.closed, sampler.stuck) == (["e0"], True))
        assert sorted(client.sessions) == ["e0", "e1"]
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running

    asyncio.run(run())
    assert sorted(client.closed) == ["e0", "e1"]


def test_a_call_after_the_end_opens_no_new_session(renderer, tmp_path):
    open_sessions = []

    class Keeping:
        group = False

        async def grade(self, rollouts, tools=None):
            open_sessions.append(tools[rollouts[0].rollout_id])

    client = Files()
    runner, _ = build(renderer, [calls("a"), "done"], client, grader=Keeping())

    async def run():
        await runner.run_many([Job(task(), 1, "e")])
        with pytest.raises(ToolFailure, match="sessions of episode e are closed"):
            await open_sessions[0]("run_code", {"code": "late"})

    asyncio.run(run())
    assert client.closed == ["e"]


class Expert:
    """Calls twice, the first time with a fault."""

    def __init__(self):
        self.heard = []

    def act(self, observation):
        self.heard.append("".join(message.content for message in observation))
        answers = [calls("a") + "<tool_call>{}</tool_call>", calls("b"), "done"]
        return answers[len(self.heard) - 1]


@pytest.mark.parametrize("env", [Coding, Hearing])
def test_a_scripted_expert_calls_a_servers_tool(renderer, env):
    """What it demonstrates is token for token what the policy would see and say."""

    def run(expert, clients):
        row = demonstrate(
            env,
            task(),
            expert,
            seed=1,
            tool_clients=clients,
            renderer=renderer,
            max_turns=8,
            served={"run_code": IN_RUN},
        )
        return asyncio.run(row)

    client, expert = Files(), Expert()
    row, earned, _ = run(expert, {"python": client})
    heard = "heard " if env is Hearing else ""
    fault = "" if env is Hearing else 'the call is not a JSON object with a "name"'
    assert expert.heard[1:] == [f"{heard}a{fault}", f"{heard}a/b"]
    assert (earned, client.sessions, client.closed) == (1.0, {}, ["t/demonstration-1"])
    answers = [calls("a") + "<tool_call>{}</tool_call>", calls("b"), "done"]
    runner, _ = build(renderer, answers, Files(), env=env)
    (rollout,) = asyncio.run(runner.run(task(), 1, "e"))
    assert np.array_equal(row.token_ids, rollout.rows[0].token_ids)
    assert np.array_equal(row.mask, rollout.rows[0].mask)
    with pytest.raises(EnvironmentFailure, match=r"'run_code' belongs to the server of 'python'.* there are: none"):
        run(Expert(), {})
    for fault in (ToolStatus.SANDBOX_FAILURE, ToolStatus.UNAVAILABLE):
        failing = Files(fault)
        with pytest.raises(EnvironmentFailure, match=r"unavailable to demonstrations: .*why"):
            run(Expert(), {"python": failing})
        assert failing.closed == ["t/demonstration-1"]


def test_a_call_that_cannot_be_read_is_told_to_the_policy(renderer):
    client = Files()
    runner, _ = build(renderer, ['<tool_call>{"name": "run_code", "arguments": {}}</tool_call>', "done"], client)
    (rollout,) = asyncio.run(runner.run(task(), 1, "e"))
    assert "'code' is a required property" in rollout.turns[0].observation
    assert client.history == []
