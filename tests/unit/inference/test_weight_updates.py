"""Updates of an engine that, as SGLang does, changes its weights with every bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from deadlines import run_ready_tasks

from agentrl.core.errors import EngineError, SamplerError
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.http import ErrorReply
from agentrl.inference.client.weight_updates import SGLangWeightUpdates
from tests.unit.inference.fake_http import replying

GROUP = WeightGroup("g", "127.0.0.1", 1, 2, "gloo")
NAMED = [("a", torch.ones(2))]
UPDATES = "/update_weights_from_"


class ScriptedPool:
    """Takes requests in place of an engine; ``refuse`` has a status and a message by path, each used once."""

    url = "http://e"

    def __init__(self, *, brackets: bool = True, keeps_whole: bool = False) -> None:
        self.brackets, self.whole = brackets, keeps_whole
        self.refuse: dict[str, tuple[int, str]] = {}
        self.calls: list[str] = []
        self.bodies: dict[str, Any] = {}

    def request(self, method: str, path: str, body: Any = None, *, once: bool = False) -> Any:
        return replying(self._answer(method, path, body))

    async def _answer(self, method: str, path: str, body: Any) -> Any:
        self.calls.append(path)
        if method == "GET":
            return {"whole_updates": True} if self.whole else {}
        await asyncio.sleep(0)
        self.bodies[path] = body
        if path.endswith("_weight_update") and not self.brackets:
            raise ErrorReply(404, "Not Found")
        if path in self.refuse:
            raise ErrorReply(*self.refuse.pop(path))
        return {"success": True}


def updates_of(pool: ScriptedPool, *, keeps_requests: bool = False) -> SGLangWeightUpdates:
    control = ControlEndpoint(pool)  # type: ignore[arg-type]
    return SGLangWeightUpdates(control, paused=lambda: True, keeps_requests=lambda: keeps_requests)


def from_group(updates: SGLangWeightUpdates, version: int, *, last: bool) -> Awaitable[None]:
    return updates.from_group(GROUP, [TensorSpec("a", "float32", (2,))], version, last=last)


def from_tensors(updates: SGLangWeightUpdates, version: int, *, last: bool) -> Awaitable[None]:
    return updates.from_tensors(NAMED, version, last=last)


def from_handles(updates: SGLangWeightUpdates, version: int, *, last: bool) -> Awaitable[None]:
    return updates.from_handles(["rank 0", "rank 1"], version, last=last)


@pytest.mark.parametrize("brackets", [True, False])
@pytest.mark.parametrize(
    ("bucket", "path"), [(from_group, "distributed"), (from_tensors, "tensor"), (from_handles, "tensor")]
)
def test_both_generations_of_sglang(brackets: bool, bucket: Callable[..., Awaitable[None]], path: str) -> None:
    pool = ScriptedPool(brackets=brackets)

    async def play() -> None:
        updates = updates_of(pool)
        for version in (3, 4):
            await bucket(updates, version, last=False)
            assert pool.bodies[UPDATES + path]["load_format"] == "flattened_bucket"
            assert pool.bodies[UPDATES + path]["flush_cache"] is False
            assert "weight_version" not in pool.bodies[UPDATES + path]
            await bucket(updates, version, last=True)
            assert pool.bodies[UPDATES + path]["flush_cache"] is True
            assert pool.bodies[UPDATES + path]["weight_version"] == str(version)
            if bucket is from_handles:
                assert pool.bodies[UPDATES + path]["serialized_named_tensors"] == ["rank 0", "rank 1"]
            await updates.wait_ready()

    asyncio.run(play())
    buckets = [UPDATES + path] * 2
    new = ["/begin_weight_update", *buckets, "/end_weight_update"]
    loaders = ["/server_info"] if bucket is from_tensors else []
    assert pool.calls == loaders + (new * 2 if brackets else ["/begin_weight_update", *buckets, *buckets])


def test_every_rank_of_an_engine_reads_an_entry() -> None:
    pool = ScriptedPool(brackets=True)
    asyncio.run(updates_of(pool).from_tensors(NAMED, 3, last=True, ranks=4))
    [first, *other_entries] = pool.bodies[UPDATES + "tensor"]["serialized_named_tensors"]
    assert other_entries == [first] * 3


def test_large_weights_are_received_one_by_one() -> None:
    pool = ScriptedPool(brackets=True)
    large = [TensorSpec("large", "bfloat16", (4096, 4096))]
    asyncio.run(updates_of(pool).from_group(GROUP, large, 3, last=True))
    assert pool.bodies[UPDATES + "distributed"]["load_format"] is None


@pytest.mark.parametrize("brackets", [True, False])
def test_requests_that_a_pause_keeps_in_the_engine(brackets: bool) -> None:
    """An SGLang that would end of it is not told anything."""
    pool = ScriptedPool(brackets=brackets)

    async def play() -> None:
        updates = updates_of(pool, keeps_requests=True)
        if brackets:
            await from_tensors(updates, 1, last=True)
            await updates.from_disk(Path("weights"), 2)
        else:
            for refused in (from_tensors(updates, 1, last=True), updates.from_disk(Path("weights"), 2)):
                with pytest.raises(EngineError, match=r"keeps paused requests.*set weights\.pause=abort"):
                    await refused
        await updates.wait_ready()

    asyncio.run(play())
    assert (UPDATES + "tensor" in pool.calls) == (UPDATES + "disk" in pool.calls) == brackets
    if brackets:
        path = pool.bodies[UPDATES + "disk"]["model_path"]
        assert path == str(Path("weights").absolute()), "an engine may run in another folder"


@pytest.mark.parametrize("keeps_whole", [False, True])
def test_a_broken_update_bars_generations_unless_the_engine_keeps_its_weights_whole(keeps_whole: bool) -> None:
    pool = ScriptedPool(keeps_whole=keeps_whole)

    async def play() -> None:
        updates = updates_of(pool)
        await from_tensors(updates, 1, last=False)
        pool.refuse[UPDATES + "tensor"] = (400, "partially updated")
        with pytest.raises(EngineError, match=r"http://e refuses /update_weights_from_tensor: partially updated"):
            await from_tensors(updates, 1, last=True)
        assert pool.calls[-1] == "/end_weight_update"
        if keeps_whole:
            await updates.wait_ready()
            return
        with pytest.raises(SamplerError, match="only a part of an update"):
            await updates.wait_ready()
        await from_tensors(updates, 2, last=False)
        waiting = asyncio.ensure_future(updates.wait_ready())
        await run_ready_tasks()
        assert not waiting.done()
        await from_tensors(updates, 2, last=True)
        await waiting

    asyncio.run(play())


def test_an_engine_without_memory_for_a_bucket_names_the_key() -> None:
    pool = ScriptedPool()
    pool.refuse[UPDATES + "distributed"] = (400, "Failed to receive weights: CUDA out of memory")

    async def play() -> None:
        with pytest.raises(EngineError, match=r"out of memory; a smaller weights\.bucket_mib"):
            await from_group(updates_of(pool), 1, last=False)

    asyncio.run(play())


@pytest.mark.parametrize("words", ["no weight update is in progress: begin one", "no weight-update session is open"])
def test_an_update_that_another_client_has_ended_says_so(words: str) -> None:
    pool = ScriptedPool()
    pool.refuse["/end_weight_update"] = (400, words)

    async def play() -> None:
        with pytest.raises(
            EngineError, match=f"http://e refuses.*{words}.*Another run or program updates the same engine"
        ):
            await from_tensors(updates_of(pool), 1, last=True)

    asyncio.run(play())


def test_what_was_never_received_changed_nothing() -> None:
    pool = ScriptedPool()
    pool.refuse[UPDATES + "distributed"] = (400, "Failed to receive weights: Connection closed by peer")

    async def play() -> None:
        updates = updates_of(pool)
        with pytest.raises(EngineError, match="Connection closed"):
            await from_group(updates, 1, last=True)
        await updates.wait_ready()
        await from_group(updates, 1, last=False)
        pool.refuse[UPDATES + "distributed"] = (400, "Failed to receive weights: Connection closed by peer")
        with pytest.raises(EngineError, match="Connection closed"):
            await from_group(updates, 1, last=True)
        with pytest.raises(SamplerError, match="only a part"):
            await updates.wait_ready()

    asyncio.run(play())


@pytest.mark.parametrize(
    ("words", "barred"), [("Failed to get weights iterator", False), ("Failed to update weights: x", True)]
)
def test_a_folder_that_cannot_be_loaded(words: str, barred: bool) -> None:
    pool = ScriptedPool()
    pool.refuse[UPDATES + "disk"] = (400, words)

    async def play() -> None:
        updates = updates_of(pool)
        with pytest.raises(EngineError, match=words):
            await updates.from_disk(Path("/w"), 1)
        assert updates.ready is not barred
        await updates.from_disk(Path("/w"), 1)
        await updates.wait_ready()

    asyncio.run(play())


def test_a_cancelled_update_closes_what_somebody_else_finds_open() -> None:
    pool = ScriptedPool()

    async def play() -> None:
        updates = updates_of(pool)
        await updates.cancel()
        assert pool.calls == []
        pool.refuse["/begin_weight_update"] = (400, "already open")
        await updates.begin()
        assert pool.calls == ["/begin_weight_update", "/end_weight_update", "/begin_weight_update"]
        await updates.cancel()
        await updates.wait_ready()
        pool.refuse["/begin_weight_update"] = (500, "broken")
        with pytest.raises(EngineError, match="broken"):
            await updates.begin()
        await updates.wait_ready()

    asyncio.run(play())
