"""What weight sync by value sends over HTTP: a bucket's body once to each engine, not once to each of its ranks."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import urllib.error
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import orjson
import pytest
import torch
import torch.distributed as dist

from agentrl.core.errors import EngineError
from agentrl.distributed.payload_server import PayloadServer
from agentrl.distributed.sglang_loader import BUCKET_LOADER, LOADER, LOADERS, PROBE_LOADER, agentrl_weight_loaders
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import (
    EncodedBucket,
    fetch,
    load_bucket,
    load_changes,
    probe_entries,
    try_fetch,
)
from agentrl.inference.client import payloads
from agentrl.inference.client.control import ControlEndpoint
from agentrl.inference.client.weight_updates import SGLangWeightGroups, SGLangWeightUpdates
from agentrl.inference.embedded.weights import read_bucket, read_named
from agentrl.learner.base import WeightBucket
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.weight_sync.base import TransportOptions
from agentrl.weight_sync.registry import make_transport
from tests.integration.rank_processes import run_ranks
from tests.unit.inference.fake_http import FakeReply, replying

WEIGHTS = {
    "embed": torch.randn(40, 16).to(torch.bfloat16),
    "scale": torch.randn(3),
    **{f"layers.{number}": torch.randn(32, 16) for number in range(20)},
}
VALUES = sum(weight.nbytes for weight in WEIGHTS.values())


class CountingEngine:
    """An SGLang engine of several tensor-parallel ranks: counts the bytes of the buckets that it gets, and keeps them."""

    number = 0

    def __init__(self, ranks: int, loaders: tuple[str, ...] = LOADERS, url: str = "http://127.0.0.1:9") -> None:
        self.url = url
        self.info = {"tp_size": ranks, "custom_weight_loader": [*loaders]}
        self.bytes = 0
        self.buckets: list[dict[str, Any]] = []
        control = ControlEndpoint(self)  # type: ignore[arg-type]
        self.updates = SGLangWeightUpdates(control, paused=lambda: True, keeps_requests=lambda: False)
        self.groups = SGLangWeightGroups(control)

    def request(
        self, method: str, path: str, body: Any = None, *, once: bool = False
    ) -> AbstractAsyncContextManager[FakeReply]:
        return replying(self._answer(path, body))

    async def _answer(self, path: str, body: Any) -> Any:
        if path == "/server_info":
            return self.info
        if path == "/update_weights_from_tensor":
            self.bytes += len(orjson.dumps(body))
            self.buckets.append(body)
        return {"success": True}


class Model(torch.nn.Module):
    """Keeps what is loaded into it."""

    def __init__(self) -> None:
        super().__init__()
        self.parameter = torch.nn.Parameter(torch.zeros(1))
        self.loaded: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.loaded.update((name, weight.clone()) for name, weight in weights)


class FetchingEngine(CountingEngine):
    """An engine that fetches payloads; of several ranks, the first."""

    def __init__(self, ranks: int, port: int, *, reaches: bool = True) -> None:
        super().__init__(ranks, url=f"http://127.0.0.1:{port}")
        self.model, self._reaches = Model(), reaches

    async def _answer(self, path: str, body: Any) -> Any:
        if path != "/update_weights_from_tensor":
            return await super()._answer(path, body)
        load_entry = {BUCKET_LOADER: load_bucket, LOADER: load_changes, PROBE_LOADER: try_fetch}[body["load_format"]]
        named = read_named(body["serialized_named_tensors"])
        if load_entry is not try_fetch or self._reaches:
            await asyncio.to_thread(load_entry, self.model, named)
        if load_entry is try_fetch:
            return {"success": True}
        return await super()._answer(path, body)


class SenderLearner(WeightExporter):
    """Has buckets of two senders, each with half of the layers."""

    def __init__(self) -> None:
        super().__init__(NamedTensors(WEIGHTS))
        halves = [
            {name: weight for name, weight in WEIGHTS.items() if (name > "layers.2") == second} for second in (0, 1)
        ]
        self.senders = [WeightExporter(NamedTensors(half)) for half in halves]

    def buckets_by_sender(self, bucket_bytes: int, dtype: str | None = None) -> Iterator[WeightBucket]:
        for sender in self.senders:
            for bucket in sender.buckets(bucket_bytes, dtype):
                bucket.last = bucket.last and sender is self.senders[-1]
                yield bucket


def sync(transport: str, engines: list[CountingEngine], folder: Path, learner: WeightExporter | None = None) -> None:
    options = TransportOptions(bucket_bytes=8192, folder=folder, check="none")
    asyncio.run(
        make_transport(transport, options).sync_weights(
            learner or WeightExporter(NamedTensors(WEIGHTS)),
            engines,  # type: ignore[arg-type]
            3,
        )
    )


@pytest.mark.parametrize("transport", ["tensor", "delta"])
def test_an_engine_gets_each_weight_once_whatever_the_number_of_its_ranks(transport: str, tmp_path: Path) -> None:
    engines = [CountingEngine(1), CountingEngine(8), CountingEngine(8)]
    sync(transport, engines, tmp_path)
    single, *tensor_parallel = (engine.bytes for engine in engines)
    as_base64 = VALUES * 4 / 3
    assert as_base64 < single < 1.3 * as_base64
    for engine in engines[1:]:
        headers = sum(len(entry) for bucket in engine.buckets for entry in bucket["serialized_named_tensors"][1:])
        assert as_base64 < engine.bytes - headers < 1.3 * as_base64
        assert all(len(bucket["serialized_named_tensors"]) == 8 for bucket in engine.buckets)
    # torch pickles a storage with its address, whose digits differ.
    assert tensor_parallel[0] == pytest.approx(tensor_parallel[1], rel=1e-3)


@pytest.mark.parametrize("ranks", [1, 8])
def test_weights_of_several_senders_go_once_to_an_engine(ranks: int, tmp_path: Path) -> None:
    engine, names = CountingEngine(ranks, (BUCKET_LOADER,)), list[str]()

    class Names:
        def load_weights(self, weights: list[tuple[str, torch.Tensor]]) -> None:
            names.extend(name for name, _ in weights)

    sync("tensor", [engine], tmp_path, SenderLearner())
    bodies = [bucket["serialized_named_tensors"] for bucket in engine.buckets]
    assert sum(len(body[0]) for body in bodies) < 1.3 * VALUES * 4 / 3
    for body in bodies:
        if ranks == 1:
            names += [name for name, _ in read_bucket(body)]
        else:
            load_bucket(Names(), read_named(body))
    assert sorted(names) == sorted(WEIGHTS)


def test_the_first_rank_of_an_engine_loads_the_weights_that_were_sent(tmp_path: Path) -> None:
    engine, model = CountingEngine(4), Model()
    sync("tensor", [engine], tmp_path)
    for bucket in engine.buckets:
        assert bucket["load_format"] == BUCKET_LOADER
        load_bucket(model, read_named(bucket["serialized_named_tensors"]))
    has_all(model)


def has_all(model: Model) -> None:
    assert model.loaded.keys() == WEIGHTS.keys()
    assert all(torch.equal(model.loaded[name], weight) for name, weight in WEIGHTS.items())


@pytest.fixture
def port() -> Iterator[int]:
    """A port to which this machine connects."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


