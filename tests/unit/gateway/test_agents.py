"""Several agents of one episode: which agent a request is for, their rollouts, and who plays them."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from deadlines import until
from gateway_episodes import ADD, TASK, Play, Program, answer, sampled, user

from agentrl.config.agent import AgentConfig
from agentrl.core.lineup import EndpointSeat, Lineup, PolicySeat, ScriptedSeat, Seat
from agentrl.core.types import FailureKind, SamplingParams, SeatRecord, StopReason, ToolCall
from agentrl.gateway.program_process import ProgramInput, program_variables
from agentrl.testing import ScriptedSampler
from tests.scripted_endpoint import ScriptedEndpoint

TWO = AgentConfig.model_validate({"agents": {"planner": {}, "coder": {"model": "small", "role": "worker"}}})


def as_agent(name: str) -> dict[str, Any]:
    return {"headers": {"x-agentrl-agent": name}}


def test_each_agent_has_its_own_conversation_rollout_and_reward(play: Play) -> None:
    async def talk(program: Program) -> None:
        program.sessions.may_reward = True
        plan = await program.chat(user("plan"), model="planner")
        code = await program.chat(user("plan"), model="small")
        path = f"/s/{program.key}/agents/planner/v1/chat/completions"
        reply = await program.post(path, {"model": "any", "messages": [user("plan"), plan, user(code["content"])]})
        assert reply.status_code == 200
        for agent, reward in (("planner", 1.0), ("coder", 0.25)):
            body = {"agent": agent, "reward": reward, "metrics": {"steps": 2}}
            assert (await program.post("/v1/session/reward", body)).status_code == 200

    script = {"e.planner": ["a plan", "done"], "e.coder": ["code"]}
    played = play(script, talk, config=TWO, lineup=Lineup())
    planner, coder = played.rollouts
    texts = [
        [played.renderer.decode(row.token_ids[row.mask == 1].tolist()) for row in rollout.rows]
        for rollout in played.rollouts
    ]
    assert texts == [[sampled(["a plan", "done"])], [sampled(["code"])]]
    assert [(rollout.rollout_id, rollout.agent, rollout.role, rollout.seat) for rollout in played.rollouts] == [
        ("e.planner", "planner", "planner", 0),
        ("e.coder", "coder", "worker", 1),
    ]
    assert {row.key.agent_id for row in coder.rows} == {"coder"}
    assert (planner.reward, coder.reward, planner.metrics) == (1.0, 0.25, {"steps": 2.0})
    assert planner.seat_rewards == coder.seat_rewards == (1.0, 0.25)
    assert (planner.episode, planner.opponent) == ("e", "mirror")
    assert planner.seats == (
        SeatRecord("planner", "planner", "policy", True, (0, 2)),
        SeatRecord("coder", "worker", "policy", True, (1,)),
    )


def test_an_agent_that_does_not_exist_is_refused_in_the_form_of_its_dialect(play: Play) -> None:
    async def talk(program: Program) -> None:
        messages = [user("a")]
        body = {"model": "gpt-9", "messages": messages}
        openai = await program.post("/v1/chat/completions", body)
        assert openai.status_code == 404
        assert openai.json()["error"]["type"] == "not_found_error"
        assert "gpt-9" in openai.json()["error"]["message"]
        assert "planner, small" in openai.json()["error"]["message"]
        anthropic = await program.post("/agents/writer/v1/messages", body | {"max_tokens": 5})
        assert anthropic.status_code == 404
        assert anthropic.json()["error"] == {
            "type": "not_found_error",
            "message": "there is no agent 'writer' in this episode: there are planner, coder",
        }
        responses = {"model": "small", "input": "a"}
        assert (await program.post("/v1/responses", responses, **{"x-agentrl-agent": "writer"})).status_code == 404
        both = await program.post("/agents/planner/v1/responses", responses, **{"x-agentrl-agent": "coder"})
        assert both.status_code == 400
        assert "'planner'" in both.json()["error"]["message"]
        program.sessions.may_reward = True
        assert (await program.post("/v1/session/reward", {"agent": "writer", "reward": 1})).status_code == 404
        models = (await program.client.get("/v1/models")).json()
        assert [model["id"] for model in models["data"]] == ["planner", "small"]
        assert (await program.client.get("/v1/models/gpt-9")).status_code == 404
        counted = await program.post("/v1/messages/count_tokens", {"model": "gpt-9", "messages": messages})
        assert counted.status_code == 404
        assert (await program.post("/v1/session/reward", {"reward": 0.5})).status_code == 200
        await program.chat(*messages, **as_agent("planner"))

    planner, coder = play({"e.planner": ["ok"]}, talk, config=TWO, lineup=Lineup()).rollouts
    assert planner.seat_rewards == (0.5, 0.5), "without an agent it is the reward of all"
    assert (coder.rows, coder.turns, coder.stop_reason) == ([], [], StopReason.TERMINATED), "it was not requested"


def test_an_episode_of_one_agent_takes_any_model_and_names_no_agent(play: Play) -> None:
    async def talk(program: Program) -> None:
        await program.chat(user("a"), model="anything")
        refused = await program.post(
            "/v1/chat/completions", {"messages": [user("a")]}, **{"x-agentrl-agent": "planner"}
        )
        assert refused.status_code == 404
        assert "has one agent" in refused.json()["error"]["message"]

    assert play(["one"], talk).rollout.agent == "main"


def test_limits_of_turns_are_those_of_each_agent(play: Play) -> None:
    async def talk(program: Program) -> None:
        await program.chat(user("a"), model="planner")
        reply = await program.chat(user("b"), model="planner")
        assert "rollout.max_turns" in reply["content"]
        await program.chat(user("a"), model="small")

    script = {"e.planner": ["one"], "e.coder": ["two"]}
    planner, coder = play(script, talk, config=TWO, lineup=Lineup(), max_turns=1).rollouts
    assert (planner.stop_reason, coder.stop_reason) == (StopReason.MAX_TURNS, StopReason.TERMINATED)


def test_frozen_weights_and_an_endpoint_play_and_are_not_trained(play: Play, renderer: Any) -> None:
    frozen = ScriptedSampler(["frozen plan", "frozen end"], encode=renderer.encode, end_token_id=renderer.end_token_id)
    add = ToolCall("c", "add", {"a": 1, "b": 2})
    repeats = ScriptedEndpoint(
        lambda request: ("", [add]) if request.tools else f"heard {request.messages[-1]['content']}|rest"
    )
    three = AgentConfig.model_validate({"agents": {"planner": {}, "coder": {}, "critic": {}}})
    seats: dict[str, Seat] = {
        "planner": PolicySeat(trained=False, sampler=frozen, name="step_000020"),
        "critic": EndpointSeat(repeats, SamplingParams(max_new_tokens=9), "big"),
    }

    async def talk(program: Program) -> None:
        program.sessions.may_reward = True
        await program.chat(user("plan"), model="planner")
        await program.chat(user("code"), model="coder")
        heard = await program.chat(user("code"), model="critic", stop=["|"])
        assert heard["content"] == "heard code"
        called = await program.chat(user("add"), model="critic", tools=[ADD])
        assert called["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1, "b": 2}'}
        heard = await program.chat(user("add"), called, answer(called["tool_calls"][0], "3"), model="critic")
        assert heard["content"] == "heard 3|rest"
        await program.post("/v1/session/reward", {"agent": "critic", "reward": -1.0})

    played = play({"e.coder": ["code"]}, talk, config=three, lineup=Lineup(seats, opponent="past"))
    coder = played.rollout
    assert (coder.agent, coder.seat, coder.opponent, coder.seat_rewards) == ("coder", 1, "past", (0.0, 0.0, -1.0))
    assert coder.seats == (
        SeatRecord("planner", "planner", "step_000020", False, (0,), ("frozen plan",)),
        SeatRecord("coder", "coder", "policy", True, (1,)),
        SeatRecord("critic", "critic", "big", False, (2, 3, 4), ("heard code|rest", "", "heard 3|rest")),
    )
    assert [request.session_id for request in frozen.requests] == ["e.planner"]
    assert frozen.closed == ["e.planner"]


def test_a_scripted_player_reads_what_is_new(play: Play, tmp_path: Path) -> None:
    file = tmp_path / "player.py"
    file.write_text(
        "class Echo:\n    def __init__(self, rng): self.turn = 0\n"
        "    def act(self, messages, legal_moves):\n        self.turn += 1\n"
        "        return None if self.turn > 2 else f'{self.turn}: ' + '/'.join(m.content for m in messages)\n"
    )
    lineup = Lineup({"worker": ScriptedSeat(f"{file}:Echo")}, opponent="fixed:echo")

    async def talk(program: Program) -> None:
        await program.chat(user("a"), model="planner")
        first = await program.chat(user("a"), user("b"), model="small")
        second = await program.chat(user("a"), user("b"), first, user("c"), model="small")
        assert [first["content"], second["content"]] == ["1: a/b", "2: c"]
        refused = await program.post(
            "/v1/chat/completions", {"model": "small", "messages": [user("a")], "tools": [ADD]}
        )
        assert refused.status_code == 400
        assert "which calls none" in refused.json()["error"]["message"]
        failed = await program.post("/v1/chat/completions", {"model": "small", "messages": [user("d")]})
        assert failed.status_code == 503

    (planner,) = play({"e.planner": ["one"]}, talk, config=TWO, lineup=lineup).rollouts
    assert planner.failure is not None
    assert planner.failure.kind is FailureKind.ENVIRONMENT
    assert (planner.agent, planner.role, planner.dropped) == ("planner", "planner", True)
    assert "must return a text, it returned None" in planner.failure.message


def test_agents_at_the_same_time_are_one_episode(play: Play) -> None:
    gate = asyncio.Event()

    async def talk(program: Program) -> None:
        turns = [asyncio.create_task(program.chat(user("a"), model=model)) for model in ("planner", "small")]
        await until(lambda: all(session.turns for session in program.sessions.by_agent.values()))
        gate.set()
        await asyncio.gather(*turns)

    played = play({"e.planner": ["one"], "e.coder": ["two"]}, talk, gate=gate, config=TWO, lineup=Lineup())
    assert [len(rollout.rows) for rollout in played.rollouts] == [1, 1]
    assert played.sampler.max_running == 2


@pytest.mark.parametrize(
    ("agents", "message"),
    [
        ({"a": {}}, "a is the only agent"),
        ({"a": {}, "b c": {}}, "'b c' is no name of an agent"),
        ({"a": {}, "b": {"model": "a"}}, "several agents have the model 'a'"),
    ],
)
def test_names_and_models_of_agents_differ(agents: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        AgentConfig.model_validate({"agents": agents})


def test_a_program_gets_the_address_of_each_agent_and_the_model_of_the_first() -> None:
    variables = program_variables(TWO, ProgramInput.from_task(TWO, TASK), "http://h:1", "KEY", "task.json")
    addresses = {name: f"http://h:1/s/KEY/agents/{name}/v1" for name in ("planner", "coder")}
    assert json.loads(variables["AGENTRL_AGENTS"]) == addresses
    assert variables["OPENAI_MODEL"] == variables["ANTHROPIC_MODEL"] == "planner"
    assert "AGENTRL_AGENTS" not in program_variables(
        AgentConfig(), ProgramInput("", ""), "http://h:1", "KEY", "task.json"
    )
