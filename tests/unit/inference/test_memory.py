"""The order of requests that release and resume an engine's memory, and the state after a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
import pytest

from agentrl.core.errors import EngineError, SamplerError
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.http import ErrorReply
from agentrl.inference.client.sglang_client import SGLangMemory
from agentrl.inference.client.weight_updates import SGLangWeightUpdates
from tests.unit.inference.fake_http import replying

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class ScriptedPool:
    """Takes requests in place of an engine; ``fail`` has errors by path, each raised once."""

    url = "http://e"

    def __init__(self) -> None:
        self.fail: dict[str, list[Exception]] = {}
        self.calls: list[tuple[str, Any]] = []

    def request(self, method: str, path: str, body: Any = None, *, once: bool = False) -> Any:
        return replying(self._answer(path, body, once))

    async def _answer(self, path: str, body: Any, once: bool) -> Any:
        self.calls.append((path, (body or {}).get("tags")))
        if not once and path in (RELEASE, RESUME):
            raise AssertionError("sent a second time, it would end SGLang")
        await asyncio.sleep(0.01)
        if self.fail.get(path):
            raise self.fail[path].pop(0)
        return None


def memory_of(pool: ScriptedPool) -> tuple[SGLangMemory, SGLangWeightUpdates]:
    control = ControlEndpoint(pool)  # type: ignore[arg-type]
    updates = SGLangWeightUpdates(control, paused=lambda: False, keeps_requests=lambda: False)

    async def cut(mode: str) -> None:
        pool.calls.append(("cut", mode))

    return SGLangMemory(control, updates, cut), updates


def test_an_idle_engine_is_asked_once_for_each_part() -> None:
    pool = ScriptedPool()
    pool.fail["/flush_cache"] = [ErrorReply(400, "requests are running")]

    async def play() -> None:
        memory, _ = memory_of(pool)
        await memory.release()
        await memory.resume("weights")
        assert not memory.ready
        await memory.release()
        for _ in range(2):
            for tag in ("kv_cache", "weights"):
                await memory.resume(tag)
        assert memory.ready

    asyncio.run(play())
    assert pool.calls == [
        ("/flush_cache", None),
        ("/flush_cache", None),
        (RELEASE, ["weights", "kv_cache"]),
        (RESUME, ["weights"]),
        ("/flush_cache", None),
        (RELEASE, ["weights"]),
        (RESUME, ["kv_cache"]),
        (RESUME, ["weights"]),
    ]


def test_a_refusal_leaves_the_engine_as_it_was() -> None:
    pool = ScriptedPool()
    pool.fail[RELEASE] = [ErrorReply(400, "not idle")]

    async def play() -> None:
        memory, updates = memory_of(pool)
        with pytest.raises(EngineError, match=r"http://e refuses /release_memory_occupation: not idle"):
            await memory.release()
        assert memory.ready
        await memory.wait_ready()
        await updates.wait_ready()
        await memory.release()
        assert not memory.ready

    asyncio.run(play())


def test_where_nobody_knows_whether_memory_was_given_back_it_counts_as_given_back() -> None:
    pool = ScriptedPool()
    pool.fail[RELEASE] = [aiohttp.ServerDisconnectedError("cut off")]
    pool.fail[RESUME] = [aiohttp.ServerDisconnectedError("cut off")]

    async def play() -> None:
        memory, updates = memory_of(pool)
        with pytest.raises(EngineError, match="cut off"):
            await memory.release()
        assert not memory.ready
        with pytest.raises(EngineError, match="cut off"):
            await memory.resume("weights")
        with pytest.raises(EngineError, match="released the memory of its weights"):
            updates.check_resumed()
        await memory.resume("weights")
        updates.check_resumed()
        with pytest.raises(SamplerError, match="got no whole update since"):
            await updates.wait_ready()

    asyncio.run(play())


def test_an_update_under_way_comes_first() -> None:
    pool = ScriptedPool()

    async def play() -> None:
        memory, updates = memory_of(pool)
        await updates.begin()
        with pytest.raises(EngineError, match="gets weights: that must end first"):
            await memory.release()
        assert memory.ready
        await updates.cancel()
        await memory.release()

    asyncio.run(play())
