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

ANSWER = {"choices": [{"message": {"role": "assistant", "content": "bet"}}]}


def asked(*replies, **changes):
    """Ask for a turn at a server that gives these replies in turn; return the text and the requests."""

    async def run():
        requests, left = [], list(replies)

        async def handle(request):
            requests.append((request.path, dict(request.headers), json.loads(await request.read())))
            status, body = left.pop(0)
            return web.Response(status=status, body=body if isinstance(body, bytes) else json.dumps(body).encode())

        async with RawTestServer(handle) as server:
            config = EndpointConfig(url=str(server.make_url("/v1")), model="big", **changes)
            endpoint = OpenAiEndpoint(config, backoff_s=0.0)
            text = await endpoint.reply([Message("user", "Your move.")], stop=("</a>",), seed=3)
        return text, requests

    return asyncio.run(run())


def test_what_is_sent():
    text, [(path, headers, body)] = asked((200, ANSWER), api_key="k", temperature=0.5, max_new_tokens=8)
    assert (text, path) == ("bet", "/v1/chat/completions")
    assert headers["Authorization" if "Authorization" in headers else "authorization"] == "Bearer k"
    assert body == {
        "model": "big", "messages": [{"role": "user", "content": "Your move."}], "temperature": 0.5, "max_tokens": 8,
        "seed": 3, "stop": ["</a>"],
    }  # fmt: skip


def test_a_busy_endpoint_is_tried_again():
    text, requests = asked((429, {}), (503, {}), (200, ANSWER))
    assert (text, len(requests)) == ("bet", 3)


@pytest.mark.parametrize(
    ("replies", "message"),
    [
        ([(400, {"error": "no such model"})], "HTTP 400.*no such model"),
        ([(500, {})] * 2, "HTTP 500"),
        ([(200, {"choices": []})], "without a text"),
        ([(200, b"<html>")], "without a text"),
    ],
)
def test_a_failure_is_the_samplers(replies, message):
    with pytest.raises(SamplerError, match=message):
        asked(*replies, attempts=2)


def test_no_server_is_a_failure_too():
    endpoint = OpenAiEndpoint(EndpointConfig(url="http://127.0.0.1:1/v1", model="big", attempts=1))
    with pytest.raises(SamplerError, match="model big: ClientConnector"):
        asyncio.run(endpoint.reply([Message("user", "x")], stop=(), seed=0))
