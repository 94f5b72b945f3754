"""Learner and engines on a Ray of three machines, each with an address of the loopback's and two GPUs that only Ray
believes in."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import preloaded
import psutil
import pytest
import ray
from deadlines import until, wait_for_exit, wait_until
from engine_tiny import save_model
from ray.cluster_utils import Cluster
from shared_runs import SMALL, Running
from test_runners import comparable, make_config, opened, pool_of, running_engine, take_steps

from agentrl.cluster.engine_actors import EngineHost, PolicyLocations, RayEngine, RayLauncher
from agentrl.cluster.placement_group import ActorLocation, ReservedPlacement, actor_location
from agentrl.cluster.placement_layout import lay_out, spreads_runners
from agentrl.cluster.ray_runtime import RayRuntime
from agentrl.cluster.runner_actors import RayRunners, RemoteRunner
from agentrl.config import runners
from agentrl.config.load import load_config
from agentrl.core.errors import ConfigError, EngineError, LearnerError
from agentrl.inference.launch.launcher import EngineSpec

pytestmark = pytest.mark.slow

MACHINES = ("127.0.0.2", "127.0.0.3")
EMBEDDED = ["sampler.embedded.slots=8", "sampler.embedded.context=256", "sampler.embedded.threads=1"]


@pytest.fixture(scope="module")
def cluster(forked_workers: None) -> Iterator[Cluster]:
    # Ray notes its address in a folder that all Rays of a machine share; its sockets want a short path.
    folder = tempfile.mkdtemp(prefix="agentrl-")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", folder)
        started = Cluster()
        small = {"object_store_memory": 80 << 20, "include_dashboard": False}
        started.add_node(num_cpus=0, num_gpus=0, **small)
        for address in MACHINES:
            started.add_node(node_ip_address=address, num_cpus=2, num_gpus=2, **small)
        patch.setenv("RAY_ADDRESS", started.address)
        yield started
        started.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("models") / "a", seed=0)


def reserve(
    settings: list[str], device: str, seconds: float = 20, *, is_cancelled: bool = False
) -> tuple[Any, ReservedPlacement]:
    config, cancelled = load_config(None, settings), threading.Event()
    if is_cancelled:
        cancelled.set()
    spreads = partial(spreads_runners, config)
    layout, runtime = lay_out(config, device), RayRuntime(cpus=1)
    return config, ReservedPlacement.reserve(layout, runtime, seconds, spreads, cancelled)


def actor_locations(placement: ReservedPlacement) -> list[ActorLocation]:
    """Start actors in place of the learner's ranks: what these compute does not matter for where they are."""
    needs = placement.layout.rank_needs
    actor: Any = ray.remote(num_cpus=needs["CPU"], num_gpus=needs.get("GPU", 0))(EngineHost)
    ranks = [actor.options(**placement.rank_options(rank)).remote() for rank in range(len(placement.layout.ranks))]
    locations = ray.get([rank.__ray_call__.remote(actor_location) for rank in ranks])
    KEPT.append(ranks)
    return list(locations)


KEPT: list[list[Any]] = []
"""An actor without references ends."""