@pytest.mark.parametrize("transport", ["tensor", "delta"])
def test_an_engine_fetches_what_a_request_need_not_have(transport: str, port: int, tmp_path: Path) -> None:
    engines = [FetchingEngine(1, port), FetchingEngine(8, port)]
    sync(transport, engines, tmp_path)
    for engine in engines:
        has_all(engine.model)
        for bucket in engine.buckets:
            assert all(len(entry) < 4000 for entry in bucket["serialized_named_tensors"])
            assert len(bucket["serialized_named_tensors"]) == engine.info["tp_size"]


@pytest.mark.parametrize("transport", ["tensor", "delta"])
def test_an_engine_that_does_not_reach_this_machine_gets_bodies(
    transport: str, port: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FetchingEngine(2, port, reaches=False)
    with caplog.at_level(logging.WARNING):
        sync(transport, [engine], tmp_path)
    has_all(engine.model)
    assert engine.bytes > VALUES * 4 / 3
    assert caplog.text.count("which is slow: it does not reach ports of this machine at 127.0.0.1") == 1


def test_a_payload_is_served_at_its_own_address_until_it_was_sent() -> None:
    server = PayloadServer("127.0.0.1")
    try:
        with server.serve(memoryview(b"weights")) as payload, server.serve(memoryview(b"others")) as other_payload:
            assert urllib.request.urlopen(payload.url).read() == b"weights"
            assert payload.fetched.wait(5)
            assert not other_payload.fetched.is_set()
            root = payload.url.rpartition("/")[0]
            for wrong in (root, f"{root}/", payload.url[:-1]):
                with pytest.raises(urllib.error.HTTPError, match="404"):
                    urllib.request.urlopen(wrong)
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(payload.url)
    finally:
        server.close()


def test_a_payload_that_breaks_off_is_fetched_again() -> None:
    """The second of three connections has all of it."""
    replies = [b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nab", b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nabcd"]

    def answer(server: socket.socket) -> None:
        for reply in replies:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                connection.sendall(reply)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer, server)
        fetched = fetch(f"http://127.0.0.1:{server.getsockname()[1]}/", 4, attempts=2)
        answering.result()
    assert bytes(fetched.tolist()) == b"abcd"


