"""Bodies that are valid but for one change: each is answered, with 200 or the dialect's 4xx, and the session goes on."""

import asyncio
import copy
import json
import logging
import random
from typing import Any

import httpx
import pytest
from gateway_clients import ChatClient, Client, MessagesClient, ResponsesClient, Said, Text
from gateway_episodes import TASK, Play, Program
from hypothesis import settings

from agentrl.config.agent import AgentConfig
from agentrl.config.rollout import FailureConfig
from agentrl.core.env import Env
from agentrl.core.types import SamplingParams
from agentrl.data.application_tasks import ApplicationTasks, Placeholders
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.gateway.agents_elsewhere import AgentElsewhere, AgentsElsewhere
from agentrl.gateway.seat_turns import SeatTurns
from agentrl.render.renderer import ChatRenderer
from agentrl.testing import ScriptedSampler

TALK = (
    Text("system", "s"),
    Text("user", "a"),
    Said("hm", "b", (("call_0_0", "find", {"word": "x", "n": 1}), ("call_0_1", "count", {}))),
    Text("tool", "r", "call_0_0"),
    Text("tool", "r", "call_0_1"),
    Text("user", "c"),
)
DEEP = "deeper than any parser"
VALUES: list[Any] = [
    None, True, False, 0, -1, 2**63, 1e308, -0.0, "", "x", "\ud800", "\x00", "x" * 100_000, [], [None], [[]], {}, {"type": 7},
    {"type": "text"}, {"type": "text", "text": None}, {"": {"": []}}, ["x"] * 10_000, "none", "system", "call_0_0", "call_9_9",
    DEEP,
]  # fmt: skip
"""In place of any value, and added under any key."""


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of all values in a JSON value, but for itself."""
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    return [place for key in keys for place in [(*path, key), *places(value[key], (*path, key))]]


def mutate(body: Any, rng: random.Random) -> Any:
    """Return a body with one or two changes."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2))):
        paths = places(body)
        if not paths:
            break
        *path, key = rng.choice(paths)
        parent = body
        for step in path:
            parent = parent[step]
        change = rng.choice(("value", "value", "value", "delete", "copy", "name", "shuffle"))
        if change == "value":
            parent[key] = rng.choice(VALUES)
        elif change == "delete":
            del parent[key]
        elif change == "copy" and isinstance(parent, list):
            parent.insert(key, copy.deepcopy(parent[key]))
        elif change == "shuffle" and isinstance(parent, list):
            rng.shuffle(parent)
        elif isinstance(parent, dict):
            parent[rng.choice((*(str(name) for name in parent), "n", "stop", "tool_choice", "content"))] = parent.pop(
                key
            )
    return body


def encode(body: Any, rng: random.Random) -> bytes:
    """Return a body as bytes, now and then broken."""
    content = json.dumps(body).encode().replace(f'"{DEEP}"'.encode(), b"[" * 3000 + b"]" * 3000)
    if rng.random() < 0.1:
        at = rng.randrange(len(content) + 1)
        content = (
            content[:at] + rng.choice((b"", b"\xff", b"\x00", b"NaN", b"}", content)) + content[at + rng.randrange(3) :]
        )
    return content


@pytest.mark.parametrize("client", [ChatClient(), ResponsesClient(), MessagesClient()], ids=lambda client: client.path)
def test_hostile_bodies_are_refused_in_the_dialects_form(
    play: Play, client: Client, caplog: pytest.LogCaptureFixture
) -> None:
    count = 5 * settings().max_examples
    rng = random.Random(client.path)
    statuses: dict[int, int] = {}

    async def talk(program: Program) -> None:
        whole = {"model": "m", "stream": False, **client.body(TALK, ("find", "count"), lambda arguments: arguments)}
        for number in range(count):
            content = encode(mutate(whole, rng), rng)
            response = await program.client.post(client.path, content=content)
            status = statuses[response.status_code] = response.status_code
            assert status == 200 or 400 <= status < 500, (number, response.status_code, content[:2000])
            if status != 200:
                error = response.json()["error"]
                assert error["type"] == "invalid_request_error", error
                assert 0 < len(error["message"]) <= 1001
        said = client.read((await program.post(client.path, whole)).json())
        assert said.text.startswith("fine")

    played = play(lambda request: f"fine {request.turn}", talk, max_turns=10 * count, max_tokens=200_000)
    assert set(statuses) == {200, 400}
    assert played.rollout.failure is None
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


OTHERS: dict[str, Any] = {
    "/v1/messages/count_tokens": MessagesClient().body(TALK, ("find", "count"), lambda arguments: arguments),
    "/v1/session/reward": {"reward": 1.0, "metrics": {"steps": 2.0}, "agent": None},
    "/v1/session/end": {"reward": 1.0, "metrics": {"steps": 2.0}, "failure": "", "answer": "a", "result": {"b": [1]}},
    "/v1/session/observe": {"wait_s": 0.5},
    "/v1/session/move": {"turn": 0, "text": "a"},
}
"""Routes that sample nothing, and a valid body of each."""


