"""Episodes that a model at an endpoint plays in place of the policy: what it reads, its limits, and what is recorded."""

from __future__ import annotations

import asyncio
from typing import Any

from agentrl_envs.solver_critic import SolverCriticEnv

from agentrl import Agent, Env, Message, Rollout, Task, tool
from agentrl.config.rollout import FailureConfig
from agentrl.core.errors import SamplerError
from agentrl.core.lineup import Lineup, ScriptedSeat
from agentrl.core.types import (
    CallStatus,
    FailureKind,
    FinishReason,
    Rewrite,
    SamplingParams,
    StopReason,
    ToolCall,
)
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from tests.scripted_endpoint import Requested, Script, ScriptedEndpoint

TASK = Task("t", (Message("system", "Be brief."), Message("user", "1 + 2?")))


@tool(timeout_s=5)
async def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


class Sums(Env):
    """Ends with the first turn that is a number."""

    tools = (add,)

    def step(self, action: Any) -> Any:
        over = action.content.isdigit()
        return () if over else (Message("user", "A number!"),), float(over), over, False, {"metrics": {"sum": 3.0}}


def play(script: Script, env: Any = Sums, generate: Any = None, lineup: Lineup | None = None, task: Task = TASK,
         failure: dict[str, Any] | None = None, **limits: Any) -> tuple[list[Rollout], ScriptedEndpoint]:  # fmt: skip
    endpoint = ScriptedEndpoint(script)
    bounds = {"max_turns": 8, "max_tokens": 1000, "max_seconds": 20.0, "max_new_tokens": 64} | limits
    context = EpisodeContext(
        env, None, None, {}, Limits(**bounds), SamplingParams(seed=5, temperature=0.5), endpoint=endpoint
    )
    policy = FailurePolicy(FailureConfig(**{"sampler": "drop", "max_failed_share": 1.0} | (failure or {})))
    runner = EpisodeRunner({"": EpisodeSettings(context, generate, lineup=lineup)}, policy, EpisodeSlots(4))
    rollouts = asyncio.run(runner.run_many([Job(task, 1, "e")]))
    assert endpoint.connections == 0
    return rollouts, endpoint


def texts(request: Requested) -> list[tuple[str, Any]]:
    return [(message["role"], message["content"]) for message in request.messages]


def test_calls_and_their_results() -> None:
    calls = [ToolCall("x", "add", {"a": 1, "b": 2}), ToolCall("x", "add", {"a": "one"}), ToolCall("y", "mul", {})]
    broken = ToolCall("z", "add", {}, CallStatus.INVALID_JSON, "the arguments of add are no JSON")
    [rollout], endpoint = play([("Let me see.", [*calls, broken]), "Three", "3"])
    first, second, _ = endpoint.requests
    assert (texts(first), first.tools) == ([("system", "Be brief."), ("user", "1 + 2?")], ("add",))
    assert (first.params.temperature, first.params.max_new_tokens) == (0.5, 64)
    assert len({request.params.seed for request in endpoint.requests}) == 3
    turn, *results = second.messages[2:]
    ids = [call["id"] for call in turn["tool_calls"]]
    assert len(set(ids)) == 4  # the endpoint's own, as far as they differ
    assert [result["tool_call_id"] for result in results] == ids
    contents = [result["content"] for result in results]
    assert contents[0] == "3"
    for content, beginning in zip(contents[1:], ("add: ", "there is no tool 'mul'", broken.fault), strict=True):
        assert content.startswith(beginning)
    assert (rollout.reward, rollout.stop_reason, rollout.metrics) == (1.0, StopReason.TERMINATED, {"sum": 3.0})
    assert [turn.action for turn in rollout.turns] == ["Let me see.", "Three", "3"]
    assert (rollout.rows, rollout.sampled_tokens) == ([], 15)
    assert rollout.endpoint is not None
    assert (rollout.endpoint.model, rollout.endpoint.prompt_tokens) == ("big", 20 + 70 + 90)
    assert [message["role"] for message in rollout.endpoint.messages] == [
        "system", "user", "assistant", "tool", "tool", "tool", "tool", "assistant", "user", "assistant",
    ]  # fmt: skip
    assert rollout.endpoint.messages[-1]["content"] == "3"
    assert [entry["function"]["name"] for entry in rollout.endpoint.tools] == ["add"]
    assert rollout.prompt == "system: Be brief.\n\nuser: 1 + 2?"


def test_calls_without_tools_are_none() -> None:
    class Plain(Sums):
        tools = ()

    [rollout], endpoint = play([("", [ToolCall("x", "add", {})]), "3"], Plain)
    assert texts(endpoint.requests[1])[2] == ("assistant", "")
    assert "tool_calls" not in endpoint.requests[1].messages[2]
    assert rollout.reward == 1.0


