"""A model behind chat completions: what is sent, what is read, and what is no turn."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from agentrl import Message
from agentrl.clients.chat_completions import ChatCompletions, open_chat_model
from agentrl.clients.chat_messages import conversation_to_wire
from agentrl.clients.http import ServiceClient
from agentrl.config.services import ChatModelConfig
from agentrl.core.chat_endpoint import ChatReply, Usage
from agentrl.core.errors import SamplerError
from agentrl.core.tool import Tool
from agentrl.core.types import CallStatus, FinishReason, SamplingParams, ToolCall

from .conftest import CUT, Serve, Served

ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "number"}}})
PROMPT = ({"role": "user", "content": "Your move."},)


def answer(text: str | None = "bet", reason: str | None = "stop", **message: Any) -> dict[str, Any]:
    return {"choices": [{"message": {"role": "assistant", "content": text, **message}, "finish_reason": reason}]}


def call(arguments: Any, name: str = "add", **fields: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}, **fields}


def turn(
    serve: Serve, *replies: Any, stop: tuple[str, ...] = (), tools: Any = (), params: Any = None, **options: Any
) -> Served:
    """Request a turn; the result is the reply, and the model."""

    async def talk(url: str, sleep: Any) -> Any:
        config = ChatModelConfig(url=url, model="big", **options)
        model = ChatCompletions(config, "model.endpoint", ServiceClient(config, "model.endpoint", sleep=sleep))
        sampling = params or SamplingParams(max_new_tokens=8, temperature=0.5, seed=3, stop=stop)
        return await model.reply(PROMPT, tools, sampling), model

    return serve(talk, *replies)


def reply_of(*arguments: Any, **options: Any) -> ChatReply:
    reply: ChatReply = turn(*arguments, **options).result[0]
    return reply


def test_what_is_sent(serve: Serve) -> None:
    served = turn(serve, (200, answer()), api_key="k")
    [request] = served.requests
    assert served.result[0].message == Message("assistant", "bet")
    assert (request.path, request.headers["Authorization"]) == ("/v1/chat/completions", "Bearer k")
    assert request.body == {
        "model": "big", "messages": [*PROMPT], "temperature": 0.5, "max_tokens": 8, "seed": 3,
    }  # fmt: skip


def test_further_sampling_parameters_tools_and_options(serve: Serve) -> None:
    params = SamplingParams(max_new_tokens=8, temperature=0.0, top_p=0.9, top_k=5)
    options = {"reasoning_effort": "low", "temperature": None}
    [request] = turn(serve, (200, answer()), params=params, tools=(ADD,), options=options).requests
    function = {"name": "add", "description": "Add two numbers.", "parameters": ADD.parameters}
    assert request.body == {
        "model": "big", "messages": [*PROMPT], "max_tokens": 8, "top_p": 0.9, "top_k": 5, "reasoning_effort": "low",
        "tools": [{"type": "function", "function": function}],
    }  # fmt: skip


def test_another_name_of_the_limit(serve: Serve) -> None:
    """OpenAI's reasoning models refuse ``max_tokens``."""
    refusal = (400, {"error": {"message": "Use 'max_completion_tokens' instead of 'max_tokens'."}})
    served = turn(serve, refusal, (200, answer()))
    assert [("max_tokens" in request.body, "max_completion_tokens" in request.body) for request in served.requests] == [
        (True, False), (False, True),
    ]  # fmt: skip


def test_a_reply_that_the_server_ended_is_no_turn(serve: Serve) -> None:
    """SGLang's status is 200 then, with the tokens so far."""
    served = turn(serve, (200, answer("be", "abort")), (200, answer()))
    assert (served.result[0].message.content, len(served.requests)) == ("bet", 2)


