"""The gateway's server: keys, streams, retries, refusals."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from deadlines import until
from gateway_episodes import ADD, CALL, Play, Program, answer, sampled, user

from agentrl.core.errors import SamplerError
from agentrl.core.types import FailureKind, StopReason
from agentrl.gateway import agent_session

CHAT = "/v1/chat/completions"


def chunks(response: httpx.Response) -> list[dict[str, Any]]:
    """Return the data of a stream's events but for the last, which is ``[DONE]``."""
    assert response.headers["content-type"].startswith("text/event-stream")
    events = [event for event in response.text.split("\n\n") if event and not event.startswith(":")]
    assert events[-1] == "data: [DONE]"
    return [json.loads(event.removeprefix("data: ")) for event in events[:-1]]


def test_every_route_needs_a_key(play: Play) -> None:
    async def talk(program: Program) -> None:
        del program.client.headers["authorization"]
        body = {"messages": [user("a")]}
        for keys in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": "wrong"}, {"authorization": program.key}):
            for method, path in (("POST", CHAT), ("GET", "/v1/models"), ("POST", "/v1/session/reward"), ("GET", "/x")):
                response = await program.client.request(method, path, json=body, headers=keys)
                assert response.status_code == 401, path
                assert response.json()["error"]["type"] == "authentication_error"
        assert (await program.client.post(f"/s/wrong{CHAT}", json=body)).status_code == 401
        for path, keys in ((f"/s/{program.key}{CHAT}", {}), (CHAT, {"x-api-key": program.key})):
            response = await program.client.post(path, json=body, headers=keys)
            assert response.status_code == 200, response.text
        missing = await program.client.get("/v1/nothing", headers={"x-api-key": program.key})
        assert missing.status_code == 404
        models = await program.client.get("/v1/models", headers={"x-api-key": program.key})
        assert [model["id"] for model in models.json()["data"]] == ["policy"]

    assert play(["one", "two"], talk).rollout.stop_reason is StopReason.TERMINATED


def test_a_stream_says_what_a_reply_says(play: Play) -> None:
    async def talk(program: Program) -> None:
        body: dict[str, Any] = {"model": "m", "messages": [user("a")], "tools": [ADD]}
        whole = (await program.post(CHAT, body)).json()["choices"][0]
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        events = chunks(await program.post(CHAT, body))
        deltas = [event["choices"][0]["delta"] for event in events if event["choices"]]
        assert "".join(delta.get("content") or "" for delta in deltas) == whole["message"]["content"] == "Hm. "
        assert [delta["reasoning_content"] for delta in deltas if "reasoning_content" in delta] == ["so"]
        (streamed,) = [call for delta in deltas for call in delta.get("tool_calls", ())]
        (call,) = whole["message"]["tool_calls"]
        assert streamed["function"] == call["function"]
        assert events[-2]["choices"][0]["finish_reason"] == whole["finish_reason"] == "tool_calls"
        assert events[-1]["usage"]["completion_tokens"] == len(text) + 1
        assert {event["id"] for event in events} == {events[0]["id"]}

    text = f"<think>\nso\n</think>\n\nHm. {CALL}"
    play([text, text], talk)


def test_a_stream_is_kept_alive_while_it_waits(play: Play) -> None:
    gate = asyncio.Event()

    async def talk(program: Program) -> None:
        headers = [(b"authorization", f"Bearer {program.key}".encode())]
        scope = {"type": "http", "method": "POST", "path": CHAT, "headers": headers, "query_string": b""}
        parts: list[bytes] = []
        arriving = asyncio.Queue[dict[str, Any]]()
        arriving.put_nowait(
            {"type": "http.request", "body": json.dumps({"messages": [user("a")], "stream": True}).encode()}
        )

        async def send(message: Any) -> None:
            parts.append(message.get("body", b""))

        request = asyncio.create_task(program.gateway.app(scope, arriving.get, send))
        await until(lambda: parts.count(b": waiting\n\n") > 1)
        gate.set()
        await request
        assert b"".join(parts).endswith(b"data: [DONE]\n\n")

    play(["one"], talk, gate=gate)


