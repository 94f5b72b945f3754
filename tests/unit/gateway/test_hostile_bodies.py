"""Bodies that are valid but for one change: each is answered, with 200 or the dialect's 4xx, and the session goes on."""

import copy
import json
import logging
import random
from typing import Any

import pytest
from gateway_clients import ChatClient, Client, MessagesClient, ResponsesClient, Said, Text
from gateway_episodes import Play, Program
from hypothesis import settings

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
}
"""Routes that sample nothing, and a valid body of each."""


@pytest.mark.parametrize("path", OTHERS)
def test_hostile_bodies_of_other_routes_are_refused(play: Play, path: str, caplog: pytest.LogCaptureFixture) -> None:
    count = 2 * settings().max_examples
    rng = random.Random(path)
    statuses: dict[int, int] = {}

    async def talk(program: Program) -> None:
        program.sessions.may_reward = program.sessions.may_end = True
        program.sessions.over.set()  # an end waits for its episode
        for number in range(count):
            content = encode(mutate(OTHERS[path], rng), rng)
            response = await program.client.post(path, content=content)
            status = statuses[response.status_code] = response.status_code
            assert status in (200, 400, 404, 413), (number, status, content[:2000])
            if status != 200:
                error = response.json()["error"]
                assert error["type"] == ("not_found_error" if status == 404 else "invalid_request_error"), error
                assert 0 < len(error["message"]) <= 1001
        assert (await program.post(path, OTHERS[path])).status_code == 200
        await program.chat({"role": "user", "content": "a"})

    played = play(["fine"], talk, max_tokens=200_000)
    assert played.rollout.failure is None, played.rollout.failure
    assert {200, 400} <= set(statuses)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR or record.exc_info]