def ended(engine: RayEngine) -> str:
    def failure() -> str:
        try:
            engine.check()
        except EngineError as error:
            return str(error)
        return ""

    wait_until(failure, 20)
    return failure()


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def test_an_engine_is_started_again_where_it_belongs(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """After it was killed, and after the actor that holds it was; it ends with its placement."""
    settings = ["placement.mode=disaggregate", "learner.ranks=2", "sampler.engines=1", *EMBEDDED]
    config, placement = reserve(settings, "cpu")
    try:
        locations = cache(partial(actor_locations, placement))  # ranks start once
        launcher = RayLauncher(
            EngineSpec(config.sampler, model, tmp_path, 0), placement, PolicyLocations(placement, locations)
        )
        first = launcher.launch(0)
        machine = urlsplit(first.url).hostname
        assert machine in MACHINES
        assert first.log == f"{tmp_path / 'engine-0.log'} on {machine}"
        first.check()
        first.kill()
        assert "ended (signal SIGKILL)" in ended(first)
        assert gone(*first.pids)
        second = launcher.launch(0)
        assert urlsplit(second.url).hostname == machine
        (tmp_path / "engine-0.log").write_text("its first line\nits last words\n")
        assert second.log_tail(1) == "its last words"
        ray.kill(launcher._hosts[0, 0])
        assert "the process that held the engine" in ended(second)
        wait_until(lambda: gone(*second.pids), 30)
        second.kill()
        assert "cannot be read" in second.log_tail()
        third = launcher.launch(0)
        third.check()
        placement.close()
        wait_until(lambda: gone(*third.pids), 30)
    finally:
        placement.close()


STAND_IN = """
import argparse, http.server, json, os, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("--port", "--host", "--random-seed"):
    parser.add_argument(name)
parser.add_argument("--enable-memory-saver", action="store_true")
arguments, _ = parser.parse_known_args()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
server = http.server.HTTPServer((arguments.host, int(arguments.port)), Health)
received = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "host": arguments.host, "saver": arguments.enable_memory_saver}
pathlib.Path(sys.argv[0]).with_name(f"received-{arguments.random_seed}").write_text(json.dumps(received))
server.serve_forever()
"""


def stand_in(folder: Path, server: str = STAND_IN) -> Path:
    """Return an interpreter whose SGLang is a script that records its GPUs, and answers requests."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(server)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def launched(settings: list[str], folder: Path, model: Path) -> tuple[list[ActorLocation], list[dict[str, Any]]]:
    """Start all engines in a reserved placement; return the locations of the ranks, and what each engine received."""
    config, placement = reserve(settings, "cuda")
    try:
        ranks = actor_locations(placement)
        locations = PolicyLocations(placement, lambda: ranks)
        launcher = RayLauncher(EngineSpec(config.sampler, model, folder / "logs", 0), placement, locations)
        for number in range(config.sampler.engines):
            launcher.launch(number)
        received = [
            json.loads((folder / "sglang" / f"received-{number}").read_text())
            for number in range(config.sampler.engines)
        ]
        return ranks, received
    finally:
        placement.close()


SEVERAL = """
import argparse, http.server, json, os, pathlib, sys, time
parser = argparse.ArgumentParser()
for name in ("--port", "--host", "--nnodes", "--node-rank", "--dist-init-addr"):
    parser.add_argument(name)
arguments, _ = parser.parse_known_args()
folder = pathlib.Path(sys.argv[0]).parent
(folder / f"pid-{arguments.node_rank}").write_text(str(os.getpid()))
received = {"gpus": os.environ["CUDA_VISIBLE_DEVICES"], "host": arguments.host, "meeting": arguments.dist_init_addr}
(folder / f"machine-{arguments.node_rank}.tmp").write_text(json.dumps(received))
(folder / f"machine-{arguments.node_rank}.tmp").rename(folder / f"machine-{arguments.node_rank}")
while len([*folder.glob("machine-?")]) < int(arguments.nnodes) or (folder / "fails").exists():
    time.sleep(0.01)
    if arguments.node_rank == "1" and (folder / "fails").exists():
        sys.exit("the second machine has no memory")
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
http.server.HTTPServer((arguments.host, int(arguments.port)), Health).serve_forever()
"""
"""SGLang on several machines: no machine is ready before all have been started."""


@pytest.mark.long
def test_an_engine_of_two_machines_starts_and_ends_as_one(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    options = ["sampler.backend=sglang", "sampler.sglang={tp_size: 4, nnodes: 2}", "placement.mode=disaggregate"]
    python, folder = stand_in(tmp_path, SEVERAL), tmp_path / "sglang"
    config, placement = reserve([*options, f"sampler.sglang.python={python}"], "cpu")
    try:
        locations = PolicyLocations(placement, lambda: [ActorLocation("", ())])
        launcher = RayLauncher(EngineSpec(config.sampler, model, tmp_path / "logs", 0), placement, locations)
        engine = launcher.launch(0)
        machines = [json.loads((folder / f"machine-{rank}").read_text()) for rank in range(2)]
        assert {machine["host"] for machine in machines} == set(MACHINES)
        assert {machine["gpus"] for machine in machines} == {"0,1"}
        [meeting] = {machine["meeting"] for machine in machines}
        assert urlsplit(engine.url).hostname == meeting.split(":")[0] == machines[0]["host"]
        engine.check()
        os.kill(int((folder / "pid-1").read_text()), signal.SIGKILL)
        assert "ended (signal SIGKILL)" in ended(engine)
        engine.kill()
        wait_until(lambda: all(map(gone, engine.pids)), 30)
        (folder / "fails").touch()
        with pytest.raises(EngineError, match="the second machine has no memory"):
            launcher.launch(0)
        wait_until(lambda: gone(int((folder / "pid-0").read_text())), 30)
        (folder / "fails").unlink()
        launcher.launch(0).check()
    finally:
        placement.close()


@pytest.mark.long
def test_engines_get_the_gpus_of_their_ranks_or_their_own(cluster: Cluster, model: Path, tmp_path: Path) -> None:
    """Colocated, rank j of engine e has the GPU of the learner's rank e*g+j; apart, no GPU is given twice."""
    python = f"sampler.sglang.python={stand_in(tmp_path)}"
    engine = ["sampler.backend=sglang", "sampler.sglang.tp_size=2", python]
    address = {node["NodeID"]: node["NodeManagerAddress"] for node in cluster_nodes()}
    ranks, received = launched(
        [*engine, "sampler.engines=2", "learner.ranks=4", "placement.mode=colocate"], tmp_path, model
    )
    for number, actor in enumerate(received):
        first, second = ranks[2 * number : 2 * number + 2]
        assert first.node == second.node
        assert actor == {"gpus": f"{first.gpus[0]},{second.gpus[0]}", "host": address[first.node], "saver": True}
    assert {actor["host"] for actor in received} == set(MACHINES)
    ranks, [actor] = launched([*engine, "learner.ranks=2", "placement.mode=disaggregate"], tmp_path, model)
    assert (actor["gpus"], actor["saver"]) == ("0,1", False)
    assert actor["host"] not in {address[rank.node] for rank in ranks}


def cluster_nodes() -> list[dict[str, Any]]:
    runtime = RayRuntime(cpus=1)
    runtime.start()
    try:
        return list(ray.nodes())
    finally:
        runtime.stop()


def test_what_a_cluster_cannot_hold_is_refused_and_what_others_hold_is_waited_for(cluster: Cluster) -> None:
    apart = ["placement.mode=disaggregate", "sampler.backend=sglang"]
    with pytest.raises(ConfigError, match=r"wants 5 GPUs, and Ray has 4 GPUs: lower learner\.ranks"):
        reserve([*apart, "learner.ranks=4"], "cuda")
    with pytest.raises(ConfigError, match=r"an engine wants 3 GPUs of one machine, and Ray has none with more than 2"):
        reserve([*apart, "sampler.sglang.tp_size=3"], "cuda")
    _, placement = reserve([*apart, "learner.ranks=3"], "cuda")
    try:
        with pytest.raises(
            LearnerError, match=r"1 GPU and 1 CPU after learner\.start_timeout_s=1 s; free now: 0 GPUs and 1 CPU"
        ):
            reserve(["placement.mode=colocate", "sampler.backend=sglang"], "cuda", seconds=1)
        started = time.monotonic()
        with pytest.raises(LearnerError):
            reserve(["placement.mode=colocate", "sampler.backend=sglang"], "cuda", seconds=600, is_cancelled=True)
        assert time.monotonic() - started < 60, "an interrupt ends the wait"
        actor_locations(placement)
    finally:
        placement.close()
    assert not ray.is_initialized()


def test_auto_takes_runners_by_the_cores_of_all_machines(cluster: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runners, "CORES", 2)
    monkeypatch.setattr(runners, "_cores", lambda: 1)
    many = ("rollout.concurrency=512", "rollout.batch_size=64", "rollout.n_samples_per_prompt=8")
    config, placement = reserve(["placement.mode=disaggregate", *many], "cpu")
    try:
        assert runners.runner_count(config) == 0
        assert placement.runner_cores == 4
        assert len(placement.runner_nodes()) == 2
        assert runners.with_runner_count(config, placement.runner_cores).rollout.runners == 2
    finally:
        placement.close()
    _, placement = reserve(["placement.mode=disaggregate"], "cpu")
    try:
        assert (placement.runner_cores, placement.runner_nodes()) == (0, []), (
            "one process is enough for so few episodes"
        )
    finally:
        placement.close()


@pytest.mark.long
def test_runners_are_on_all_machines_and_begin_again_when_an_actor_or_a_machine_is_lost(
    cluster: Cluster, tmp_path: Path
) -> None:
    """The machine that is lost has joined for this test."""
    machine = cluster.add_node(node_ip_address="127.0.0.4", num_cpus=1, object_store_memory=80 << 20)
    settings = ["rollout.runners=3", "rollout.concurrency=6"]
    _, placement = reserve(["placement.mode=disaggregate", *settings], "cpu")

    async def main() -> None:
        async with running_engine() as (engine, url):
            async with opened(make_config(tmp_path, url, "rollout.runners=0"), tmp_path / "one") as services:
                expected, _ = await take_steps(services, tmp_path / "one", 3)
            config = make_config(tmp_path, url, *settings)
            async with opened(config, tmp_path / "three", runners=RayRunners(placement)) as services:
                processes = [runner._child for runner in pool_of(services)._runners]
                hosts = [process._host for process in processes if isinstance(process, RemoteRunner)]
                nodes = [ray.get(host.__ray_call__.remote(actor_location)).node for host in hosts]
                assert len({*nodes}) == 3
                assert machine.node_id in nodes
                engine.held.clear()
                taking = asyncio.create_task(take_steps(services, tmp_path / "three", 3))
                await until(lambda: all(runner.running for runner in pool_of(services)._runners))
                lost = nodes.index(machine.node_id)
                cluster.remove_node(machine, allow_graceful=False)
                ray.kill(hosts[lost - 1])
                await until(lambda: pool_of(services).restarts == 2)
                engine.held.set()
                rollouts, done = await taking
                assert comparable(rollouts) == comparable(expected)
                assert sorted(done) == sorted(rollout.rollout_id for rollout in expected), "none lost, none twice"
                pids = pool_of(services).pids
            for pid in pids:
                wait_for_exit(pid)

    try:
        asyncio.run(main())
    finally:
        placement.close()


def engines_of(folder: Path) -> list[psutil.Process]:
    """Return the engines of a run by their logs; Ray's actors are their parents."""
    name = preloaded.process_name(preloaded.ENGINE)
    engines = []
    for process in psutil.process_iter(["name", "open_files"]):
        logs = [file.path for file in process.info["open_files"] or []]
        if process.info["name"] == name and any(log.startswith(f"{folder}/") for log in logs):
            engines.append(process)
    return engines


def hosts_of(engine: psutil.Process) -> set[str]:
    return {
        connection.laddr.ip for connection in engine.net_connections("tcp4") if connection.status == psutil.CONN_LISTEN
    }


@pytest.mark.long
def test_a_run_on_a_cluster_and_nothing_left_of_it_when_it_is_killed(cluster: Cluster, tmp_path: Path) -> None:
    settings = ["placement.mode=disaggregate", "sampler.engines=2", "learner.device=cpu", "learner.ranks=2", *SMALL]
    other_processes = [
        "train.steps=100",
        "train.eval_first=false",
        "run.dir=run",
        "sampler.health_interval_s=0.2",
        "weights.transport=distributed",
    ]
    run = Running("train", "--env", "search_r1", *settings, *other_processes, cwd=tmp_path)
    try:
        metrics = tmp_path / "run" / "metrics.jsonl"

        def rows() -> list[dict[str, Any]]:
            return [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []

        run.wait_for(lambda: len(rows()) >= 1)
        engines = engines_of(tmp_path)
        assert len(engines) == 2
        for engine in engines:
            assert len(hosts_of(engine) & set(MACHINES)) == 1
        engines[0].send_signal(signal.SIGKILL)
        run.wait_for(lambda: bool(rows()) and rows()[-1].get("rollout/engine_restarts") == 1)
        last = engines_of(tmp_path)
        run.wait_for(lambda: len(engines_of(tmp_path)) == 2)
        last = engines_of(tmp_path)
    finally:
        run.process.kill()
        run.process.wait()
    wait_until(lambda: all(gone(engine.pid) for engine in last), 30)
    _, placement = reserve(["placement.mode=disaggregate", "learner.ranks=3"], "cpu")
    placement.close()
