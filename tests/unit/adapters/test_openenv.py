"""OpenEnv's protocol against a fake server: capacity, losses and faults, actions by schema, tools, texts of observations."""

import asyncio
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from agentrl import ConfigError, Message, Task
from agentrl.adapters.base import ActionError
from agentrl.adapters.openenv import OpenEnv
from agentrl.adapters.openenv.actions import TurnActions, observation_text, takes_tools
from agentrl.core.errors import EnvironmentFailure
from agentrl.core.types import CallStatus, ToolCall
from tests.unit.adapters.fake_openenv import LOSE, FakeOpenEnv, Json, observe

TASK = Task("openenv/train/3", (), metadata={"reset": {"level": 2}})


def echo(kind: str, content: Json) -> Json:
    """Answer a reset, and each action with its text; ``end`` ends the episode."""
    if kind == "reset":
        return observe(text="begin")
    return observe(content["text"] == "end", 0.5, text=content["text"])


def with_server(fake: FakeOpenEnv, play: Callable[[str], Any]) -> Any:
    async def run() -> Any:
        async with fake.serve():
            return await play(fake.url)

    return asyncio.run(run())


def fault(reply: Callable[[str, Json], Json | str], *turns: str, **options: Any) -> str:
    """Return the message of the failure that ends an episode; its session has ended, too."""
    fake = FakeOpenEnv(reply)

    async def play(url: str) -> str:
        env = OpenEnv(url, attempts=1, **options)

        async def episode() -> None:
            await env.areset(seed=0, options={"task": TASK})
            for turn in turns:
                await env.astep(Message("assistant", turn))

        with pytest.raises(EnvironmentFailure) as caught:
            await episode()
        await env.aclose()
        assert fake.url in str(caught.value)
        assert "task openenv/train/3" in str(caught.value)
        return str(caught.value)

    message = with_server(fake, play)
    assert fake.sessions == 0
    return message


def test_an_episode() -> None:
    fake = FakeOpenEnv(echo)

    async def play(url: str) -> None:
        env = OpenEnv(url, prompt="Repeat.", reset={"size": 4})
        (message,), _ = await env.areset(seed=7, options={"task": TASK})
        assert message.content == "Repeat.\n\nbegin"
        assert await env.astep(Message("assistant", "<think>so</think>one")) == (
            (Message("user", "one"),), 0.5, False, False, {}
        )  # fmt: skip
        _, reward, terminated, truncated, info = await env.astep(Message("assistant", "end"))
        assert (reward, terminated, truncated) == (0.5, True, False)
        assert info == {"metrics": {"steps": 2.0, "invalid_turns": 0.0}}
        assert fake.sessions == 0, "the session ends with the episode"
        with pytest.raises(EnvironmentFailure, match="after the end"):
            await env.astep(Message("assistant", "more"))

    with_server(fake, play)
    (kind, parameters), *steps = fake.messages
    assert kind == "reset"
    assert {name: parameters[name] for name in ("size", "level")} == {"size": 4, "level": 2}
    assert isinstance(parameters["seed"], int)
    assert steps == [("step", {"text": "one"}), ("step", {"text": "end"})]


def test_64_episodes_share_a_server_with_room_for_eight() -> None:
    fake = FakeOpenEnv(echo, capacity=8)

    async def play(url: str) -> list[str]:
        async def episode(number: int) -> str:
            env = OpenEnv(url, concurrency=8)
            await env.areset(seed=number)
            (message,), *_ = await env.astep(Message("assistant", str(number)))
            await env.astep(Message("assistant", "end"))
            return message.content

        return await asyncio.gather(*map(episode, range(64)))

    assert with_server(fake, play) == [str(number) for number in range(64)]
    assert fake.most_sessions == 8


def test_a_full_server_is_waited_for() -> None:
    fake = FakeOpenEnv(echo, capacity=1)

    async def play(url: str) -> None:
        first, second = OpenEnv(url), OpenEnv(url)
        await first.areset(seed=0)
        with pytest.raises(
            EnvironmentFailure, match=r"full \(1/1 sessions\) for env\.options\.capacity_wait_s=0\.001; raise"
        ):
            await OpenEnv(url, capacity_wait_s=0.001).areset(seed=0)
        waiting = asyncio.ensure_future(second.areset(seed=0))
        await asyncio.sleep(0)
        await first.aclose()
        await waiting
        await second.aclose()

    with_server(fake, play)


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (
            lambda kind, content: {"code": "FACTORY_ERROR", "message": "no board"},
            "refused the reset: FACTORY_ERROR: no board",
        ),
        (lambda kind, content: LOSE, r"the connection was lost .*, at the last of 1 attempts, before the first step"),
        (lambda kind, content: observe(True, text="over"), "the episode is over after its reset"),
        (lambda kind, content: '{"type": "observation"}', "a message that is not of the protocol"),
        (lambda kind, content: '{"type": "observation", "data": 1}', "a message without data"),
        (lambda kind, content: {"observation": {}, "reward": "much"}, "a reply that is no observation"),
        (
            lambda kind, content: echo(kind, content) if kind == "reset" else LOSE,
            "lost .*=retry plays the episode again",
        ),
        (
            lambda kind, content: (
                echo(kind, content) if kind == "reset" else {"code": "SESSION_ERROR", "message": "gone"}
            ),
            "step 1 failed at the server: SESSION_ERROR: gone",
        ),
        (
            lambda kind, content: (
                echo(kind, content) if kind == "reset" else {"code": "EXECUTION_ERROR", "message": "x"}
            ),
            r"EXECUTION_ERROR: x; env\.options\.execution_errors=show",
        ),
    ],
)
def test_faults_of_a_server_are_failures_that_name_it(reply: Callable[[str, Json], Json | str], message: str) -> None:
    assert re.search(message, fault(reply, "one"))


