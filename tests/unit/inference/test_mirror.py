"""Engines of a fleet in other processes: what these know of them, and when."""

from __future__ import annotations

import asyncio
import pickle
from dataclasses import replace

import pytest
from deadlines import run_ready_tasks

from agentrl.core.errors import SamplerError
from agentrl.core.types import FinishReason, Generation, Prompt, SamplingParams
from agentrl.inference.client.engine_state import EngineState, FleetUpdate, RequestsInProgress
from agentrl.inference.client.generation import GenerationClient, _Request
from agentrl.inference.client.http import EngineHttp
from agentrl.inference.client.prefix_ages import BLOCK, PrefixAges
from agentrl.inference.client.segments import Vocabulary
from agentrl.inference.fleet.mirror import FleetMirror, MirroredFleet
from agentrl.inference.fleet.router import RoutedSampler

VOCABULARY = Vocabulary(100, str)


class Client(GenerationClient):
    """The driver's client of an engine, which sends nothing."""

    def __init__(self, name: str) -> None:
        super().__init__(EngineHttp(f"http://{name}", 1.0))
        self.given = EngineState(f"http://{name}", (f"http://{name}",), ready=True)

    def state(self) -> EngineState:
        return self.given

    @property
    def ready(self) -> bool:
        return self.given.ready

    async def wait_ready(self) -> None:
        """Never waits."""

    async def abort(self, request_id: str) -> None:
        """There is none."""


class Driver:
    """A fleet of two engines, and processes that sample with it, without sockets."""

    def __init__(self, processes: int, max_running: int | None = None) -> None:
        self.sampler = RoutedSampler(max_running)
        self.clients = [Client("a"), Client("b")]
        self.mirror = FleetMirror(self.sampler)
        self.fleets = [MirroredFleet(1.0, VOCABULARY) for _ in range(processes)]
        self.mirror.connect([self._sender(fleet) for fleet in self.fleets])
        for name, client in zip("ab", self.clients, strict=True):
            self.sampler.add(name, client)

    def _sender(self, fleet: MirroredFleet):  # type: ignore[no-untyped-def]
        async def send(update: FleetUpdate) -> dict[str, RequestsInProgress]:
            return fleet.receive(pickle.loads(pickle.dumps(update)))

        return send


def generate(fleet: MirroredFleet, policy: str = "main") -> asyncio.Task[Generation]:
    return asyncio.ensure_future(
        fleet.sampler.generate(
            Prompt((1,)), SamplingParams(max_new_tokens=1), session_id="s", request_id="s/0", policy=policy
        )
    )


@pytest.mark.parametrize(("most", "shares"), [(None, [None] * 3), (7, [2, 2, 3]), (1, [1, 1, 1])])
def test_processes_share_the_limit_of_an_engine(most: int | None, shares: list[int | None]) -> None:
    async def main() -> None:
        driver = Driver(3, most)
        await run_ready_tasks()
        for fleet, share in zip(driver.fleets, shares, strict=True):
            assert [fleet.sampler.limit(slot) for slot in fleet.sampler.slots.values()] == [share, share]
        driver.sampler.limit_engine("b", 30)
        await run_ready_tasks()
        assert [fleet.sampler.limit(fleet.sampler.slots["b"]) for fleet in driver.fleets] == [10, 10, 10]

    asyncio.run(main())


def test_generations_wait_in_all_processes_once_a_publication_returns() -> None:
    async def main() -> None:
        driver = Driver(2)
        await run_ready_tasks()
        for client in driver.clients:
            client.given = replace(client.given, ready=False)
            assert await driver.mirror.publish(client, pause="abort") == RequestsInProgress()
        running = [generate(fleet) for fleet in driver.fleets]
        await run_ready_tasks()
        assert not any(task.done() for task in running)
        for client in driver.clients:
            client.given = replace(client.given, unfit="has a mixture of weights")
            await driver.mirror.publish(client)
        for task in running:
            with pytest.raises(SamplerError, match="has a mixture of weights"):
                await task

    asyncio.run(main())


def test_a_pause_is_noted_for_the_requests_at_its_engine_alone() -> None:
    async def main() -> None:
        driver = Driver(2)
        await run_ready_tasks()
        engines = [fleet.sampler.slots["a"].sampler for fleet in driver.fleets]
        for engine in engines:
            assert isinstance(engine, GenerationClient)
            engine._requests["r"] = _Request()
            engine.unanswered = 2
        assert await driver.mirror.publish(driver.clients[1], pause="retract") == RequestsInProgress()
        assert await driver.mirror.publish(driver.clients[0]) == RequestsInProgress(4, kept=False)
        assert await driver.mirror.publish(driver.clients[0], pause="retract") == RequestsInProgress(4, kept=True)

    asyncio.run(main())


def test_lost_engines_and_policies_are_known() -> None:
    async def main() -> None:
        driver = Driver(1)
        [fleet] = driver.fleets
        driver.clients[1].given = replace(driver.clients[1].given, adapters={"blue": "blue-v3"}, cache_key="v3")
        driver.sampler.remove("a")
        await run_ready_tasks()
        [engine] = [slot.sampler for slot in fleet.sampler.slots.values()]
        assert isinstance(engine, GenerationClient)
        assert (engine.adapter("blue"), engine._cache_key(), list(fleet.sampler.slots)) == ("blue-v3", "v3", ["b"])
        with pytest.raises(SamplerError, match="policy='main': the engine at http://b serves blue"):
            await generate(fleet)
        driver.sampler.remove("b")
        await run_ready_tasks()
        waiting = generate(fleet)
        driver.sampler.fail("no engine is left")
        with pytest.raises(SamplerError, match="no engine is left"):
            await waiting

    asyncio.run(main())


def test_ages_of_cached_prefixes_count_the_requests_of_all_processes() -> None:
    async def main() -> None:
        driver, ages, prompt = Driver(2), PrefixAges(), [*range(2 * BLOCK)]
        driver.clients[0].prefix_ages = ages
        driver.clients[0].given = replace(driver.clients[0].given, knows_ages=True)
        await driver.mirror.publish(driver.clients[0])
        for version, fleet in enumerate(driver.fleets, 3):
            for name in "ab":
                engine = fleet.sampler.slots[name].sampler
                assert isinstance(engine, GenerationClient)
                cached = BLOCK if version > 3 else 0
                engine._note_blocks(prompt, Generation((), (), FinishReason.STOP, ((0, version),), cached))
            driver.mirror.add_block_uses(pickle.loads(pickle.dumps(fleet.take_block_uses())))
            assert fleet.take_block_uses() == {}
        assert ages.take() == (BLOCK, BLOCK, BLOCK, 1)

    asyncio.run(main())
