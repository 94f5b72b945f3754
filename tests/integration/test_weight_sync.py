"""New weights in real engines by every transport: the engine then computes what the learner does, and never a mixture."""

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
from engine_tiny import reference_logprobs, save_model

from agentrl.errors import EngineError, LearnerError
from agentrl.models.load import load_model
from agentrl.protocols import TensorSpec, WeightGroup, WeightSync
from agentrl.sampler.client import SGLangClient
from agentrl.sampler.launch import EngineProcess, launch_embedded
from agentrl.types import Generation, Prompt, SamplingParams
from agentrl.weights import TRANSPORTS, make_sync

T = TypeVar("T")
PARAMS = SamplingParams(max_new_tokens=16)
IDS = [random.Random(1).randrange(2, 384) for _ in range(60)]
BUCKET = 40_000
"""Bytes: several buckets for the models here."""


class Learner:
    """Has the weights of a model, in a buffer that it uses again; one change of them is one version."""

    def __init__(self, folder: Path, fail_at: int | None = None) -> None:
        self.model = load_model(folder)
        self.fail_at = fail_at

    def change(self, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter += 0.05 * torch.randn(parameter.shape, generator=generator)

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        bucket: list[tuple[str, torch.Tensor]] = []
        count = 0
        for name, parameter in self.model.named_parameters():
            bucket.append((name, parameter.detach().clone()))
            if sum(tensor.numel() * 4 for _, tensor in bucket) >= bucket_bytes:
                yield bucket
                for _, tensor in bucket:
                    tensor.fill_(float("nan"))
                bucket, count = [], count + 1
                if count == self.fail_at:
                    raise LearnerError("rank 1 died")
        yield bucket


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
    return launch_embedded(folder, log=log, port=port, slots=8, context=256, threads=1)


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
    return Learner(engines.folder)


def sync_of(transport: str, tmp_path: Path, *, check: str = "checksum", timeout_s: float = 20.0) -> WeightSync:
    return make_sync(transport, bucket_bytes=BUCKET, folder=tmp_path, check=check, timeout_s=timeout_s)


async def sample(client: SGLangClient, ids: Sequence[int] = IDS, name: str = "r") -> Generation:
    return await client.generate(Prompt(tuple(ids)), PARAMS, session_id="s", request_id=name)


def assert_of(learner: Learner, generation: Generation, version: int) -> None:
    assert generation.versions == ((0, version),)
    wanted = reference_logprobs(learner.model, IDS, list(generation.token_ids))
    np.testing.assert_allclose(generation.logprobs, wanted, atol=1e-4)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engine_and_learner_agree_after_every_sync(
    engines: Engines, learner: Learner, transport: str, tmp_path: Path
) -> None:
    """The prompt is the same every time: its keys and values of the version before lie in the prefix cache."""

    async def play(clients: list[SGLangClient]) -> None:
        sync = sync_of(transport, tmp_path)
        try:
            for version in (11, 12, 13):
                learner.change(version)
                await sync.push(learner, clients, version)
                for client in clients:
                    assert_of(learner, first := await sample(client), version)
                    assert first.cached_tokens == 0
                    again = await sample(client)
                    assert again.cached_tokens == len(IDS) - 1, "there was a cache to serve old weights from"
                    assert_of(learner, again, version)
        finally:
            await sync.aclose()

    engines.drive(play)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_learner_that_fails_in_between_leaves_the_old_weights(
    engines: Engines, learner: Learner, transport: str, tmp_path: Path
) -> None:
    broken = Learner(engines.folder, fail_at=2)
    broken.change(3)

    async def play(clients: list[SGLangClient]) -> None:
        sync = sync_of(transport, tmp_path)
        await sync.push(learner, clients, 21)
        with pytest.raises(LearnerError, match="rank 1 died"):
            await sync.push(broken, clients, 22)
        for client in clients:
            assert await client.version() == 21
            assert_of(learner, await sample(client), 21)
        learner.change(4)
        await sync.push(learner, clients, 23)
        assert_of(learner, await sample(clients[0]), 23)
        await sync.aclose()

    engines.drive(play)


class Renaming(SGLangClient):
    """Asks for weights that the engine does not have, from the second bucket on."""

    buckets = 0

    async def update_from_tensors(self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool) -> None:
        named = [(self.name(name), tensor) for name, tensor in named]
        await super().update_from_tensors(named, version, last=last)

    async def update_from_group(
        self, group: WeightGroup, specs: Sequence[TensorSpec], version: int, *, last: bool
    ) -> None:
        specs = [replace(spec, name=self.name(spec.name)) for spec in specs]
        await super().update_from_group(group, specs, version, last=last)

    def name(self, name: str) -> str:
        return name.replace("layers.1", "layers.9")


@pytest.mark.parametrize("transport", ["tensor", "distributed"])
def test_one_engine_that_refuses_a_bucket_keeps_nobody_waiting(
    engines: Engines, learner: Learner, transport: str, tmp_path: Path
) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        other = Renaming(clients[1].url, timeout_s=30)
        sync = sync_of(transport, tmp_path)
        await sync.push(learner, clients, 31)
        try:
            begun = time.monotonic()
            changed = Learner(engines.folder)
            changed.change(6)
            with pytest.raises(
                EngineError, match=r"engine 1 of 2.*version 32, bucket [2-9]: .*no weight 'model.layers.9"
            ):
                await sync.push(changed, [clients[0], other], 32)
            assert time.monotonic() - begun < 8
            for client in (clients[0], other):
                assert await client.version() == 31
                assert_of(learner, await sample(client), 31)
            await sync.push(changed, clients, 33)
            assert_of(changed, await sample(clients[1]), 33)
        finally:
            await sync.aclose()
            await other.aclose()

    engines.drive(play)


class Striking(Learner):
    """Does something to an engine before the second bucket is sent."""

    strike: Callable[[], None]

    def weights(self, bucket_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
        for number, bucket in enumerate(super().weights(bucket_bytes)):
            if number == 2:  # it is taken before the second is sent
                self.strike()
            yield bucket


def test_engines_that_hang_die_and_come_back_in_mid_broadcast(
    engines: Engines, learner: Learner, tmp_path: Path
) -> None:
    """The push ends and names the engine; the one that is left stays on its version; a new group is made."""
    lost = launch(engines.folder, tmp_path / "lost.log")
    port = int(lost.url.rsplit(":", 1)[1])
    striking = Striking(engines.folder)
    striking.change(7)

    async def play(clients: list[SGLangClient]) -> None:
        nonlocal lost
        other = SGLangClient(lost.url, timeout_s=4)
        both = [clients[0], other]
        sync = sync_of("distributed", tmp_path, timeout_s=4)
        try:
            for version, how in ((41, signal.SIGSTOP), (43, signal.SIGKILL)):
                await sync.push(learner, both, version)
                striking.strike = partial(os.kill, lost.child.pid, how)
                with pytest.raises(EngineError, match=rf"engine 1 of 2 \({other.url}\).*bucket 2: it died or hangs"):
                    await sync.push(striking, both, version + 1)
                assert_of(learner, await sample(clients[0]), version)
                os.kill(lost.child.pid, signal.SIGCONT)
            lost.stop()
            lost = await asyncio.to_thread(launch, engines.folder, tmp_path / "again.log", port)
            await sync.push(learner, both, 45)
            lost.stop()
            lost = await asyncio.to_thread(launch, engines.folder, tmp_path / "third.log", port)
            # The group of the last push has an engine in it that is another one now.
            learner.change(8)
            await sync.push(learner, both, 46)
            for client in both:
                assert_of(learner, await sample(client), 46)
        finally:
            await sync.aclose()
            await other.aclose()

    try:
        engines.drive(play)
    finally:
        lost.stop()


def test_a_checksum_finds_weights_that_are_not_those_sent(engines: Engines, learner: Learner, tmp_path: Path) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        class Meddling(SGLangClient):
            async def update_from_tensors(
                self, named: Sequence[tuple[str, torch.Tensor]], version: int, *, last: bool
            ) -> None:
                named = [(name, tensor + 1e-3 if "layers.1.mlp" in name else tensor) for name, tensor in named]
                await super().update_from_tensors(named, version, last=last)

        other = Meddling(engines.processes[1].url, timeout_s=30)
        try:
            await sync_of("tensor", tmp_path, check="version").push(learner, [clients[0], other], 61)
            with pytest.raises(
                EngineError, match=r"engine 1 of 2, check of the weights.*3 of 24 weights differ: model"
            ):
                await sync_of("tensor", tmp_path).push(learner, [clients[0], other], 62)
        finally:
            await other.aclose()

    engines.drive(play)


def test_generations_wait_while_an_update_is_under_way(engines: Engines, learner: Learner) -> None:
    async def play(clients: list[SGLangClient]) -> None:
        client = clients[0]
        await client.update_from_tensors(list(learner.model.state_dict().items()), 70, last=True)
        running = asyncio.create_task(sample(client, name="before"))
        await asyncio.sleep(0.02)
        await client.begin_update()
        late = asyncio.create_task(sample(client, name="late"))
        assert (await running).versions == ((0, 70),)
        named = list(learner.model.state_dict().items())
        await client.update_from_tensors(named[:5], 71, last=False)
        await asyncio.sleep(0.2)
        assert not late.done()
        await client.update_from_tensors(named[5:], 71, last=True)
        assert (await late).versions == ((0, 71),)

    engines.drive(play)


def test_an_update_that_somebody_left_open_is_taken_over(engines: Engines, learner: Learner, tmp_path: Path) -> None:
    url = engines.processes[0].url
    assert httpx.post(url + "/begin_weight_update", json={}, trust_env=False).status_code == 200

    async def play(clients: list[SGLangClient]) -> None:
        await sync_of("tensor", tmp_path).push(learner, clients, 81)
        assert_of(learner, await sample(clients[0]), 81)

    engines.drive(play)
