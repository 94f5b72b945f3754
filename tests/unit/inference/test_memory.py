"""In which order an engine is told to give memory back, and what is left after a failure."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from agentrl.core.errors import EngineError, SamplerError
from agentrl.inference.client.engine_memory import EngineMemory
from agentrl.inference.client.http import Refused
from agentrl.inference.client.weight_updates import Control, WeightUpdates

RELEASE, RESUME = "/release_memory_occupation", "/resume_memory_occupation"


class ScriptedTransport:
    """Takes requests in place of an engine; ``fail`` gives errors by path, once each."""

    def __init__(self) -> None:
        self.fail: dict[str, list[Exception]] = {}
        self.calls: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any, *, retries: int = 4) -> Any:
        return await self.get(path, retries=retries, body=body.get("tags"))

    async def get(self, path: str, *, retries: int = 4, body: Any = None) -> Any:
        self.calls.append((path, body))
        if retries == 4 and path in (RELEASE, RESUME):
            raise AssertionError("sent a second time, it would end SGLang")
        await asyncio.sleep(0.01)
        if self.fail.get(path):
            raise self.fail[path].pop(0)
        return None


def memory_of(transport: ScriptedTransport) -> tuple[EngineMemory, WeightUpdates]:
    control = Control(transport, "http://e")  # type: ignore[arg-type]
    updates = WeightUpdates(control, lambda: False, lambda: False)
    return EngineMemory(control, updates), updates


def test_an_idle_engine_is_asked_once_for_each_part() -> None:
    transport = ScriptedTransport()
    transport.fail["/flush_cache"] = [Refused(400, "requests are running")]

    async def play() -> None:
        memory, _ = memory_of(transport)
        await memory.release()
        await memory.take_back("weights")
        assert memory.out
        await memory.release()
        for _ in range(2):
            for part in ("kv_cache", "weights"):
                await memory.take_back(part)
        assert not memory.out

    asyncio.run(play())
    assert transport.calls == [
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
    transport = ScriptedTransport()
    transport.fail[RELEASE] = [Refused(400, "not idle")]

    async def play() -> None:
        memory, updates = memory_of(transport)
        with pytest.raises(EngineError, match=r"http://e refuses /release_memory_occupation: not idle"):
            await memory.release()
        assert not memory.out
        await memory.opened()
        await updates.opened()
        await memory.release()
        assert memory.out

    asyncio.run(play())


def test_where_nobody_knows_whether_memory_was_given_back_it_counts_as_given_back() -> None:
    transport = ScriptedTransport()
    transport.fail[RELEASE] = [httpx.ReadError("cut off")]
    transport.fail[RESUME] = [httpx.ReadError("cut off")]

    async def play() -> None:
        memory, updates = memory_of(transport)
        with pytest.raises(EngineError, match="cut off"):
            await memory.release()
        assert memory.out
        with pytest.raises(EngineError, match="cut off"):
            await memory.take_back("weights")
        with pytest.raises(EngineError, match="given its weights' memory back"):
            updates.present()
        await memory.take_back("weights")
        updates.present()
        with pytest.raises(SamplerError, match="got no whole update since"):
            await updates.opened()

    asyncio.run(play())


def test_an_update_under_way_comes_first() -> None:
    transport = ScriptedTransport()

    async def play() -> None:
        memory, updates = memory_of(transport)
        await updates.begin()
        with pytest.raises(EngineError, match="gets weights: that must end first"):
            await memory.release()
        assert not memory.out
        await updates.cancel()
        await memory.release()

    asyncio.run(play())
