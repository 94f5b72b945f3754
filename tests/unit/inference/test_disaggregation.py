"""Prefill and decode apart: command lines, and a fleet of stand-ins behind the real ``sglang-router``.

A stand-in for decode replies once one for prefill has the same room, as SGLang does.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from deadlines import until

from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, EngineError, SamplerError
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.fleet import Fleet
from agentrl.inference.launch.launcher import EngineSpec
from agentrl.inference.launch.processes import launch_sglang
from tests.unit.inference.test_launch import install_stand_in

PORTS = {0: 9100, 1: 9101}
"""Bootstrap ports of the engines for prefill."""
APART = [
    "sampler.backend=sglang",
    "sampler.router=sglang",
    "weights.gap_limit=off",
    "sampler.health_interval_s=0.1",
    "sampler.stall_timeout_s=5",
    "sampler.max_restarts=1",
]
GROUPS = "sampler.groups={prompts: {serves: prefill, engines: %d}, answers: {serves: decode, engines: %d}}"


def configured(*settings: str, prefill: int = 1, decode: int = 2) -> Config:
    return load_config(None, [*APART, GROUPS % (prefill, decode), *settings])


@dataclass
class Rooms:
    """Where an engine for decode waits for what one for prefill has computed."""

    computed: dict[int, asyncio.Event] = field(default_factory=dict)

    def room(self, number: int) -> asyncio.Event:
        return self.computed.setdefault(number, asyncio.Event())


class StandIn:
    """An engine for prefill or decode."""

    start_details = log = ""

    def __init__(self, number: int, serves: str, rooms: Rooms) -> None:
        self.number, self.serves, self.rooms = number, serves, rooms
        self.version = "0"
        self.requests: list[dict[str, Any]] = []
        self.has_ended = False
        app = web.Application()
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/update_weights_from_disk", self.update)
        app.router.add_route("*", "/{path:.*}", self.reply)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def reply(self, request: web.Request) -> web.Response:
        if self.has_ended:
            return web.Response(status=500)
        info: dict[str, Any] = {"weight_version": self.version, "max_req_input_len": 4096, "model_path": "none"}
        info |= {"disaggregation_mode": self.serves, "tp_size": 1, "dp_size": 1, "is_generation": True}
        if self.serves == "prefill":
            info["disaggregation_bootstrap_port"] = PORTS[self.number]
        return web.json_response(info)

    async def update(self, request: web.Request) -> web.Response:
        self.version = (await request.json())["weight_version"]
        return web.json_response({"success": True})

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.requests.append(body)
        room = self.rooms.room(body["bootstrap_room"])
        if self.serves == "prefill":
            room.set()
        await room.wait()
        meta = {"id": body["rid"], "finish_reason": {"type": "length"}, "prompt_tokens": len(body["input_ids"])}
        meta |= {"completion_tokens": 1, "cached_tokens": 0, "weight_version": self.version}
        meta |= {"output_token_logprobs": [[-0.5, self.number, None]]}
        return web.json_response({"text": "", "output_ids": [self.number], "meta_info": meta})

    def check(self) -> None:
        if self.has_ended:
            raise EngineError(f"the stand-in {self.number} has ended")

    def log_tail(self, lines: int = 20) -> str:
        return ""

    def release(self) -> None:
        self.stop()

    def stop(self) -> None:
        self.has_ended = True

    kill = stop


@dataclass
class StandIns:
    """Launches stand-ins in the event loop of the test."""

    config: Config
    loop: asyncio.AbstractEventLoop
    engines: dict[int, StandIn] = field(default_factory=dict)
    may_start: bool = True
    gate: threading.Event = field(default_factory=threading.Event)
    """A start waits for it."""
    rooms: Rooms = field(default_factory=Rooms)
    servers: list[TestServer] = field(default_factory=list)

    def launch(self, number: int) -> StandIn:
        assert self.gate.wait(60)
        if not self.may_start:
            raise EngineError("no memory")
        prefill = self.config.sampler.groups["prompts"].engines
        engine = StandIn(number, "prefill" if number < prefill else "decode", self.rooms)
        asyncio.run_coroutine_threadsafe(engine.server.start_server(), self.loop).result(10)
        self.engines[number] = engine
        self.servers.append(engine.server)
        return engine


@asynccontextmanager
async def opened(config: Config, folder: Path) -> AsyncIterator[tuple[Fleet, StandIns]]:
    launcher = StandIns(config, asyncio.get_running_loop())
    vocabulary = Vocabulary(100, lambda ids: "")
    fleet = Fleet(config.sampler, launcher, folder, vocabulary=vocabulary, max_tokens=64)
    launcher.gate.set()
    try:
        await fleet.start()
        yield fleet, launcher
    finally:
        launcher.gate.set()
        await fleet.aclose()
        for server in launcher.servers:
            await server.close()


async def sample(fleet: Fleet, session: str, turn: int = 0) -> Generation:
    params = SamplingParams(max_new_tokens=1)
    return await fleet.sampler.generate(Prompt((1, 2, 3)), params, session_id=session, request_id=f"{session}/{turn}")


def test_each_request_goes_to_both_kinds_and_weights_to_all(tmp_path: Path) -> None:
    pytest.importorskip("sglang_router", reason="sglang-router is not installed")

    async def play() -> None:
        async with asyncio.timeout(60), opened(configured("sampler.max_running=2"), tmp_path) as (fleet, launcher):
            turns = {name: [await sample(fleet, name, turn) for turn in range(3)] for name in "abcdefghijklmnop"}
            engines = {name: {generation.token_ids for generation in sampled} for name, sampled in turns.items()}
            assert all(len(ids) == 1 for ids in engines.values()), "all turns of a session are at one engine"
            assert {number for ids in engines.values() for (number,) in ids} == {1, 2}, "only engines for decode sample"
            prompts = launcher.engines[0].requests
            rooms = [request["bootstrap_room"] for number in (1, 2) for request in launcher.engines[number].requests]
            assert sorted(request["bootstrap_room"] for request in prompts) == sorted(rooms)
            assert {(request["bootstrap_host"], request["bootstrap_port"]) for request in prompts} == {
                ("127.0.0.1", 9100)
            }
            assert fleet.sampler.limit(fleet.sampler.slots["sglang-router"]) == 4, "2 for each engine that samples"

            assert len(fleet.live) == 3
            for engine in fleet.live:
                await engine.updates.from_disk(tmp_path, 7)
            assert [await client.version() for client in fleet.live] == [7, 7, 7]
            assert (await sample(fleet, "e")).versions == ((0, 7),)

            fleet.set_weight_sync(synced)
            await fails_and_comes_back(fleet, launcher)

    async def synced(engine: Any) -> int:
        await engine.updates.from_disk(tmp_path, 8)
        return 8

    asyncio.run(play())


async def fails_and_comes_back(fleet: Fleet, launcher: StandIns) -> None:
    """The only engine for prefill ends: requests wait for its restart, which gets the newest weights, and then for none."""
    first = launcher.engines[0]
    launcher.gate.clear()
    first.stop()
    await until(lambda: not fleet.metrics()["engines/prompts/live"])
    waiting = asyncio.ensure_future(sample(fleet, "f"))
    await asyncio.sleep(0)
    assert "sglang-router" not in fleet.sampler.slots
    launcher.gate.set()
    await waiting
    again = launcher.engines[0]
    assert again is not first
    assert again.requests[0]["bootstrap_room"] not in [request["bootstrap_room"] for request in first.requests]
    assert again.version.startswith("8-")
    metrics = {name: value for name, value in fleet.metrics().items() if name.startswith("engines/")}
    assert metrics == {
        "engines/prompts/live": 1, "engines/prompts/restarts": 1, "engines/answers/live": 2, "engines/answers/restarts": 0,
    }  # fmt: skip
    launcher.may_start = False
    again.stop()
    await until(lambda: not fleet.metrics()["engines/prompts/live"])
    with pytest.raises(SamplerError, match="no engine is left for prefill"):
        await sample(fleet, "g")
    with pytest.raises(EngineError, match=r"no engine is left for prefill\. engine-0 was restarted 1 times"):
        fleet.check()


PRINTS_ARGUMENTS = "import json, sys; print(json.dumps(sys.argv[1:]), flush=True); sys.exit(1)"


def arguments(spec: EngineSpec, number: int) -> dict[str, str]:
    """Return the options that an engine is started with."""
    with pytest.raises(EngineError):
        spec.start(number)
    words = json.loads((spec.logs / f"engine-{number}.log").read_text().splitlines()[0])
    return dict(zip(words[::2], words[1::2], strict=True))


def test_engines_are_started_for_their_kind_with_the_options_of_their_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install_stand_in(tmp_path, monkeypatch, PRINTS_ARGUMENTS)
    (tmp_path / "config.json").write_text("{}")
    common = "sampler.sglang={tp: 2, mem_fraction_static: 0.7, disaggregation_transfer_backend: nixl}"
    groups = "{prompts: {serves: prefill, engines: 2, sglang: {tp_size: 4}}, answers: {serves: decode}}"
    config = load_config(None, [*APART, common, f"sampler.groups={groups}"])
    spec = EngineSpec(config.sampler, tmp_path, tmp_path, seed=0)
    first, second, third = (arguments(spec, number) for number in range(3))
    assert [options["--disaggregation-mode"] for options in (first, second, third)] == ["prefill", "prefill", "decode"]
    assert first["--disaggregation-bootstrap-port"].isdigit()
    assert first["--disaggregation-bootstrap-port"] != first["--port"]
    assert "--disaggregation-bootstrap-port" not in third
    assert (first["--tp-size"], third["--tp"], third["--mem-fraction-static"]) == ("4", "2", "0.7")
    assert {options["--disaggregation-transfer-backend"] for options in (first, third)} == {"nixl"}


@pytest.mark.parametrize("option", ["disaggregation_mode", "disaggregation-bootstrap-port"])
def test_what_the_run_sets_itself_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"sampler\.sglang\.{option}=9"):
        launch_sglang(tmp_path, log=tmp_path / "log", options={option: 9})