@pytest.mark.parametrize(
    ("first", "second", "is_retry"),
    [
        ({}, {}, False),
        ({}, {"x-stainless-retry-count": "1"}, True),
        ({"idempotency-key": "k"}, {"idempotency-key": "k"}, True),
        ({"idempotency-key": "k"}, {"idempotency-key": "other"}, False),
        ({"x-stainless-retry-count": "0"}, {"x-stainless-retry-count": "0"}, False),
    ],
)
def test_a_retry_gets_the_answer_again(play: Play, first: Any, second: Any, is_retry: bool) -> None:
    async def talk(program: Program) -> None:
        replies = [await program.chat(user("a"), headers=headers) for headers in (first, second)]
        assert (replies[0] == replies[1]) == is_retry

    played = play(["one", "two"], talk)
    assert len(played.sampler.requests) == (1 if is_retry else 2)


@pytest.mark.parametrize("count", [None, "1"])
def test_a_retry_of_a_turn_in_progress_joins_it(play: Play, count: str | None) -> None:
    gate = asyncio.Event()
    headers = {} if count is None else {"x-stainless-retry-count": count}

    async def talk(program: Program) -> None:
        first = asyncio.create_task(program.chat(user("a")))
        await until(lambda: bool(program.session.turns))
        second = asyncio.create_task(program.chat(user("a"), headers=headers))
        other = asyncio.create_task(program.chat(user("a"), headers={"x-stainless-retry-count": "0"}))
        await until(lambda: program.session.turns == 2)
        gate.set()
        assert await first == await second != await other

    played = play(["one", "two"], talk, gate=gate)
    assert sorted(played.trained()) == [sampled(["one"]), sampled(["two"])]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("is_sampled", [False, True])
def test_a_turn_whose_client_is_lost_goes_on_for_its_retry(play: Play, stream: bool, is_sampled: bool) -> None:
    gate = asyncio.Event()

    async def talk(program: Program) -> None:
        request = asyncio.create_task(program.chat(user("a"), stream=stream))
        await until(lambda: bool(program.session.turns))
        request.cancel()
        await asyncio.wait({request})
        if is_sampled:
            gate.set()
            await until(lambda: not program.session.is_sampling)
        retry = asyncio.create_task(program.chat(user("a"), headers={"x-stainless-retry-count": "0"}, stream=False))
        gate.set()
        if not stream:  # the body differs otherwise
            assert (await retry)["content"] == "one"
        await retry

    played = play(["one", "two"], talk, gate=gate)
    assert len(played.sampler.requests) == (2 if stream else 1)
    assert played.trained()[0] == sampled(["one"])


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"n": 2}, "n=2"),
    ({"logprobs": True}, "logprobs is not supported"),
    ({"audio": {"voice": "x"}}, "audio is not supported"),
    ({"modalities": ["audio"]}, "modalities"),
    ({"functions": [{}]}, "functions is not supported"),
    ({"response_format": {"type": "json_object"}}, "response_format.type='json_object'"),
    ({"messages": []}, "messages is empty"),
    ({"messages": "a"}, "Expected `array`"),
    ({"messages": [{"role": "robot", "content": "a"}]}, "robot"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "image_url"),
    ({"messages": [user("a"), {"role": "assistant", "content": "b"}]}, "the last message has the role assistant"),
    (
        {"messages": [user("a"), {"role": "tool", "tool_call_id": "c9", "content": "b"}]},
        "the call 'c9', which no message",
    ),
    ({"messages": [user("\ud800")]}, "half a character"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "the name 'a b'"),
    ({"tools": [ADD, ADD]}, "several have the name 'add'"),
    ({"tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": 7}}}]}, "JSON Schema is invalid"),
    ({"tool_choice": "maybe"}, "tool_choice='maybe'"),
    ({"stop": [""]}, "stop has"),
    ({"max_tokens": 0}, "max_tokens=0"),
    ({"stream": "yes"}, "stream"),
]


def test_what_is_not_supported_is_refused_and_the_session_goes_on(play: Play) -> None:
    async def talk(program: Program) -> None:
        body = {"model": "m", "messages": [user("a")]}
        for fields, words in REFUSED:
            # Not through httpx, which encodes no half characters.
            content = json.dumps(body | fields).encode()
            response = await program.client.post(CHAT, content=content)
            assert response.status_code == 400, (fields, response.text)
            error = response.json()["error"]
            assert error["type"] == "invalid_request_error"
            assert words in error["message"], error
        for content, status in ((b"{", 400), (b"[1]", 400), (b"\xff", 400), (b"[" * 10**5, 400), (b'{"a": NaN}', 400)):
            assert (await program.client.post(CHAT, content=content)).status_code == status, content[:9]
        for headers, status in (({"content-encoding": "br"}, 415), ({"content-length": str(10**9)}, 413)):
            assert (await program.client.post(CHAT, content=b"{}", headers=headers)).status_code == status
        assert (await program.chat(user("a")))["content"] == "one"

    assert play(["one"], talk).trained() == [sampled(["one"])]


