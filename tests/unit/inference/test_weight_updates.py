"""Updates of an engine that, as SGLang does, changes its weights with every bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import EngineError, SamplerError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.inference.client.http import Refused
from agentrl.inference.client.weight_updates import Control, WeightUpdates

GROUP = WeightGroup("g", "127.0.0.1", 1, 2, "gloo")
NAMED = [("a", torch.ones(2))]
UPDATES = "/update_weights_from_"


class ScriptedTransport:
    """Takes requests in place of an engine; ``refuse`` gives a status and words by path, once each."""

    def __init__(self, *, brackets: bool = True, whole: bool = False) -> None:
        self.brackets, self.whole = brackets, whole
        self.refuse: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}

    async def post(self, path: str, body: Any, *, retries: int = 4) -> Any:
        await asyncio.sleep(0)
        self.calls.append(path)
        self.bodies[path] = body
        if path.endswith("_weight_update") and not self.brackets:
            raise Refused(404, "Not Found")
        if path in self.refuse:
            raise Refused(*self.refuse.pop(path))
        return {"success": True}

    async def get(self, path: str) -> Any:
        self.calls.append(path)
        return {"whole_updates": True} if self.whole else {}


def updates_of(transport: ScriptedTransport) -> WeightUpdates:
    return WeightUpdates(Control(transport, "http://e"), lambda: True, lambda: False)  # type: ignore[arg-type]


def from_group(updates: WeightUpdates, version: int, *, last: bool) -> Awaitable[None]:
    return updates.from_group(GROUP, [TensorSpec("a", "float32", (2,))], version, last=last)


def from_tensors(updates: WeightUpdates, version: int, *, last: bool) -> Awaitable[None]:
    return updates.from_tensors(NAMED, version, last=last)


def from_handles(updates: WeightUpdates, version: int, *, last: bool) -> Awaitable[None]:
    return updates.from_handles(["rank 0", "rank 1"], version, last=last)


@pytest.mark.parametrize("brackets", [True, False])
@pytest.mark.parametrize(
    ("bucket", "path"), [(from_group, "distributed"), (from_tensors, "tensor"), (from_handles, "tensor")]
)
def test_both_generations_of_sglang(brackets: bool, bucket: Callable[..., Awaitable[None]], path: str) -> None:
    transport = ScriptedTransport(brackets=brackets)

    async def play() -> None:
        updates = updates_of(transport)
        for version in (3, 4):
            await bucket(updates, version, last=False)
            assert transport.bodies[UPDATES + path]["flush_cache"] is False
            assert "weight_version" not in transport.bodies[UPDATES + path]
            await bucket(updates, version, last=True)
            assert transport.bodies[UPDATES + path]["flush_cache"] is True
            assert transport.bodies[UPDATES + path]["weight_version"] == str(version)
            if bucket is from_handles:
                assert transport.bodies[UPDATES + path]["serialized_named_tensors"] == ["rank 0", "rank 1"]
            await updates.opened()

    asyncio.run(play())
    buckets = [UPDATES + path] * 2
    new = ["/begin_weight_update", *buckets, "/end_weight_update"]
    assert transport.calls == (new * 2 if brackets else ["/begin_weight_update", *buckets, *buckets])


@pytest.mark.parametrize("brackets", [True, False])
def test_requests_that_a_pause_keeps_in_the_engine(brackets: bool) -> None:
    """An SGLang that would end of it is not told anything."""
    transport = ScriptedTransport(brackets=brackets)

    async def play() -> None:
        updates = WeightUpdates(Control(transport, "http://e"), lambda: True, lambda: True)  # type: ignore[arg-type]
        if brackets:
            await from_tensors(updates, 1, last=True)
            await updates.from_disk(Path("weights"), 2)
        else:
            for refused in (from_tensors(updates, 1, last=True), updates.from_disk(Path("weights"), 2)):
                with pytest.raises(EngineError, match=r"keeps paused requests.*pause it with mode='abort'"):
                    await refused
        await updates.opened()

    asyncio.run(play())
    assert (UPDATES + "tensor" in transport.calls) == (UPDATES + "disk" in transport.calls) == brackets


@pytest.mark.parametrize("whole", [False, True])
def test_a_broken_update_bars_generations_unless_the_engine_keeps_its_weights_whole(whole: bool) -> None:
    transport = ScriptedTransport(whole=whole)

    async def play() -> None:
        updates = updates_of(transport)
        await from_tensors(updates, 1, last=False)
        transport.refuse[UPDATES + "tensor"] = (400, "partially updated")
        with pytest.raises(EngineError, match=r"http://e refuses /update_weights_from_tensor: partially updated"):
            await from_tensors(updates, 1, last=True)
        assert transport.calls[-1] == "/end_weight_update"
        if whole:
            await updates.opened()
            return
        with pytest.raises(SamplerError, match="only a part of an update"):
            await updates.opened()
        await from_tensors(updates, 2, last=False)
        waiting = asyncio.ensure_future(updates.opened())
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await from_tensors(updates, 2, last=True)
        await waiting

    asyncio.run(play())


def test_what_was_never_received_changed_nothing() -> None:
    transport = ScriptedTransport()
    transport.refuse[UPDATES + "distributed"] = (400, "Failed to receive weights: Connection closed by peer")

    async def play() -> None:
        updates = updates_of(transport)
        with pytest.raises(EngineError, match="Connection closed"):
            await from_group(updates, 1, last=True)
        await updates.opened()
        await from_group(updates, 1, last=False)
        transport.refuse[UPDATES + "distributed"] = (400, "Failed to receive weights: Connection closed by peer")
        with pytest.raises(EngineError, match="Connection closed"):
            await from_group(updates, 1, last=True)
        with pytest.raises(SamplerError, match="only a part"):
            await updates.opened()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("words", "barred"), [("Failed to get weights iterator", False), ("Failed to update weights: x", True)]
)
def test_a_folder_that_cannot_be_loaded(words: str, barred: bool) -> None:
    transport = ScriptedTransport()
    transport.refuse[UPDATES + "disk"] = (400, words)

    async def play() -> None:
        updates = updates_of(transport)
        with pytest.raises(EngineError, match=words):
            await updates.from_disk(Path("/w"), 1)
        assert updates.closed is barred
        await updates.from_disk(Path("/w"), 1)
        await updates.opened()

    asyncio.run(play())


def test_a_cancelled_update_closes_what_somebody_else_finds_open() -> None:
    transport = ScriptedTransport()

    async def play() -> None:
        updates = updates_of(transport)
        await updates.cancel()
        assert transport.calls == []
        transport.refuse["/begin_weight_update"] = (400, "already open")
        await updates.begin()
        assert transport.calls == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
        await updates.cancel()
        await updates.opened()
        transport.refuse["/begin_weight_update"] = (500, "broken")
        with pytest.raises(EngineError, match="broken"):
            await updates.begin()
        await updates.opened()

    asyncio.run(play())
