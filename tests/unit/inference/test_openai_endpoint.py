"""A player behind an endpoint of the OpenAI protocol: what is sent, what is tried again, what fails."""

import asyncio
import json

import pytest
from aiohttp import web
from aiohttp.test_utils import RawTestServer

from agentrl import Message
from agentrl.config.tasks import EndpointConfig
from agentrl.core.errors import SamplerError
from agentrl.inference.client.openai_endpoint import OpenAiEndpoint


def answer(text="bet", reason="stop"):
    return {"choices": [{"message": {"role": "assistant", "content": text}, "finish_reason": reason}]}


def asked(*replies, stop=("</a>",), **changes):
    """Ask for a turn at a server that gives these replies in turn; return the text and the requests."""

    async def run():
        requests, remaining_replies = [], list(replies)

        async def handle(request):
            if remaining_replies[0] is None:
                remaining_replies.pop(0)
                request.transport.abort()
                return web.Response()
            requests.append((request.path, dict(request.headers), json.loads(await request.read())))
            status, body = remaining_replies.pop(0)
            return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode())

        async with RawTestServer(handle) as server:
            config = EndpointConfig(url=str(server.make_url("/v1")), model="big", **changes)
            endpoint = OpenAiEndpoint(config, backoff_s=0.0)
            text = await endpoint.reply([Message("user", "Your move.")], stop=stop, seed=3)
        return text, requests

    return asyncio.run(run())


def test_what_is_sent():
    text, [(path, headers, body)] = asked((200, answer()), api_key="k", temperature=0.5, max_new_tokens=8)
    assert (text, path) == ("bet", "/v1/chat/completions")
    assert headers["Authorization" if "Authorization" in headers else "authorization"] == "Bearer k"
    assert body == {
        "model": "big", "messages": [{"role": "user", "content": "Your move."}], "temperature": 0.5, "max_tokens": 8,
        "seed": 3,
    }  # fmt: skip


def test_a_busy_endpoint_is_tried_again():
    text, requests = asked((429, {}), (503, {}), (200, answer()))
    assert (text, len(requests)) == ("bet", 3)


def test_a_lost_connection_is_tried_again():
    assert asked(None, (200, answer()))[0] == "bet"


def test_a_reply_that_the_server_ended_is_no_turn():
    """SGLang's status is 200 then, with the tokens so far."""
    text, requests = asked((200, answer("be", "abort")), (200, answer()))
    assert (text, len(requests)) == ("bet", 2)


@pytest.mark.parametrize(
    ("text", "expected"), [("bet</a> and then", "bet</a>"), ("bet", "bet"), ("", ""), ("a</b>b</a>", "a</b>")]
)
def test_the_text_ends_after_a_stop_string_as_in_a_turn_of_the_policy(text, expected):
    assert asked((200, answer(text)), stop=("</a>", "</b>"))[0] == expected


def test_a_turn_that_its_limit_ended_has_a_text():
    assert asked((200, answer("be", "length")))[0] == "be"


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([(400, {"error": "no such model"})], "HTTP 400.*no such model"),
        ([(500, {})] * 2, "HTTP 500"),
        ([(200, {"choices": []})], "without a text"),
        ([(200, b"<html>")], "without a text"),
        ([(200, answer(None))], "without a text"),
        ([(200, answer("", "length"))], "max_new_tokens=256 ended a reply before it had a text; raise it"),
        ([(200, answer("be", "abort"))] * 2, "finish_reason='abort'"),
        ([None, None], "Server disconnected"),
    ],
)
def test_a_failure_is_the_samplers(replies, message):
    with pytest.raises(SamplerError, match=message):
        asked(*replies, attempts=2)


def test_no_server_is_a_failure_too():
    endpoint = OpenAiEndpoint(EndpointConfig(url="http://127.0.0.1:1/v1", model="big", attempts=1))
    with pytest.raises(SamplerError, match="model big: ClientConnector"):
        asyncio.run(endpoint.reply([Message("user", "x")], stop=(), seed=0))


def test_a_reply_that_does_not_come_in_time_is_a_failure_with_the_limit():
    async def run():
        released = asyncio.Event()

        async def handle(request):
            await released.wait()
            return web.Response()

        async with RawTestServer(handle) as server:
            config = EndpointConfig(url=str(server.make_url("/v1")), model="big", attempts=2, timeout_s=0.05)
            try:
                await OpenAiEndpoint(config, backoff_s=0.0).reply([Message("user", "x")], stop=(), seed=0)
            finally:
                released.set()

    with pytest.raises(SamplerError, match=r"no reply within timeout_s=0\.05"):
        asyncio.run(run())


def test_an_address_without_http_is_refused_at_once():
    with pytest.raises(ValueError, match=r"'127.0.0.1:1/v1' does not begin with http://"):
        EndpointConfig(url="127.0.0.1:1/v1", model="big")