def losing(*lost: int, total: Callable[[int], int] = lambda sessions: 0) -> FakeOpenEnv:
    """A server that adds numbers from what ``total`` says of a session, and loses the connection at these of all its messages."""
    messages, sessions, state = 0, 0, 0

    def reply(kind: str, content: Json) -> Json | str:
        nonlocal messages, sessions, state
        messages += 1
        if kind == "reset":
            sessions += 1
            state = total(sessions)
            return observe(total=state)
        if messages in lost:
            return LOSE
        if content["text"] == "bad":
            return {"code": "VALIDATION_ERROR", "message": "bad"}
        state += int(content["text"])
        return observe(state >= 6, float(state), total=state)

    return FakeOpenEnv(reply)


def play_sum(fake: FakeOpenEnv, **options: Any) -> tuple[list[str], float, Json]:
    """Play 1, a refused turn, 2, 3; return what the policy read, the sum of the rewards, and the last info."""

    async def play(url: str) -> tuple[list[str], float, Json]:
        env, texts, total, info = OpenEnv(url, attempts=3, **options), [], 0.0, {}
        try:
            await env.areset(seed=3)
            for turn in ("1", "bad", "2", "3"):
                messages, reward, *_, info = await env.astep(Message("assistant", turn))
                texts += [message.content for message in messages]
                total += reward
        finally:
            await env.aclose()
        return texts, total, info

    played: tuple[list[str], float, Json] = with_server(fake, play)
    assert fake.sessions == 0
    return played


def test_a_lost_session_of_a_deterministic_environment_is_played_again() -> None:
    whole, broken = losing(), losing(4, 7)
    texts, total, info = play_sum(whole, deterministic=True)
    assert info["metrics"]["replays"] == 0.0
    assert play_sum(broken, deterministic=True)[:2] == (texts, total), "the policy does not notice"
    resets = [content for kind, content in broken.messages if kind == "reset"]
    assert len(resets) == 3, "the third message of the second session is lost in its replay"
    assert len({reset["seed"] for reset in resets}) == 1
    assert len({reset["episode_id"] for reset in resets}) == 3


