"""What is special in Responses and Messages; `test_dialects_agree` shows what is the same."""

from typing import Any

import pytest
from gateway_clients import SCHEMA
from gateway_episodes import Play, Program

from agentrl.core.types import Message, ToolCall
from agentrl.gateway.dialects.base import BadRequestError, Reply
from agentrl.gateway.dialects.messages import Messages
from agentrl.gateway.dialects.responses import Responses

REPLY = Reply(0, "e", 0, "m", "hm", "text", (ToolCall("call_0_0", "find", {"word": "x"}),), "tool_calls")


def call_item(id: str) -> dict[str, Any]:
    return {"type": "function_call", "call_id": id, "name": "find", "arguments": "{}"}


def output_item(id: str) -> dict[str, Any]:
    return {"type": "function_call_output", "call_id": id, "output": "r"}


def test_calls_of_a_turn_with_each_result_behind_its_call_are_one_message() -> None:
    """Codex sends them so; the next call belongs to another turn."""
    items = [{"role": "user", "content": "a"}]
    for id in ("call_0_0", "call_0_1", "call_1_0"):
        items += [call_item(id), output_item(id)]
    messages = Responses().request({"input": items}).messages
    assert [(message.role, [call.id for call in message.tool_calls]) for message in messages] == [
        ("user", []),
        ("assistant", ["call_0_0", "call_0_1"]),
        ("tool", []),
        ("tool", []),
        ("assistant", ["call_1_0"]),
        ("tool", []),
    ]


@pytest.mark.parametrize("kept", ["content", "encrypted_content"])
def test_a_program_may_keep_the_reasoning_in_either_place(kept: str) -> None:
    items = Responses().reply(REPLY)["output"]
    reasoning = {"type": "reasoning", "summary": [], kept: items[0][kept]}
    history = [{"role": "user", "content": "a"}, reasoning, *items[1:], output_item("call_0_0")]
    message = Responses().request({"input": history, "instructions": "s"}).messages[2]
    assert message == Message(
        "assistant", "<think>\nhm\n</think>\n\ntext", (ToolCall("call_0_0", "find", {"word": "x"}),)
    )


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported"),
        ({"text": {"format": {"type": "json_schema"}}}, r"text\.format\.type='json_schema'"),
        ({"include": ["message.output_text.logprobs"]}, "include=message"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "item_reference"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input_image"),
        ({"input": [{"type": "reasoning", "encrypted_content": "of another server"}]}, "encrypted_content"),
    ],
)
def test_what_responses_refuses(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequestError, match=words):
        Responses().request({"input": "a", **fields})


def test_results_of_tools_and_texts_of_one_message_are_messages_of_their_own() -> None:
    calls = [{"type": "tool_use", "id": f"call_0_{number}", "name": "find", "input": {}} for number in range(2)]
    results = [
        {"type": "tool_result", "tool_use_id": f"call_0_{number}", "content": [{"type": "text", "text": "r"}]}
        for number in range(2)
    ]
    talk = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": calls},
        {"role": "user", "content": [*results, {"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
    ]
    system = [{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}, {"type": "text", "text": "s"}]
    tools = [{"name": "find", "input_schema": SCHEMA}, {"type": "web_search_20250305", "name": "web_search"}]
    request = Messages().request({"messages": talk, "system": system, "tools": tools, "max_tokens": 9})
    assert [(message.role, message.content) for message in request.messages] == [
        ("system", "s"), ("user", "a"), ("assistant", ""), ("tool", "r"), ("tool", "r"), ("user", "b\nc"),
    ]  # fmt: skip
    assert [tool.name for tool in request.tools] == ["find"]
    assert [(field.name, field.value) for field in request.unsupported] == [("tools", "web_search_20250305")]


def test_tokens_are_counted_without_sampling_and_a_stop_string_is_named(play: Play) -> None:
    async def talk(program: Program) -> None:
        body = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 9, "stop_sequences": ["</end>"]}
        counted = await program.post("/v1/messages/count_tokens", body)
        reply = (await program.post("/v1/messages", body)).json()
        assert counted.json() == {"input_tokens": reply["usage"]["input_tokens"]}
        assert (reply["stop_reason"], reply["stop_sequence"]) == ("stop_sequence", "</end>")
        assert reply["content"] == [{"type": "text", "text": "ab "}]
        for path in ("/v1/messages", "/v1/messages/count_tokens"):
            refused = await program.post(path, body | {"messages": [{"role": "user", "content": [{"type": "image"}]}]})
            assert refused.status_code == 400
            assert refused.json()["error"]["type"] == "invalid_request_error"

    played = play(["ab </end>"], talk)
    assert played.trained() == ["ab </end>"]
