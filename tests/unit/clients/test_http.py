"""The client of services that others run: limits, retries, waits, time-outs, and messages that name the key to change."""

from __future__ import annotations

import asyncio
import pickle
import re
import socket
from datetime import UTC, datetime, timedelta
from email.utils import format_datetime
from typing import Any

import pytest
from pydantic import ValidationError

from agentrl.clients.http import ServiceClient, UnusableReplyError, is_loopback
from agentrl.config.services import ServiceConfig
from agentrl.core.errors import ConfigError, ServiceError, ServiceRefusedError

from .conftest import CUT, SILENT, Serve, Served

KEY = "judge.service"


def post(serve: Serve, *replies: Any, read: Any = lambda reply: reply, times: int = 1, **options: Any) -> Served:
    """Send requests; the result is the last reply, and the client's counters."""

    async def talk(url: str, sleep: Any) -> Any:
        client = ServiceClient(ServiceConfig(url=url, **options), KEY, sleep=sleep)
        try:
            results = await asyncio.gather(*(client.post("/score", {"n": number}, read) for number in range(times)))
        except ServiceError as error:
            return error, client.counters
        return results[-1], client.counters

    return serve(talk, *replies)


def failure_message(serve: Serve, *replies: Any, **options: Any) -> str:
    """Return the message of a request that fails."""
    error, counters = post(serve, *replies, **options).result
    assert isinstance(error, ServiceError), error
    assert counters.failures == 1
    assert type(pickle.loads(pickle.dumps(error))) is type(error)
    assert str(pickle.loads(pickle.dumps(error))) == str(error)
    return str(error)


def test_a_request_and_its_reply(serve: Serve) -> None:
    served = post(serve, (200, {"score": 1.5}), api_key="k")
    reply, counters = served.result
    [request] = served.requests
    assert reply == {"score": 1.5}
    assert (request.path, request.body) == ("/v1/score", {"n": 0})
    assert request.headers["Authorization"] == "Bearer k"
    assert (counters.requests, counters.retries, counters.failures) == (1, 0, 0)


@pytest.mark.parametrize("fault", [(429, {}), (408, {}), (500, {}), (503, b"busy"), (200, b'{"cut'), CUT])
def test_what_can_succeed_is_sent_again(serve: Serve, fault: Any) -> None:
    served = post(serve, fault, fault, (200, 7))
    reply, counters = served.result
    assert (reply, counters.requests, counters.retries, counters.failures) == (7, 3, 2, 0)
    first, second = served.waits
    assert 0.5 <= first <= 1.0 <= second <= 2.0  # doubled, and at random down to half of it


@pytest.mark.parametrize("fault", [(400, {}), (401, {}), (404, {}), (301, {}), (422, {})])
def test_what_would_be_refused_again_is_not(serve: Serve, fault: Any) -> None:
    served = post(serve, fault, (200, 7))
    error, counters = served.result
    assert isinstance(error, ServiceRefusedError)
    assert (error.status, counters.requests, served.waits) == (fault[0], 1, [])


def test_attempts_are_bounded(serve: Serve) -> None:
    served = post(serve, (500, {"error": {"message": "worker died"}}), attempts=3, max_wait_s=1.5)
    error, counters = served.result
    assert (counters.requests, counters.retries, counters.failures) == (3, 2, 1)
    assert max(served.waits) <= 1.5
    assert str(error).endswith("/v1/score: HTTP 500: worker died, at the last of 3 attempts")


@pytest.mark.parametrize(
    ("headers", "seconds"),
    [
        ({"Retry-After": "7"}, 7.0),
        ({"retry-after-ms": "2500"}, 2.5),
        ({"Retry-After": "0"}, None),
        ({"Retry-After": "soon"}, None),
        ({"Retry-After": "nan"}, None),
    ],
)
def test_a_wait_that_the_service_requests(serve: Serve, headers: dict[str, str], seconds: float | None) -> None:
    served = post(serve, (429, {}, headers), (200, 7))
    assert served.result[0] == 7
    if seconds is None:
        assert 0.5 <= served.waits[0] <= 1.0
    else:
        assert served.waits[0] == seconds
        assert len(served.waits) == 2  # and the time that is left of it: nothing was waited here
        assert 0 < served.waits[1] <= seconds


