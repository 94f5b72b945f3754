"""NeMo Gym's protocol against a fake resource server: rows as tasks, sessions by cookie, tools by route, verification, faults."""

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from agentrl import ConfigError, Message, Task
from agentrl.adapters.nemo_gym import NemoGymEnv
from agentrl.adapters.nemo_gym.rows import row_task, row_tools
from agentrl.core.errors import EnvironmentFailure, TaskError, UnknownNameError
from agentrl.core.types import CallStatus, ToolCall

ADD = {"type": "function", "name": "add", "description": "Adds.", "parameters": {"type": "object"}, "strict": True}
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "Add."}], "tools": [ADD]}, "goal": 3}


class FakeResources:
    """A counter for each session, whose cookie it sets; `verdict` is added to that of its verification."""

    def __init__(self, **verdict: Any) -> None:
        self.verdict = verdict
        self.totals: list[int] = []
        self.verified: list[dict[str, Any]] = []

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        app = web.Application()
        routes = {"/seed_session": self.seed, "/add": self.add, "/verify": self.verify}
        app.add_routes([web.post(path, handler) for path, handler in routes.items()])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            yield f"http://127.0.0.1:{runner.addresses[0][1]}"
        finally:
            await runner.cleanup()

    async def seed(self, request: web.Request) -> web.Response:
        assert "session" not in request.cookies
        assert (await request.json())["goal"] == 3
        self.totals.append(0)
        reply = web.json_response({})
        reply.set_cookie("session", str(len(self.totals) - 1))
        return reply

    async def add(self, request: web.Request) -> web.Response:
        number = (await request.json())["number"]
        if number < 0:
            return web.json_response({"detail": "negative"}, status=-number)
        self.totals[int(request.cookies["session"])] += number
        await asyncio.sleep(0)
        return web.json_response({"total": self.totals[int(request.cookies["session"])]})

    async def verify(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.verified.append(body)
        reward = float(self.totals[int(request.cookies["session"])] == body["goal"])
        return web.json_response({**body, "reward": reward, **self.verdict})


def with_server(server: FakeResources, play: Callable[[str], Awaitable[Any]]) -> Any:
    async def run() -> Any:
        async with server.serve() as url:
            return await play(url)

    return asyncio.run(run())


async def begin(url: str, **options: Any) -> NemoGymEnv:
    env = NemoGymEnv(url, attempts=1, **options)
    await env.areset(seed=0, options={"task": row_task("t", ROW)})
    return env


def turn(text: str, *numbers: int) -> Message:
    return Message("assistant", text, tuple(ToolCall(f"c{number}", "add", {"number": number}) for number in numbers))


def test_16_sessions_at_the_same_time() -> None:
    server = FakeResources(reward_components={"exact": 0.5})

    async def play(url: str) -> list[float]:
        async def episode(number: int) -> float:
            env = await begin(url)
            assert [tool.name for tool in env.tools] == ["add"]
            messages, reward, *_ = await env.astep(turn("<think>a</think>First.", 1, 1 + number % 2))
            total = {"total": 2 + number % 2}
            assert (json.loads(messages[1].content), messages[1].tool_call_id) == (total, f"c{1 + number % 2}")
            messages, reward, terminated, truncated, info = await env.astep(turn("Done."))
            assert (messages, terminated, truncated) == ((), True, False)
            assert info["metrics"] == {"turns": 2.0, "calls": 2.0, "faulty_calls": 0.0, "exact": 0.5}
            with pytest.raises(EnvironmentFailure, match="after the end"):
                await env.astep(turn("More."))
            return reward

        return await asyncio.gather(*map(episode, range(16)))

    assert with_server(server, play) == [0.0, 1.0] * 8
    response = server.verified[0]["response"]
    assert [item["type"] for item in response["output"]] == [
        *("message", "function_call", "function_call_output"), "function_call", "function_call_output", "message",
    ]  # fmt: skip
    assert response["output"][0]["content"][0]["text"] == "First."
    assert (response["status"], response["tools"]) == ("completed", [ADD])


def test_calls_that_fail_are_read_by_the_policy() -> None:
    async def play(url: str) -> None:
        env = await begin(url, max_steps=2)
        unreadable = ToolCall("u", "add", {}, CallStatus.SCHEMA_VIOLATION, "no number")
        (message,), *_ = await env.astep(Message("assistant", "", (unreadable,)))
        assert message.content == "no number"
        (message,), reward, terminated, truncated, info = await env.astep(turn("", -404))
        assert json.loads(message.content) == {"detail": "negative"}
        assert (reward, terminated, truncated) == (0.0, False, True), "the last turn of max_steps is verified"
        assert info["metrics"]["faulty_calls"] == 2.0

    server = FakeResources()
    with_server(server, play)
    assert server.verified[0]["response"]["status"] == "incomplete"


def test_an_episode_that_a_limit_of_the_run_ends_is_verified() -> None:
    async def play(url: str) -> None:
        env = await begin(url)
        assert await env.atruncate() == (0.0, {}), "nothing was done yet"
        env = await begin(url)
        await env.astep(turn("", 1, 2))
        assert await env.atruncate() == (1.0, {"metrics": {"turns": 1.0, "calls": 2.0, "faulty_calls": 0.0}})
        assert await env.atruncate() == (0.0, {}), "once"

    server = FakeResources()
    with_server(server, play)
    [verified] = server.verified
    assert verified["response"]["status"] == "incomplete"


@pytest.mark.parametrize(
    ("verdict", "numbers", "options", "message"),
    [
        (
            {"mask_sample": True, "failure_kind": "judge", "failure_reason": "down"},
            (),
            {},
            "measures nothing: judge: down",
        ),
        ({"reward": None}, (), {}, "was not verified: .*/verify: a reply without a finite reward"),
        ({"reward": 10**400}, (), {}, "was not verified: .*/verify: a reply without a finite reward"),
        ({}, (-503,), {}, "the tool add failed: HTTP 503"),
        ({}, (-500,), {"tool_errors": "fail"}, "the tool add failed: HTTP 500"),
    ],
)
def test_faults_of_a_server_are_failures_that_name_it(
    verdict: dict[str, Any], numbers: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    async def play(url: str) -> None:
        env = await begin(url, **options)
        with pytest.raises(EnvironmentFailure, match=message) as caught:
            await env.astep(turn("x", *numbers))
        assert f"env.options.url={url}, task t: " in str(caught.value)

    with_server(FakeResources(**verdict), play)


def test_a_lost_server() -> None:
    server = FakeResources()

    async def run() -> None:
        async with server.serve() as url:
            env = await begin(url)
        with pytest.raises(
            EnvironmentFailure, match=rf"url={url}, task t: the tool add failed: {url}/add: no connection"
        ):
            await env.astep(turn("", 1))
        with pytest.raises(EnvironmentFailure, match=r"the session did not start: .* no connection"):
            await begin(url)

    asyncio.run(run())


def test_rows_of_a_file_are_tasks(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    parts = {
        "role": "developer",
        "content": [{"type": "input_text", "text": "Be "}, {"type": "input_text", "text": "brief."}],
    }
    rows = [ROW, {"responses_create_params": {"input": "Hi.", "instructions": "Greet."}}]
    rows += [{"responses_create_params": {"input": [parts, {"role": "user", "content": "Go."}]}}]
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    options = {"url": "http://localhost:1", "rows": {"train": str(file)}}
    tasks = NemoGymEnv.configured_tasks("train", 0, options)
    assert [task.id for task in tasks] == ["nemo_gym/train/0", "nemo_gym/train/1", "nemo_gym/train/2"]
    prompts = [[(message.role, message.content) for message in task.prompt] for task in tasks]
    assert prompts[1:] == [
        [("system", "Greet."), ("user", "Hi.")],
        [("system", "Be brief."), ("user", "Go.")],
    ]
    assert tasks[0].metadata["row"] == ROW
    assert NemoGymEnv.configured_tasks("eval", 0, options) == ()
    with pytest.raises(UnknownNameError, match=r"unknown split of rows 'test' \(env\.options\.rows\)"):
        NemoGymEnv.configured_tasks("test", 0, options)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, "no responses_create_params.input"),
        ({"responses_create_params": {"input": []}}, "no responses_create_params.input"),
        ({"responses_create_params": {"input": [{"type": "function_call"}]}}, "no message of a system"),
        (
            {"responses_create_params": {"input": [{"role": "user", "content": [{"type": "input_image"}]}]}},
            "else than text",
        ),
        ({"responses_create_params": {"input": [{"role": "user"}]}}, "without content"),
    ],
)
def test_rows_that_are_none_are_refused(row: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=message):
        row_task("t", row)
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps(row))
    with pytest.raises(ConfigError, match=rf"env\.options\.rows={{train: {re.escape(str(file))}}}: .*{message}"):
        NemoGymEnv.configured_tasks("train", 0, {"url": "http://localhost:1", "rows": {"train": str(file)}})


def test_options_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"unknown key 'env\.options\.row'\. Did you mean 'env\.options\.rows'"):
        NemoGymEnv("http://localhost:1", row={})
    with pytest.raises(ConfigError, match="No such file"):
        NemoGymEnv.configured_tasks(
            "train", 0, {"url": "http://localhost:1", "rows": {"train": str(tmp_path / "gone")}}
        )
    with pytest.raises(TaskError, match="a tool that is no function"):
        row_tools({"responses_create_params": {"tools": [{"type": "web_search"}]}})
    with pytest.raises(ConfigError, match="task other has no row of NeMo Gym"):
        NemoGymEnv("http://localhost:1").reset(options={"task": Task("other", ())})