def test_what_has_no_effect_is_said(play: Play, caplog: pytest.LogCaptureFixture) -> None:
    async def talk(program: Program) -> None:
        fields = {"temperature": 0.3, "top_p": 1, "tool_choice": "required", "seed": 7}
        for _ in range(2):
            response = await program.post(CHAT, {"messages": [user("a")], "tools": [ADD], **fields})
            assert response.headers["x-agentrl-ignored"] == (
                "temperature=0.3 (the run's sampling parameters (sampler.*) hold); "
                "seed=7 (the run's sampling parameters (sampler.*) hold); "
                "tool_choice=required (the policy is not forced to call a tool)"
            )
        assert (
            "x-agentrl-ignored" not in (await program.post(CHAT, {"messages": [user("b")], "temperature": 1})).headers
        )

    play(["one", "two", "three"], talk)


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/messages"])
def test_tools_of_a_provider_are_left_out_for_a_reason_of_their_own(
    play: Play, path: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    reason = "tools that a provider runs itself are not offered to the policy"
    monkeypatch.setattr(agent_session, "_logged", set())

    async def talk(program: Program) -> None:
        body = {"input": "a"} if path == "/v1/responses" else {"messages": [user("a")], "max_tokens": 9}
        response = await program.post(path, {**body, "tools": [{"type": "web_search", "name": "web_search"}]})
        assert response.headers["x-agentrl-ignored"] == f"tools=web_search ({reason})"

    play(["one"], talk)
    (line,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
    assert line.startswith(f"the agent sets tools=web_search, which has no effect: {reason}.")
    assert "sampl" not in line


def test_limits_are_answered_with_a_text_that_is_not_trained(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = await program.chat(user("a"))
        second = await program.chat(user("a"), first, user("b"))
        assert "rollout.max_turns" in second["content"]
        third = await program.chat(user("a"), first, user("b"), second, user("c"))
        assert "rollout.max_turns" in third["content"]

    played = play(["one"], talk, max_turns=1)
    assert played.trained() == [sampled(["one"])]
    assert played.rollout.stop_reason is StopReason.MAX_TURNS
    assert [reply.json()["choices"][0]["finish_reason"] for reply in played.replies] == ["stop"] * 3


def test_a_conversation_that_is_full_ends_and_a_summary_goes_on(play: Play) -> None:
    async def talk(program: Program) -> None:
        system = {"role": "system", "content": "s"}
        first = await program.chat(system, user("a" * 150))
        full = await program.chat(system, user("a" * 150), first, user("b" * 150))
        assert "rollout.max_tokens" in full["content"]
        assert (await program.chat(system, user("summary")))["content"] == "two"

    played = play(["one", "two"], talk, max_tokens=300)
    assert played.rollout.stop_reason is StopReason.TERMINATED
    assert played.trained() == [sampled(["one"]), sampled(["two"])]


def test_the_last_message_may_be_of_the_system(play: Play) -> None:
    """Claude Code describes the folder after the prompt."""

    async def talk(program: Program) -> None:
        system = {"role": "system", "content": "You are in /work."}
        first = await program.chat(user("a"), system)
        await program.chat(user("a"), system, first, user("b"), system)
        body = {"max_tokens": 9, "messages": [user("c"), system]}
        assert (await program.post("/v1/messages", body)).status_code == 200
        assert (await program.post(CHAT, {"messages": [user("a"), first]})).status_code == 400

    played = play(["one", "two", "three"], talk)
    assert played.trained() == [sampled(["one", "two"]), sampled(["three"])]
    for prompt in played.prompts():
        assert prompt.endswith("<|im_start|>system\nYou are in /work.<|im_end|>\n<|im_start|>assistant\n")


def test_max_tokens_of_a_request_hold(play: Play) -> None:
    async def talk(program: Program) -> None:
        first = (await program.post(CHAT, {"messages": [user("a")], "max_completion_tokens": 3})).json()["choices"][0]
        assert (first["message"]["content"], first["finish_reason"]) == ("abc", "length")
        await program.chat(user("a"), first["message"], user("b"))

    assert play(["abcdef", "two"], talk).trained() == ["abctwo<|im_end|>"]


def test_a_failing_engine_ends_the_episode_and_is_no_fault_of_the_request(play: Play) -> None:
    async def talk(program: Program) -> None:
        for _ in range(2):
            response = await program.post(CHAT, {"messages": [user("a")]})
            assert response.status_code == 503
            assert response.headers["x-should-retry"] == "false"
            assert response.json()["error"]["type"] == "server_error"

    played = play([SamplerError("gone")], talk)
    assert played.rollout.failure is not None
    assert played.rollout.failure.kind is FailureKind.SAMPLER


def test_calls_that_cannot_be_read_are_text_and_others_are_the_programs(play: Play) -> None:
    broken, unknown = '<tool_call>{"name": "add"', '<tool_call>{"name": "sub", "arguments": {"x": 1}}</tool_call>'

    async def talk(program: Program) -> None:
        first = await program.chat(user("a"), tools=[ADD])
        assert first["content"] == broken
        assert "tool_calls" not in first
        second = await program.chat(user("a"), first, user("again"), tools=[ADD])
        (call,) = second["tool_calls"]
        assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("sub", {"x": 1})
        await program.chat(user("a"), first, user("again"), second, answer(call, "no such tool"), tools=[ADD])

    script = [broken, unknown, "three"]
    assert play(script, talk).trained() == [sampled(script)]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "history"), [(CHAT, "messages"), ("/v1/responses", "input"), ("/v1/messages", "messages")]
)
def test_whole_numbers_of_arguments_have_all_their_digits(play: Play, path: str, history: str, stream: bool) -> None:
    number = "123456789012345678901234567890"

    async def talk(program: Program) -> None:
        body = {history: [user("a")], "max_tokens": 100, "stream": stream}
        response = await program.post(path, body)
        assert response.status_code == 200
        assert number in response.text

    play([f'<tool_call>{{"name": "add", "arguments": {{"a": {number}}}}}</tool_call>'], talk)


def test_the_program_sets_the_reward_only_if_it_may(play: Play) -> None:
    async def talk(program: Program) -> None:
        await program.chat(user("a"))
        assert (await program.post("/v1/session/reward", {"reward": 1})).status_code == 403
        program.sessions.may_reward = True
        for body in ({"reward": "x"}, {}, {"reward": 1, "metrics": {"a": None}}):
            assert (await program.post("/v1/session/reward", body)).status_code == 400
        assert (await program.post("/v1/session/reward", {"reward": 0.5, "metrics": {"steps": 3}})).status_code == 200

    rollout = play(["one"], talk).rollout
    assert (rollout.reward, rollout.metrics) == (0.5, {"steps": 3.0})


def test_a_turn_in_progress_when_the_program_ends_is_aborted(play: Play) -> None:
    gate = asyncio.Event()

    async def talk(program: Program) -> None:
        beginning = asyncio.create_task(program.chat(user("a")))
        await until(lambda: program.session.turns == 1)
        assert not program.session.has_turns
        gate.set()
        first = await beginning
        assert program.session.has_turns
        gate.clear()
        pending = asyncio.create_task(program.chat(user("a"), first, user("b")))
        await until(lambda: program.session.turns == 2)
        pending.cancel()

    played = play(["one", "two"], talk, gate=gate)
    assert played.trained() == [sampled(["one"])]
    assert not played.sampler.running


def test_a_request_whose_turn_is_aborted_is_told_that_the_episode_is_over(play: Play) -> None:
    gate = asyncio.Event()

    async def talk(program: Program) -> None:
        body = {"model": "m", "messages": [user("a")]}
        pending = asyncio.create_task(program.post("/v1/chat/completions", body))
        await until(lambda: program.session.turns == 1)
        await program.sessions.close()
        response = await pending
        assert (response.status_code, response.headers["x-should-retry"]) == (503, "false")
        assert response.json()["error"]["message"] == "this episode is over"
        gate.set()
        await program.chat(user("a"))

    assert play(["one", "two"], talk, gate=gate).rollout.failure is None
