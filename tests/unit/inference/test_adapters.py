"""LoRA adapters of an engine that loads and unloads them as SGLang does."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.core.errors import EngineError, SamplerError
from agentrl.inference.base import LoraAdapter
from agentrl.inference.client.adapters import adapter_version
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.http import ErrorReply
from agentrl.inference.client.weight_updates import SGLangWeightUpdates
from agentrl.inference.embedded.weights import read_bucket
from tests.unit.inference.fake_http import replying

LOAD, VERSION = "/load_lora_adapter_from_tensors", "/update_weight_version"
ADAPTER = LoraAdapter({"r": 4}, [("q.lora_A.weight", torch.ones(4, 2))], ranks=2, checksums={"q.lora_A.weight": "ab"})


class Engine:
    """Takes requests in place of SGLang; ``lost`` has the paths whose next request gets no whole reply, though it ran."""

    url = "http://e"

    def __init__(self) -> None:
        self.loaded: dict[str, dict[str, Any]] = {}
        self.version = "default"
        self.refuse = ""
        self.lost: set[str] = set()
        self.calls: list[str] = []
        self.keeps_requests = False

    def request(self, method: str, path: str, body: Any = None, *, once: bool = False) -> Any:
        return replying(self._answer(path, body))

    async def _answer(self, path: str, body: Any) -> Any:
        self.calls.append(path)
        if path == LOAD:
            if self.refuse:
                raise ErrorReply(400, self.refuse)
            assert body["lora_name"] not in self.loaded
            self.loaded[body["lora_name"]] = body
        if path == VERSION:
            self.version = body["new_version"]
        if path == "/unload_lora_adapter":
            if body["lora_name"] not in self.loaded:
                raise ErrorReply(400, "does not exist")
            del self.loaded[body["lora_name"]]
        if path in self.lost:
            self.lost.remove(path)
            raise TimeoutError
        return {"success": True}

    def updates(self) -> SGLangWeightUpdates:
        control = ControlEndpoint(self)  # type: ignore[arg-type]
        return SGLangWeightUpdates(
            control, paused=lambda: self.keeps_requests, keeps_requests=lambda: self.keeps_requests
        )

    def versions(self) -> list[int]:
        return [adapter_version(name) for name in self.loaded]


def test_requests_name_the_newest_adapter_and_the_one_before_is_unloaded() -> None:
    engine = Engine()
    updates = engine.updates()

    async def play() -> None:
        assert updates.adapters.of("main") is None
        for version in (7, 7, 8):
            await updates.from_adapters({"main": ADAPTER}, version)
            assert [*engine.loaded] == [updates.adapters.of("main")]
            assert engine.versions() == [version]
            assert engine.version == str(version)
            assert updates.ready

    asyncio.run(play())
    first = ["/flush_cache", LOAD, VERSION]
    assert engine.calls == first + 2 * [*first, "/unload_lora_adapter"]
    [body] = engine.loaded.values()
    assert body["config_dict"] == {"r": 4}
    assert body["load_format"] == "flattened_bucket"
    assert body["expected_checksums"] == {"q.lora_A.weight": "ab"}
    payloads = body["serialized_named_tensors"]
    assert payloads[0] == payloads[1], "one for each rank"
    [(name, tensor)] = read_bucket(payloads[:1])
    assert name == "q.lora_A.weight"
    assert torch.equal(tensor, torch.ones(4, 2))


def test_requests_that_a_pause_keeps_continue_with_their_adapter() -> None:
    engine = Engine()
    updates = engine.updates()

    async def play() -> None:
        await updates.from_adapters({"main": ADAPTER}, 1)
        engine.keeps_requests = True
        await updates.from_adapters({"main": ADAPTER}, 2)
        assert engine.versions() == [1, 2]
        assert updates.adapters.of("main") == [*engine.loaded][1]
        engine.keeps_requests = False
        await updates.from_adapters({"main": ADAPTER}, 3)
        assert engine.versions() == [3]

    asyncio.run(play())


@pytest.mark.parametrize("path", [LOAD, VERSION, ""])
def test_after_a_failure_requests_use_the_adapter_that_they_used_before(path: str) -> None:
    """The engine refuses the adapter, or a reply is lost, and the adapter is loaded or not."""
    engine = Engine()
    updates = engine.updates()

    async def play() -> None:
        await updates.from_adapters({"main": ADAPTER}, 1)
        state_before = updates.adapters.of("main")
        engine.lost, engine.refuse = ({path}, "") if path else (set(), "rank 4 is incompatible")
        with pytest.raises(EngineError, match=path or "rank 4 is incompatible"):
            await updates.from_adapters({"main": ADAPTER}, 2)
        assert updates.adapters.of("main") == state_before
        assert state_before in engine.loaded
        assert updates.ready
        engine.refuse = ""
        await updates.from_adapters({"main": ADAPTER}, 2)
        assert [*engine.loaded] == [updates.adapters.of("main")]

    asyncio.run(play())


def test_a_whole_update_replaces_the_adapter() -> None:
    engine = Engine()
    updates = engine.updates()

    async def play() -> None:
        await updates.from_adapters({"main": ADAPTER}, 1)
        await updates.from_disk(Path("weights"), 2)
        assert updates.adapters.of("main") is None
        await updates.from_adapters({"main": ADAPTER}, 3)
        await updates.from_tensors([("a", torch.ones(2))], 4, last=True)
        assert updates.adapters.of("main") is None
        await updates.from_adapters({"main": ADAPTER}, 5)
        assert engine.versions() == [5]

    asyncio.run(play())


def test_each_policy_has_an_adapter_and_a_version_replaces_all_of_them() -> None:
    async def play() -> None:
        engine = Engine()
        updates = engine.updates()
        for version in (1, 2):
            await updates.from_adapters({"first": ADAPTER, "second": ADAPTER}, version)
            names = [updates.adapters.of(policy) for policy in ("first", "second")]
            assert [*engine.loaded] == names
            assert [adapter_version(name or "") for name in names] == [version, version]
            assert [(name or "").partition("-")[0] for name in names] == ["first", "second"]
        with pytest.raises(SamplerError, match="policy='main': the engine at http://e serves first, second"):
            updates.adapters.of("main")
        updates.adapters.drop()
        with pytest.raises(SamplerError, match="policy='first': the engine at http://e serves main"):
            updates.adapters.of("first")

    asyncio.run(play())