def begun_turn() -> SeatTurns:
    """Return the turns of a seat that is to move."""
    seat = SeatTurns()
    seat.begin("a", ())
    return seat


@pytest.mark.parametrize("path", OTHERS)
def test_hostile_bodies_of_other_routes_are_refused(play: Play, path: str, caplog: pytest.LogCaptureFixture) -> None:
    count = 2 * settings().max_examples
    rng = random.Random(path)
    statuses: dict[int, int] = {}

    async def talk(program: Program) -> None:
        program.sessions.may_reward = program.sessions.may_end = True
        program.sessions.over.set()  # an end waits for its episode
        program.sessions.seat = begun_turn()
        for number in range(count):
            content = encode(mutate(OTHERS[path], rng), rng)
            response = await program.client.post(path, content=content)
            status = statuses[response.status_code] = response.status_code
            assert status in (200, 400, 404, 409, 413), (number, status, content[:2000])
            if status != 200:
                error = response.json()["error"]
                assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error"), error
                assert 0 < len(error["message"]) <= 1001
        program.sessions.seat = begun_turn()
        assert (await program.post(path, OTHERS[path])).status_code == 200
        await program.chat({"role": "user", "content": "a"})

    played = play(["fine"], talk, max_tokens=200_000)
    assert played.rollout.failure is None, played.rollout.failure
    assert {200, 400} <= set(statuses)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]


SESSIONS: dict[str, Any] = {
    "wait_s": 0,
    "source": None,
    "task": {"id": "x", "prompt": [{"role": "user", "content": "a"}], "answer": 1, "metadata": {"b": [1, {"c": None}]}},
}
"""A valid body of a start."""


@pytest.mark.parametrize("tasks", ["run", "application"])
def test_hostile_starts_of_sessions_are_refused(
    renderer: ChatRenderer, tasks: str, caplog: pytest.LogCaptureFixture
) -> None:
    count = 2 * settings().max_examples
    rng = random.Random(tasks)
    statuses: dict[int, int] = {}

    async def starts() -> None:
        config = AgentConfig(port=0, reward="session", tasks=tasks)
        agents = AgentsElsewhere(config)
        sampler = ScriptedSampler(["fine"], encode=renderer.encode, end_token_id=renderer.end_token_id)
        context = EpisodeContext(Env, renderer, sampler, {}, Limits(8, 4096, 60.0, 64), SamplingParams(seed=5))
        loop = AgentElsewhere(config, "", agents)
        runner = EpisodeRunner(
            {"": EpisodeSettings(context, loop)}, FailurePolicy(FailureConfig()), EpisodeSlots(2 * count)
        )
        transport = httpx.ASGITransport(app=agents.gateway.app)
        async with (
            agents.serving(),
            httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1", timeout=60) as client,
        ):
            own = [TASK] * (count + 2)
            made = ApplicationTasks(Placeholders(""), 0).get_samples(count + 2) if tasks == "application" else own
            jobs = [Job(task, 1, f"1/{number}/0") for number, task in enumerate(made)]
            episodes = asyncio.create_task(runner.run_many(jobs, check_dropped=False))
            body = SESSIONS if tasks == "application" else SESSIONS | {"task": None}
            first = await client.post("/v1/sessions", json=body | {"wait_s": 30})
            assert first.status_code == 200, first.text  # the episodes wait now
            contents = [encode(mutate(body, rng), rng) for _ in range(count)]
            # At the same time: without wait_s, or with another one, a start of another source waits.
            replies = await asyncio.gather(*(client.post("/v1/sessions", content=content) for content in contents))
            for content, response in zip(contents, replies, strict=True):
                status = statuses[response.status_code] = response.status_code
                assert status in (200, 400, 413, 429), (status, content[:2000])
                if status != 200:
                    error = response.json()["error"]
                    assert error["type"] == "invalid_request_error", error
                    assert 0 < len(error["message"]) <= 1001
            whole = await client.post("/v1/sessions", json=body | {"wait_s": 30})
            assert whole.status_code == 200, whole.text
            headers = {"authorization": f"Bearer {whole.json()['key']}"}
            chat = {"messages": [{"role": "user", "content": "a"}]}
            assert (await client.post("/v1/chat/completions", json=chat, headers=headers)).status_code == 200
            end = await client.post("/v1/session/end", json={"reward": 1}, headers=headers)
            assert end.json() == {"turns": 1}
            agents.end_all()
            rollouts = await episodes
        assert [rollout.reward for rollout in rollouts if rollout.failure is None] == [1.0]

    asyncio.run(starts())
    assert {200, 400} <= set(statuses)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
