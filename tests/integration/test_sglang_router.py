"""Engines behind ``sglang-router``: pauses, updates and aborts reach whoever has the request; the router may die."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from deadlines import until
from engine_tiny import save_model
from test_fleet import configured, opened, play, tokens

from agentrl.core.errors import EngineError, SamplerError
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.fleet.fleet import Fleet

pytest.importorskip("sglang_router", reason="sglang-router is not installed")


async def loads(fleet: Fleet) -> list[int]:
    """Return how many requests the router has given to each engine that are under way."""
    assert fleet._sglang_router is not None
    async with fleet._sglang_router._control.request("GET", "/workers") as reply:
        return [int(worker["load"]) for worker in (await reply.json())["workers"]]


def router_pid(fleet: Fleet) -> int:
    assert fleet._sglang_router is not None
    assert fleet._sglang_router._process is not None
    return fleet._sglang_router._process.child.pid


async def sample(fleet: Fleet, name: str, count: int) -> Generation:
    prompt = Prompt((7, 8, 9, len(name)))
    return await fleet.sampler.generate(prompt, SamplingParams(count), session_id=name, request_id=name)


async def all_sampling(fleet: Fleet, seconds: float) -> None:
    """Wait until both engines have three requests each, and then let them sample for a while."""

    async def both_sample() -> bool:
        return await loads(fleet) == [3, 3]

    await until(both_sample)
    await asyncio.sleep(seconds)


async def aborted_and_updated(fleet: Fleet, second: Path) -> None:
    names = [f"s{number}" for number in range(6)]
    begun = time.monotonic()
    await asyncio.gather(*(sample(fleet, name, 160) for name in names))
    seconds = time.monotonic() - begun
    requests = [asyncio.ensure_future(sample(fleet, name, 160)) for name in names]
    await all_sampling(fleet, seconds / 8)
    await fleet.sampler.abort("s5")
    cut = await requests.pop()
    assert cut.finish_reason is FinishReason.ABORT
    assert 0 < len(cut.token_ids) < 160

    await asyncio.gather(*(engine.pause("abort") for engine in fleet.live))
    await asyncio.gather(*(engine.updates.from_disk(second, 4) for engine in fleet.live))
    await fleet.live[0].resume()
    assert not any(request.done() for request in requests), "one engine is paused, and it could be the one"
    await fleet.live[1].resume()
    for generation in await asyncio.gather(*requests):
        assert generation.finish_reason is FinishReason.LENGTH
        assert len(generation.token_ids) == len(generation.logprobs) == 160
        [(start, old), (then, new)] = generation.versions
        assert (start, old, new) == (0, 0, 4)
        assert 0 < then < 160


async def lost_in_mid_rollout(fleet: Fleet, fault: signal.Signals, calm: dict[str, Generation]) -> None:
    await fleet.flush()
    begun = fleet.sampler.counts["prompt"]
    playing = asyncio.ensure_future(play(fleet, sessions=4, turns=2, tokens=40))
    await until(lambda: fleet.sampler.counts["prompt"] > begun)
    os.kill(router_pid(fleet), fault)
    assert tokens(await playing) == tokens(calm)
    assert len(fleet.live) == 2
    assert fleet.metrics()["rollout/engine_restarts"] == 0
    fleet.check()


@pytest.mark.long
def test_pauses_aborts_and_the_end_of_the_router(tmp_path: Path) -> None:
    first, second = save_model(tmp_path / "a", seed=0), save_model(tmp_path / "b", seed=1)
    config = configured("sampler.engines=2", "sampler.router=sglang", "sampler.max_restarts=2", "sampler.max_running=4")

    async def run() -> None:
        async with opened(config, first, tmp_path) as fleet:
            await aborted_and_updated(fleet, second)
            await fleet.flush()
            calm = await play(fleet, sessions=4, turns=2, tokens=40)
            await lost_in_mid_rollout(fleet, signal.SIGKILL, calm)
            await lost_in_mid_rollout(fleet, signal.SIGSTOP, calm)
            os.kill(router_pid(fleet), signal.SIGKILL)
            with pytest.raises(SamplerError, match="sglang-router ended"):
                await sample(fleet, "late", 5)
            with pytest.raises(
                EngineError, match=r"(?s)max_restarts=2.*sglang-router ended \(signal SIGKILL\).*router\.log"
            ):
                fleet.check()

    asyncio.run(run())