@pytest.mark.parametrize(
    ("text", "choice", "expected"),
    [
        ("<a> x", {"matched_stop": "</a>"}, "<a> x</a>"),  # SGLang
        ("x", {"stop_reason": "</b>"}, "x</b>"),  # vLLM
        ("<b> x", {}, "<b> x</b>"),  # OpenAI names none
        ("x", {"matched_stop": 151645}, "x"),  # the end token
        ("<a> x</a>", {"matched_stop": "</b>"}, "<a> x</a>"),
    ],
)
def test_a_stop_string_that_the_server_leaves_out_is_put_back(
    serve: Serve, text: str, choice: dict[str, Any], expected: str
) -> None:
    body = answer(text)
    body["choices"][0] |= choice
    served = turn(serve, (200, body), stop=("</a>", "</b>"))
    assert served.requests[0].body["stop"] == ["</a>", "</b>"]
    assert served.result[0].message.content == served.result[0].wire["content"] == expected


def test_a_model_that_takes_no_stop_strings(serve: Serve) -> None:
    refusal = (400, {"error": {"message": "Unsupported parameter: 'stop' is not supported with this model."}})
    served = turn(serve, refusal, (200, answer("bet</a> and")), stop=("</a>",))
    assert [request.body.get("stop") for request in served.requests] == [["</a>"], None]
    assert served.result[0].message.content == "bet</a>"


@pytest.mark.parametrize(
    ("text", "expected"), [("bet</a> and then", "bet</a>"), ("bet", "bet"), ("", ""), ("a</b>b</a>", "a</b>")]
)
def test_the_text_ends_after_a_stop_string_as_in_a_turn_of_the_policy(serve: Serve, text: str, expected: str) -> None:
    reply = reply_of(serve, (200, answer(text, "length", tool_calls=[call("{}")])), stop=("</a>", "</b>"), tools=(ADD,))
    assert reply.message.content == reply.wire["content"] or not expected
    assert reply.message.content == expected
    was_cut = text != "" and text != "bet"
    assert (reply.finish_reason is FinishReason.STOP, reply.message.tool_calls == ()) == (was_cut, was_cut)


def test_a_turn_that_its_limit_ended_has_a_text(serve: Serve) -> None:
    reply = reply_of(serve, (200, answer("be", "length")))
    assert (reply.message.content, reply.finish_reason) == ("be", FinishReason.LENGTH)


def test_content_in_parts(serve: Serve) -> None:
    body = answer()
    body["choices"][0]["message"]["content"] = [{"type": "text", "text": "b"}, {"type": "text", "text": "et"}]
    assert reply_of(serve, (200, body)).message.content == "bet"


def test_reasoning_is_in_the_turn_and_sent_back_as_it_was_written(serve: Serve) -> None:
    body = (200, answer("bet", reasoning_content="They fold.", reasoning_details=[{"signature": "x"}], refusal=None))
    reply = reply_of(serve, body)
    assert reply.message.content == "<think>\nThey fold.\n</think>\n\nbet"
    assert reply.wire == {
        "role": "assistant", "content": "bet", "reasoning_content": "They fold.",
        "reasoning_details": [{"signature": "x"}],
    }  # fmt: skip
    assert reply_of(serve, body, send_reasoning=False).wire == {"role": "assistant", "content": "bet"}


def test_reasoning_in_the_text_stays_there(serve: Serve) -> None:
    text = "<think>\nThey fold.\n</think>\n\nbet"
    reply = reply_of(serve, (200, answer(text)))
    assert reply.message.content == reply.wire["content"] == text