def test_a_wait_until_a_date(serve: Serve) -> None:
    date = format_datetime(datetime.now(UTC) + timedelta(seconds=30), usegmt=True)
    served = post(serve, (503, {}, {"Retry-After": date}), (200, 7))
    assert 1 < served.waits[0] <= 30


def test_the_others_wait_too(serve: Serve) -> None:
    """A service that requests silence from one request wants none of the others."""
    served = post(serve, (429, {}, {"Retry-After": "20"}), (200, 7), times=2, concurrency=1)
    assert len(served.requests) == 3
    assert sum(wait > 10 for wait in served.waits) >= 2


def test_a_wait_that_is_too_long_is_a_failure(serve: Serve) -> None:
    message = failure_message(serve, (429, {"error": "quota"}, {"Retry-After": "3600"}))
    assert "HTTP 429: quota; judge.service.concurrency=64" in message
    assert message.endswith("it requests a wait of 3600 s, and judge.service.max_wait_s=60")


def test_the_service_says_whether_to_send_again(serve: Serve) -> None:
    assert post(serve, (503, {}, {"x-should-retry": "false"}), (200, 7)).result[1].requests == 1
    assert post(serve, (400, {}, {"x-should-retry": "true"}), (200, 7)).result[0] == 7


def test_at_most_so_many_requests_at_the_same_time(serve: Serve) -> None:
    served = post(serve, (200, 7), times=12, concurrency=3)
    assert len(served.requests) == 12
    assert served.most_at_once <= 3


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        ((401, {"error": {"message": "bad key"}}), "HTTP 401: bad key; no key was sent: set judge.service.api_key_env"),
        (
            (404, b"<html><title> Not here </title>"),
            "HTTP 404: a page of HTML or XML, 'Not here'; is judge.service.url=",
        ),
        ((302, b"", {"Location": "https://login/"}), "redirects to 'https://login/': set judge.service.url to that"),
        ((200, b"<!doctype html><title>Sign in</title>"), "the reply is a page of HTML or XML, 'Sign in', and no JSON"),
        ((200, b"[" * 100_000), "the reply is no JSON"),
        ((422, {"detail": [{"loc": ["body"], "msg": "field required"}]}), "field required"),
        ((400, "x" * 10_000), f"HTTP 400: {'x' * 300}$"),
    ],
)
def test_messages(serve: Serve, reply: Any, message: str) -> None:
    assert re.search(message, failure_message(serve, reply, attempts=1))


def test_a_key_is_in_no_message(serve: Serve) -> None:
    secret = "sk-abcdefghijklmnopqrstuvwxyz"
    message = failure_message(serve, (401, {"error": {"message": f"Incorrect API key: {secret}"}}), api_key=secret)
    assert secret[6:] not in message
    assert "judge.service.api_key=<redacted> was sent" in message


def test_a_reply_that_is_read_as_unusable(serve: Serve) -> None:
    def read(reply: Any) -> Any:
        if reply != 7:
            raise UnusableReplyError("no seven", again=reply == 6)
        return reply

    assert post(serve, (200, 6), (200, 7), read=read).result[1].retries == 1
    assert failure_message(serve, (200, 5), read=read).endswith("/v1/score: no seven")
    assert "no seven, at the last of 2 attempts" in failure_message(serve, (200, 6), read=read, attempts=2)


def test_a_service_that_does_not_answer(serve: Serve) -> None:
    message = failure_message(serve, SILENT, attempts=2, timeout_s=0.05)
    assert message.endswith("/v1/score: no reply within judge.service.timeout_s=0.05, at the last of 2 attempts")
    message = failure_message(serve, SILENT, attempts=1, read_timeout_s=0.05)
    assert "no byte within judge.service.read_timeout_s=0.05" in message


def test_no_service() -> None:
    with socket.socket() as bound:  # and does not listen
        bound.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"
        client = ServiceClient(ServiceConfig(url=url, attempts=1), KEY)
        with pytest.raises(
            ServiceError, match=rf"no connection .*is judge\.service\.url={url} right, and does it run\?"
        ):
            asyncio.run(client.post("/score", {}, lambda reply: reply))