@pytest.mark.parametrize("reply", [b"", b"SSH-2.0-OpenSSH_9.6\r\n"])
def test_a_probe_that_reaches_another_server_loads_nothing(reply: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception would end SGLang. One server answers nothing, as a firewall does, and one is another program's."""
    monkeypatch.setattr(agentrl_weight_loaders, "_PROBE_S", 0.1)

    def answer(server: socket.socket) -> None:
        connection, _ = server.accept()
        with connection:
            connection.sendall(reply)
            connection.recv(4096)
            connection.recv(4096)

    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer, server)
        [entry] = probe_entries(f"http://127.0.0.1:{server.getsockname()[1]}/", 1)
        try_fetch(Model(), read_named([entry]))
        answering.result()


@pytest.mark.parametrize("transport", ["tensor", "delta"])
def test_an_engine_that_no_longer_reaches_the_sender_loads_nothing_and_fails_the_sync(
    transport: str, port: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender has gone after the probe, as one that was killed. An exception in the engine would end SGLang."""
    monkeypatch.setattr(payloads, "_LATE_S", 0.0)
    monkeypatch.setattr(agentrl_weight_loaders, "_ATTEMPTS", 1)
    engine, by_rank = FetchingEngine(1, port), EncodedBucket.by_rank

    def closed(bucket: EncodedBucket, ranks: int, url: str = "") -> list[str]:
        return by_rank(bucket, ranks, url if bucket.header["bytes"] == 1 else f"{url}-gone")

    monkeypatch.setattr(EncodedBucket, "by_rank", closed)
    with pytest.raises(EngineError, match=r"engine 0 of 1, .*bucket 1: .* loaded no weights.*127\.0\.0\.1:\d+"):
        sync(transport, [engine], tmp_path)
    assert not engine.model.loaded
    assert "only a part" in engine.updates.unfit
    assert engine.updates.version is None


@pytest.mark.parametrize("loaders", [(), (LOADER,)])
def test_an_engine_without_the_loader_gets_an_entry_for_each_rank(loaders: tuple[str, ...], tmp_path: Path) -> None:
    engine = CountingEngine(4, loaders)
    sync("tensor", [engine], tmp_path)
    assert engine.bytes > 4 * VALUES * 4 / 3
    for bucket in engine.buckets:
        [first, *other_entries] = bucket["serialized_named_tensors"]
        assert (bucket["load_format"], other_entries) == ("flattened_bucket", [first] * 3)


def load_entries() -> int:
    """Be one of two tensor-parallel ranks of an engine: load the entries of this rank, and check that all weights came."""
    folder, rank = Path(sys.argv[1]), int(sys.argv[2])
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store"), 2), rank=rank, world_size=2)
    group = SimpleNamespace(world_size=2, rank_in_group=rank, ranks=[0, 1], device_group=dist.group.WORLD)
    distributed = ModuleType("sglang.srt.distributed")
    distributed.get_tp_group = lambda: group  # type: ignore[attr-defined]
    sys.modules |= {name: ModuleType(name) for name in ("sglang", "sglang.srt")} | {distributed.__name__: distributed}
    learned = torch.load(folder / "weights.pt")
    for load_format, load_entry in ((BUCKET_LOADER, load_bucket), (LOADER, load_changes)):
        model = Model()
        for bucket in orjson.loads((folder / f"{load_format}.json").read_bytes()):
            assert bucket["load_format"] == load_format
            load_entry(model, read_named([bucket["serialized_named_tensors"][rank]]))
        agentrl_weight_loaders._ATTEMPTS = 1
        for entries in orjson.loads((folder / f"{load_format}.gone.json").read_bytes()):
            load_entry(model, read_named([entries[rank]]))
        assert model.loaded.keys() == learned.keys()
        assert all(torch.equal(model.loaded[name], weight) for name, weight in learned.items())
    dist.destroy_process_group()
    return 0


def test_all_ranks_load_what_the_first_has_received(tmp_path: Path) -> None:
    torch.save(WEIGHTS, tmp_path / "weights.pt")
    for transport, load_format in (("tensor", BUCKET_LOADER), ("delta", LOADER)):
        engine = CountingEngine(2)
        sync(transport, [engine], tmp_path)
        assert len(engine.buckets) > 2
        (tmp_path / f"{load_format}.json").write_bytes(orjson.dumps(engine.buckets))
        with socket.create_server(("127.0.0.1", 0)) as closed:
            url = f"http://127.0.0.1:{closed.getsockname()[1]}/"
        bucket = EncodedBucket({"bytes": 4}, torch.zeros(4, dtype=torch.uint8))
        (tmp_path / f"{load_format}.gone.json").write_bytes(orjson.dumps([bucket.by_rank(2, url)]))
    run_ranks(f"{__name__}:load_entries", tmp_path, 2, timeout_s=60)