def test_calls(serve: Serve) -> None:
    signature = {"extra_content": {"google": {"thought_signature": "s"}}}
    calls = [call('{"a": 1.0}', index=0, **signature), call("{", id="c2"), call("[1]", id="c3"), call(None, id="c4")]
    reply = reply_of(serve, (200, answer(None, "tool_calls", tool_calls=calls)), tools=(ADD,))
    assert reply.message.content == ""
    first, second, third, fourth = reply.message.tool_calls
    assert first == ToolCall("c1", "add", {"a": 1.0})
    assert (second.status, third.status, fourth) == (
        CallStatus.INVALID_JSON, CallStatus.INVALID_JSON, ToolCall("c4", "add", {}),
    )  # fmt: skip
    assert "the arguments of add are no JSON object: [1]" in third.fault
    wires = reply.wire["tool_calls"]
    assert wires[0] == call('{"a": 1.0}', **signature)
    assert [wire["function"]["arguments"] for wire in wires[1:]] == ["{}", "{}", "{}"]


def test_usage_is_counted(serve: Serve) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 4, "prompt_tokens_details": {"cached_tokens": 5},
             "completion_tokens_details": {"reasoning_tokens": 3}}  # fmt: skip
    reply, model = turn(serve, (503, {}), (200, answer() | {"usage": usage})).result
    assert reply.usage == model.usage == Usage(9, 4, 5, 3)
    assert (model.client.counters.requests, model.client.counters.retries) == (2, 1)
    assert reply_of(serve, (200, answer() | {"usage": {"prompt_tokens": None}})).usage == Usage()


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([(400, {"error": "no such model"})], "HTTP 400: no such model; model.endpoint.options sets further fields"),
        ([(500, {})], "HTTP 500"),
        ([(200, {"choices": []})], "without a text"),
        ([(200, [])], "without a text"),
        ([(200, b"<html>")], "a page of HTML or XML, and no JSON"),
        ([(200, answer(None))], "without a text"),
        ([(200, answer(None, "tool_calls", tool_calls=[{"id": "c"}]))], "without a text"),
        ([(200, answer("", "length"))], "max_new_tokens=8 ended a reply before it had a text; raise it"),
        ([(200, answer("", "content_filter"))], "filter withheld the reply"),
        ([(200, answer("be", "abort"))], "finish_reason='abort'"),
        ([(200, answer("be", None))], "finish_reason=None"),
        ([CUT], "the connection was lost"),
    ],
)
def test_a_failure_is_the_samplers(serve: Serve, replies: list[Any], message: str) -> None:
    with pytest.raises(SamplerError, match=rf"/v1/chat/completions, model big: .*{message}"):
        turn(serve, *replies, attempts=2)


def test_what_is_no_chat_model() -> None:
    with pytest.raises(ValueError, match="leave out /chat/completions"):
        ChatModelConfig(url="http://a/v1/chat/completions", model="big")
    with pytest.raises(ValueError, match=r"options\.messages=.*agentrl sets this field"):
        ChatModelConfig(url="http://a/v1", model="big", options={"messages": []})


def test_a_process_has_one_client_of_a_model() -> None:
    """So the limits hold for all of its episodes, and for lineups that were sent to it."""
    config = ChatModelConfig(url="http://a/v1", model="big")
    model = open_chat_model(config, "k")
    assert open_chat_model(config.model_copy(), "k") is model
    assert pickle.loads(pickle.dumps(model)) is model
    assert open_chat_model(config.model_copy(update={"model": "small"}), "k") is not model


def test_messages_of_a_conversation() -> None:
    messages = [
        Message("system", "Be brief."),
        Message("user", "1 + 2?"),
        Message("assistant", "<think>\nhm\n</think>\n\nLet me see.", (ToolCall("c1", "add", {"a": 1}),)),
        Message("tool", "3", tool_call_id="c1"),
        Message("tool", "unasked", tool_call_id="c9"),
        Message("user", "<info>", inline=True),
    ]
    assert conversation_to_wire(messages) == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "1 + 2?"},
        {"role": "assistant", "content": "Let me see.", "reasoning_content": "hm",
         "tool_calls": [call('{"a": 1}')]},
        {"role": "tool", "content": "3", "tool_call_id": "c1"},
        {"role": "user", "content": "unasked"},
        {"role": "user", "content": "<info>"},
    ]  # fmt: skip