class Inline(Env):
    """Continues the policy's turn, as Search-R1 does."""

    stop = ("</search>",)

    def step(self, action: Any) -> Any:
        over = "</search>" not in action.content
        return (Message("user", "<information>Remu</information>", inline=True),), float(over), over, False, {}


def test_what_continues_a_turn_is_a_message_of_the_user() -> None:
    [rollout], endpoint = play(["<search>x</search>", "Remu"], Inline)
    assert endpoint.requests[0].params.stop == ("</search>",)
    assert texts(endpoint.requests[1])[2:] == [
        ("assistant", "<search>x</search>"), ("user", "<information>Remu</information>"),
    ]  # fmt: skip
    assert rollout.reward == 1.0


def test_limits() -> None:
    """The first request has 20 tokens, and each turn and its answer add 5 and 20 as the endpoint counts them."""
    [rollout], _ = play(["no", "no"], max_turns=2)
    assert (rollout.stop_reason, len(rollout.turns), rollout.failure) == (StopReason.MAX_TURNS, 2, None)
    [rollout], endpoint = play(["no", "no", "no"], max_tokens=50)
    assert [request.params.max_new_tokens for request in endpoint.requests] == [50, 25, 5]
    assert (rollout.stop_reason, len(rollout.turns), rollout.failure) == (StopReason.MAX_TOKENS, 3, None)


def test_a_turn_that_was_cut_is_not_continued() -> None:
    """Chat completions continue no turn of the assistant."""

    class Waits(Env):
        def step(self, action: Any) -> Any:
            return (), 0.0, False, False, {}

    [rollout], endpoint = play([("12", FinishReason.LENGTH)], Waits)
    assert (rollout.stop_reason, len(endpoint.requests)) == (StopReason.MAX_TOKENS, 1)
    [rollout], _ = play(["12"], Waits)
    assert rollout.failure is not None
    assert "Waits.step returned no message although the policy has ended its turn" in rollout.failure.message


def test_a_failure_is_the_samplers_and_what_was_said_is_kept() -> None:
    [rollout], endpoint = play(["no", SamplerError("gone")])
    assert rollout.failure is not None
    assert (rollout.failure.kind, rollout.dropped, rollout.stop_reason) == (
        FailureKind.SAMPLER,
        True,
        StopReason.FAILED,
    )
    assert [turn.action for turn in rollout.turns] == ["no"]
    [rollout], endpoint = play([SamplerError("gone"), "3"], failure={"sampler": "retry"})
    assert (rollout.failure, rollout.reward, len(endpoint.requests)) == (None, 1.0, 2)


def test_a_rewritten_conversation() -> None:
    class Summary(Env):
        def step(self, action: Any) -> Any:
            over = action.content == "3"
            return Rewrite((Message("user", "You said no."),)), 0.0, over, False, {}

    [rollout], endpoint = play(["no", "3"], Summary)
    assert texts(endpoint.requests[1]) == [("user", "You said no.")]
    assert [turn.action for turn in rollout.turns] == ["no", "3"]


def test_a_loop_of_the_user_with_branches_and_several_chats() -> None:
    async def generate(task: Task, agent: Agent) -> list[Rollout]:
        chat = agent.chat(task.prompt)
        first = await chat.sample(stop=("!",))
        assert first is not None
        chat.add(Message("user", "Again."))
        branch = chat.branch([Message("user", "Sum up.")])
        assert await branch.sample() is not None
        side = chat.branch()
        side.add(Message("user", "Aside."))
        assert await side.sample() is not None
        assert await chat.sample() is not None
        other = agent.chat([Message("user", "Hi.")])
        assert await other.sample() is not None
        return [chat.rollout(1.0), other.rollout(0.5)]

    (first, second), endpoint = play(lambda request: f"turn {len(request.messages)}", Sums, generate)
    assert [texts(request)[-1] for request in endpoint.requests] == [
        ("user", "1 + 2?"), ("user", "Sum up."), ("user", "Aside."), ("user", "Again."), ("user", "Hi."),
    ]  # fmt: skip
    assert texts(endpoint.requests[2])[2:] == [("assistant", "turn 2"), ("user", "Again."), ("user", "Aside.")]
    assert (first.reward, len(first.turns), first.sampled_tokens) == (1.0, 4, 20)
    assert (second.reward, len(second.turns), second.sampled_tokens) == (0.5, 1, 5)


def test_it_plays_the_policys_role_among_several_agents() -> None:
    lineup = Lineup({"critic": ScriptedSeat("careless")})
    rollouts, endpoint = play(lambda request: "7", SolverCriticEnv, lineup=lineup, task=SolverCriticEnv.example_task())
    assert {rollout.endpoint.model for rollout in rollouts if rollout.endpoint is not None} == {"big"}
    assert all(rollout.failure is None and rollout.endpoint for rollout in rollouts)
    assert len(endpoint.requests) == sum(len(rollout.turns) for rollout in rollouts)