@pytest.mark.parametrize(
    ("fake", "options", "message"),
    [
        (losing(4), {}, "after 1 steps.*=retry plays the episode again"),
        (losing(4, 6, 8), {"deterministic": True}, "after 1 steps.*=retry plays the episode again"),
        (losing(4, total=lambda sessions: sessions), {"deterministic": True}, "the episode's reset has another result "),
        (losing(4, total=lambda sessions: 0 if sessions == 1 else 6), {"deterministic": True}, "has another result in a new one"),
    ],
)  # fmt: skip
def test_a_lost_session_that_cannot_be_played_again_is_a_failure(
    fake: FakeOpenEnv, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(EnvironmentFailure, match=message):
        play_sum(fake, **options)


def test_a_server_that_does_not_answer_in_time() -> None:
    class Silent(FakeOpenEnv):
        async def _answer(self, socket: Any) -> None:
            await socket.receive()
            await socket.receive()

    fake = Silent(echo)

    async def play(url: str) -> None:
        with pytest.raises(EnvironmentFailure, match=r"no reply within env\.options\.timeout_s=0\.05"):
            await OpenEnv(url, attempts=1, timeout_s=0.05).areset(seed=0)

    with_server(fake, play)


def test_an_action_that_the_server_refuses_is_answered() -> None:
    def refuse(kind: str, content: Json) -> Json:
        if kind == "reset" or content["text"] == "end":
            return echo(kind, content)
        return {
            "code": "VALIDATION_ERROR",
            "message": "Invalid message",
            "errors": [{"loc": ["text"], "msg": "too short"}],
        }

    async def play(url: str) -> None:
        env = OpenEnv(url, invalid_cost=0.25)
        await env.areset(seed=0)
        (message,), reward, *_ = await env.astep(Message("assistant", "x"))
        assert (message.content, reward) == ("That is no action: Invalid message: text: too short.", -0.25)
        *_, info = await env.astep(Message("assistant", "end"))
        assert info["metrics"]["invalid_turns"] == 1.0

    with_server(FakeOpenEnv(refuse), play)


def test_tools_of_an_mcp_environment() -> None:
    schema = {"properties": {"type": {"const": "call_tool"}, "tool_name": {"type": "string"}, "arguments": {}}}
    tool = {
        "name": "add",
        "description": "Adds.",
        "input_schema": {"type": "object", "properties": {"x": {"type": "integer"}}},
    }

    def reply(kind: str, content: Json) -> Json:
        if kind == "reset":
            return observe(text="Add to 3.")
        if content["type"] == "list_tools":
            return observe(tools=[tool])
        if content["arguments"] == {"x": -1}:
            return observe(tool_name="add", result=None, error={"error_type": "execution_error", "message": "negative"})
        result = {"content": [{"type": "text", "text": "3"}], "structured_content": {"result": 3}}
        return observe(content["arguments"] == {"x": 3}, 1.0, tool_name="add", result=result, error=None)

    async def play(url: str) -> None:
        env = OpenEnv(url)
        (message,), _ = await env.areset(seed=0)
        assert message.content == "Add to 3."
        assert [(tool.name, tool.description) for tool in env.tools] == [("add", "Adds.")]
        unknown = ToolCall("a", "sub", {}, CallStatus.UNKNOWN_TOOL, "no tool sub")
        messages, reward, terminated, *_ = await env.astep(
            Message("assistant", "", (unknown, ToolCall("b", "add", {"x": -1})))
        )
        assert [message.content for message in messages] == ["no tool sub", "Error: negative"]
        assert (reward, terminated) == (0.0, False)
        calls = ToolCall("c", "add", {"x": 3}), ToolCall("d", "add", {"x": 3})
        messages, reward, terminated, _, info = await env.astep(Message("assistant", "", calls))
        assert [(message.tool_call_id, message.content) for message in messages] == [
            ("c", "3"),
            ("d", "The episode is over."),
        ]
        assert (reward, terminated) == (1.0, True)
        assert info["metrics"] == {"steps": 2.0, "invalid_turns": 1.0}

    with_server(FakeOpenEnv(reply, schema), play)


@pytest.mark.parametrize(
    ("fields", "option", "text", "action"),
    [
        ({"text": {"type": "string"}}, None, "any <action>text</action>", {"text": "any <action>text</action>"}),
        ({"n": {"type": "integer"}}, None, "so <action>4</action>", {"n": 4}),
        ({"text": {"type": "string"}, "n": {"type": "integer"}}, "text", "x", {"text": "x"}),
        ({"a": {"type": "integer"}, "b": {"type": "string"}}, None, '{"a": 1, "b": "c"}', {"a": 1, "b": "c"}),
    ],
)
def test_texts_as_actions(fields: Json, option: str | None, text: str, action: Json) -> None:
    schema = {"type": "object", "properties": {**fields, "metadata": {"type": "object"}}, "additionalProperties": False}
    assert TurnActions(schema, option).parse(text) == action


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "no JSON object"),
        ("{", "is no JSON"),
        ('{"a": "x"}', r"'x' is not of type 'integer'"),
        ('{"a": 1, "c": 2}', "unexpected"),
    ],
)
def test_texts_that_are_no_actions(text: str, message: str) -> None:
    fields = {"a": {"type": "integer"}, "b": {"type": "string"}}
    with pytest.raises(ActionError, match=message):
        TurnActions({"properties": fields, "additionalProperties": False}, None).parse(text)


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"unknown key 'env\.options\.transpor'\. Did you mean 'env\.options\.transport'"
    ):
        OpenEnv("http://localhost:1", transpor="http")
    with pytest.raises(
        ConfigError, match=r"env\.options\.url='localhost:1' does not begin|'localhost:1' does not begin"
    ):
        OpenEnv("localhost:1")
    with pytest.raises(ConfigError, match=r"env\.options\.action=move: actions have no such field; they have: text"):
        TurnActions({"properties": {"text": {"type": "string"}}}, "move")
    with pytest.raises(ConfigError, match=r"env\.options\.observation=board: .* it has: text"):
        observation_text({"text": "x"}, "board")
    assert takes_tools({"properties": {"metadata": {}}})
    assert not takes_tools({"properties": {"text": {}}})


def test_observations_as_texts() -> None:
    assert observation_text({"text": "x", "note": None, "list": []}, None) == "x"
    assert observation_text({"a": 1, "b": [1.5]}, None) == "a: 1\nb: [1.5]"
    assert observation_text({"a": 1, "b": [1.5]}, "b") == "[1.5]"


def test_synchronous_methods_share_a_connection() -> None:
    fake = FakeOpenEnv(echo)

    async def play(url: str) -> None:
        env = OpenEnv(url)
        reset = partial(env.reset, seed=0)
        await asyncio.to_thread(reset)
        assert (await asyncio.to_thread(env.step, Message("assistant", "one")))[1] == 0.5
        assert fake.sessions == 1
        await asyncio.to_thread(env.close)

    with_server(fake, play)
    assert fake.sessions == 0