def test_a_key_of_the_environment(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", " secret\n")
    [request] = post(serve, (200, 7), api_key_env="JUDGE_KEY").requests
    assert request.headers["Authorization"] == "Bearer secret"
    assert "judge.service.api_key_env='JUDGE_KEY' was sent" in failure_message(
        serve, (401, {}), api_key_env="JUDGE_KEY"
    )
    monkeypatch.delenv("JUDGE_KEY")
    with pytest.raises(ConfigError, match=r"judge\.service\.api_key_env=JUDGE_KEY: the environment has no variable"):
        post(serve, (200, 7), api_key_env="JUDGE_KEY")


def test_proxies_are_not_used_for_this_machine(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    assert post(serve, (200, 7)).result[0] == 7
    assert [is_loopback(f"http://{host}/v1") for host in ("localhost:1", "127.3.2.1", "[::1]:8", "10.0.0.1", "a.b")] == [
        True, True, True, False, False,
    ]  # fmt: skip


def test_connections_are_used_again_while_the_client_is_entered(serve: Serve) -> None:
    async def talk(url: str, sleep: Any) -> Any:
        client = ServiceClient(ServiceConfig(url=url), KEY, sleep=sleep)
        async with client:
            for number in range(3):
                await client.post("/score", {"n": number}, lambda reply: reply)
            pool = client._http._transport._pool  # type: ignore[attr-defined]
            return len(pool.connections)

    assert serve(talk, (200, 7)).result == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "127.0.0.1:1/v1"}, "'127.0.0.1:1/v1' does not begin with http://"),
        ({"url": "http://"}, "names no host"),
        ({"url": "http://a:x/v1"}, "is no address"),
        ({"url": "http://a/v1?key=1"}, "has a query"),
        ({"url": "http://a/v1", "api_key": "a", "api_key_env": "B"}, "are both set"),
    ],
)
def test_a_wrong_configuration(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        ServiceConfig(**options)


def test_cookies_are_those_of_the_caller(serve: Serve) -> None:
    async def talk(url: str, sleep: Any) -> dict[str, str]:
        cookies: dict[str, str] = {}
        async with ServiceClient(ServiceConfig(url=url), KEY, sleep=sleep) as client:
            for path, session in (("/seed", cookies), ("/step", cookies), ("/other", {}), ("/none", None)):
                await client.post(path, {}, lambda reply: reply, cookies=session)
        return cookies

    served = serve(talk, (200, {}, {"Set-Cookie": "session=a; Path=/"}))
    assert served.result == {"session": "a"}
    assert [request.headers.get("Cookie") for request in served.requests] == [None, "session=a", None, None]


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_an_exchange_is_sent_once_whatever_its_status(serve: Serve, status: int) -> None:
    async def talk(url: str, sleep: Any) -> tuple[int, str]:
        return await ServiceClient(ServiceConfig(url=url), KEY, sleep=sleep).exchange("/call", {"n": 1})

    served = serve(talk, (status, b"text"))
    assert (served.result, len(served.requests), served.requests[0].body) == ((status, "text"), 1, {"n": 1})


def test_an_exchange_without_a_reply(serve: Serve) -> None:
    async def talk(url: str, sleep: Any) -> str:
        with pytest.raises(ServiceError, match=rf"{url}/call: the connection was lost") as caught:
            await ServiceClient(ServiceConfig(url=url), KEY, sleep=sleep).exchange("/call", {})
        return str(caught.value)

    assert len(serve(talk, CUT).requests) == 1


def test_a_get_and_a_service_that_has_not_implemented_it(serve: Serve) -> None:
    async def talk(url: str, sleep: Any) -> Any:
        client = ServiceClient(ServiceConfig(url=url), KEY, sleep=sleep)
        value = await client.get("/schema", lambda reply: reply)
        with pytest.raises(ServiceRefusedError, match="HTTP 501") as caught:
            await client.get("/splits", lambda reply: reply)
        return value, caught.value.status

    served = serve(talk, (200, [1]), (501, {"detail": "no tasks"}))
    assert served.result == ([1], 501)
    assert len(served.requests) == 2, "501 is not sent again"
