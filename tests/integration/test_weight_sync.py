"""New weights in several real engines, some of which refuse, hang, die or come back. Of one: `tests/conformance/syncs.py`."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx
import numpy as np
import pytest
import torch
from conformance.syncs import BUCKET, Learner
from engine_tiny import reference_logprobs, save_model

from agentrl.config.sampler import EmbeddedConfig
from agentrl.core.errors import EngineError
from agentrl.core.types import Generation, Prompt, SamplingParams
from agentrl.distributed.base import TensorSpec, WeightGroup
from agentrl.inference.client.sglang_client import SGLangClient
from agentrl.inference.client.weight_updates import SGLangWeightUpdates
from agentrl.inference.launch.processes import EngineProcess, launch_embedded
from agentrl.learner.base import WeightBucket
from agentrl.models.load import load_model
from agentrl.weight_sync.base import TransportOptions, WeightSync
from agentrl.weight_sync.registry import TRANSPORTS, make_transport

pytestmark = pytest.mark.slow

T = TypeVar("T")
PARAMS = SamplingParams(max_new_tokens=16)
IDS = [random.Random(1).randrange(2, 384) for _ in range(60)]


@dataclass
class Engines:
    processes: list[EngineProcess]
    folder: Path

    def drive(self, play: Callable[[list[SGLangClient]], Awaitable[T]]) -> T:
        async def session() -> T:
            clients = [SGLangClient(process.url, timeout_s=30) for process in self.processes]
            try:
                return await play(clients)
            finally:
                await asyncio.gather(*(client.aclose() for client in clients))

        return asyncio.run(session())


def launch(folder: Path, log: Path, port: int = 0) -> EngineProcess:
    return launch_embedded(folder, EmbeddedConfig(slots=8, context=256, threads=1), log=log, port=port)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    root = tmp_path_factory.mktemp("sync")
    folder = save_model(root / "model")
    with ThreadPoolExecutor() as pool:
        processes = list(pool.map(lambda number: launch(folder, root / f"engine{number}.log"), range(2)))
    try:
        yield Engines(processes, folder)
    finally:
        for process in processes:
            process.stop()


@pytest.fixture
def learner(engines: Engines) -> Learner:
    return Learner(load_model(engines.folder))


def sync_of(transport: str, tmp_path: Path, *, check: str = "checksum", timeout_s: float = 20.0) -> WeightSync:
    return make_transport(
        transport, TransportOptions(bucket_bytes=BUCKET, folder=tmp_path, check=check, timeout_s=timeout_s)
    )


async def sample(client: SGLangClient, ids: Sequence[int] = IDS, name: str = "r") -> Generation:
    return await client.generate(Prompt(tuple(ids)), PARAMS, session_id="s", request_id=name)


def assert_of(learner: Learner, generation: Generation, version: int) -> None:
    assert generation.versions == ((0, version),)
    expected = reference_logprobs(learner.model, IDS, list(generation.token_ids))
    np.testing.assert_allclose(generation.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_all_engines_agree_with_the_learner(engines: Engines, learner: Learner, transport: str, tmp_path: Path) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        sync = sync_of(transport, tmp_path)
        try:
            for version in (11, 12):
                learner.change(version)
                await sync.sync_weights(learner, clients, version)
                for client in clients:
                    assert await client.dtype() == "float32"
                    assert_of(learner, await sample(client), version)
        finally:
            await sync.aclose()

    engines.drive(play)


def client_with(updates: type[SGLangWeightUpdates], url: str) -> SGLangClient:
    """Return a client that updates weights through ``updates``."""
    client = SGLangClient(url, timeout_s=30)
    client.updates = updates(client.control, paused=client._is_paused, keeps_requests=lambda: False)
    return client


class Renaming(SGLangWeightUpdates):
    """Updates weights that the engine does not have, from the second bucket on."""

    async def from_tensors(
        self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1
    ) -> None:
        named = [(self.name(name), tensor) for name, tensor in named]
        await super().from_tensors(named, version, last=last, ranks=ranks)

    async def from_group(self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool) -> None:
        specs = [replace(spec, name=self.name(spec.name)) for spec in specs]
        await super().from_group(group, specs, version, last=last)

    def name(self, name: str) -> str:
        return name.replace("layers.1", "layers.9")


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_one_engine_that_refuses_a_bucket_blocks_no_other(
    engines: Engines, learner: Learner, transport: str, tmp_path: Path
) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        other_client = client_with(Renaming, clients[1].url)
        sync = sync_of(transport, tmp_path)
        await sync.sync_weights(learner, clients, 31)
        try:
            begun = time.monotonic()
            changed = Learner(load_model(engines.folder))
            changed.change(6)
            with pytest.raises(
                EngineError, match=r"engine 1 of 2.*version 32, bucket [2-9]: .*no weight 'model.layers.9"
            ):
                await sync.sync_weights(changed, [clients[0], other_client], 32)
            assert time.monotonic() - begun < 8
            for client in (clients[0], other_client):
                assert await client.version() == 31
                assert_of(learner, await sample(client), 31)
            await sync.sync_weights(changed, clients, 33)
            assert_of(changed, await sample(clients[1]), 33)
        finally:
            await sync.aclose()
            await other_client.aclose()

    engines.drive(play)


class Striking(Learner):
    """Does something to an engine before the second bucket is sent."""

    strike: Callable[[], None]

    def buckets(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        for number, bucket in enumerate(super().buckets(bucket_bytes, dtype)):
            if number == 1:
                self.strike()
            yield bucket


def test_engines_that_hang_die_and_come_back_in_mid_broadcast(
    engines: Engines, learner: Learner, tmp_path: Path
) -> None:
    """The sync ends and names the engine; the remaining engine stays on its version; a new group is created."""
    lost = launch(engines.folder, tmp_path / "lost.log")
    port = int(lost.url.rsplit(":", 1)[1])
    striking = Striking(load_model(engines.folder))
    striking.change(7)

    async def play(clients: list[SGLangClient]) -> None:
        nonlocal lost
        other = SGLangClient(lost.url, timeout_s=3)
        both = [clients[0], other]
        sync = sync_of("distributed", tmp_path, timeout_s=3)

        async def struck(version: int, how: signal.Signals) -> None:
            await sync.sync_weights(learner, both, version)
            for client in both:
                assert_of(learner, await sample(client), version)
            striking.strike = partial(os.kill, lost.child.pid, how)
            with pytest.raises(EngineError, match=rf"engine 1 of 2 \({other.url}\).*bucket 2: it died or hangs"):
                await sync.sync_weights(striking, both, version + 1)
            assert_of(learner, await sample(clients[0]), version)

        try:
            await struck(41, signal.SIGSTOP)
            os.kill(lost.child.pid, signal.SIGCONT)
            await sync.sync_weights(learner, both, 43)
            lost.stop()
            lost = await asyncio.to_thread(launch, engines.folder, tmp_path / "again.log", port)
            # The group of the last sync contains an engine that was replaced: a new group is created.
            await struck(45, signal.SIGKILL)
            learner.change(8)
            await sync.sync_weights(learner, clients, 47)
            for client in clients:
                assert_of(learner, await sample(client), 47)
        finally:
            await sync.aclose()
            await other.aclose()

    try:
        engines.drive(play)
    finally:
        lost.stop()


def test_a_checksum_finds_weights_that_are_not_those_sent(engines: Engines, learner: Learner, tmp_path: Path) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        class Changing(SGLangWeightUpdates):
            async def from_tensors(
                self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool, ranks: int = 1
            ) -> None:
                named = [(name, tensor + 1e-3 if "layers.1.mlp" in name else tensor) for name, tensor in named]
                await super().from_tensors(named, version, last=last, ranks=ranks)

        other_client = client_with(Changing, engines.processes[1].url)
        try:
            await sync_of("tensor", tmp_path, check="version").sync_weights(learner, [clients[0], other_client], 61)
            with pytest.raises(
                EngineError, match=r"engine 1 of 2, check of the weights.*3 of 24 weights differ: model"
            ):
                await sync_of("tensor", tmp_path).sync_weights(learner, [clients[0], other_client], 62)
        finally:
            await other_client.aclose()

    engines.drive(play)


def test_generations_wait_while_an_update_is_under_way(engines: Engines, learner: Learner) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        client = clients[0]
        await client.updates.from_tensors(list(learner.model.state_dict().items()), 70, last=True)
        running = asyncio.create_task(sample(client, name="before"))
        await asyncio.sleep(0.02)
        await client.updates.begin()
        late = asyncio.create_task(sample(client, name="late"))
        assert (await running).versions == ((0, 70),)
        named = list(learner.model.state_dict().items())
        await client.updates.from_tensors(named[:5], 71, last=False)
        await asyncio.sleep(0.2)
        assert not late.done()
        await client.updates.from_tensors(named[5:], 71, last=True)
        assert (await late).versions == ((0, 71),)

    engines.drive(play)


def test_an_update_that_was_left_open_is_taken_over(engines: Engines, learner: Learner, tmp_path: Path) -> None:
    url = engines.processes[0].url
    assert httpx.post(url + "/begin_weight_update", json={}, trust_env=False).status_code == 200

    async def play(clients: list[SGLangClient]) -> None:
        await sync_of("tensor", tmp_path).sync_weights(learner, clients, 81)
        assert_of(learner, await sample(clients[0]), 81)

    engines.drive(play)
