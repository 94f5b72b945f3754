"""``agentrl bench efficiency --scripted``: cost of the runner by the number of concurrent episodes, without a model."""

from __future__ import annotations

import asyncio
import multiprocessing
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from agentrl.config.load import validate
from agentrl.config.schema import Config
from agentrl.core.child_process import LOOPBACK, ChildProcess, reserve_port
from agentrl.core.errors import EngineError
from agentrl.data.task_sources import NoTasks
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.runtime.services import open_services
from benchmarks import scripted_engine
from benchmarks.efficiency import EfficiencyBench, bench_config, full_turns, make_jobs
from benchmarks.episode_runner import bench_rollout

_EPISODES = 1000
"""Least episodes of a pass."""
_TURN_S = 3e-3
"""Mean seconds of a turn for each concurrent episode: leaves the runner idle about half of the time."""
_START_S = 60.0
_PROBE_S = 0.01


@dataclass(frozen=True, slots=True)
class LoadTimes:
    """Measurements of one pass."""

    concurrency: int
    """Concurrent episodes."""
    over_http: bool
    """Whether the scripted engine is another process."""
    turns: int
    """Turns of all episodes."""
    cpu_ms_per_turn: float
    """CPU time of the process, all threads."""
    loop_ms_per_turn: float
    """The part of the event loop's thread."""
    kib_per_episode: float
    """Growth of the resident memory over the pass, whose rollouts are all kept."""
    stall_ms: float
    """Longest time in which the event loop did not run a callback that was due."""
    threads: int
    """Most threads of the process."""


def measure_concurrency(
    config: Config, bench: EfficiencyBench, concurrencies: Sequence[int], progress: Callable[[str], None]
) -> Iterator[LoadTimes]:
    """Run episodes against a scripted engine in the process, then over HTTP, for each number of concurrent episodes.

    Each pass runs in a new process.

    Raises:
        EngineError: the scripted engine does not start.
    """
    source = resolve_model(config.model.path)
    for concurrency in concurrencies:
        load = replace(bench, concurrency=concurrency, episodes=max(concurrency, _EPISODES), runners=0)
        delay_s = concurrency * _TURN_S
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder, ExitStack() as exits:
            url = start_scripted_engine(exits, Path(folder) / "engine.log", read_vocab_size(source), delay_s)
            sampler = {"backend": "sglang", "url": url}
            settings = config.model_dump(mode="json", include={"run", "model", "render"}) | {"sampler": sampler}
            for over_http in (False, True):
                progress(f"{concurrency} episodes, {'HTTP' if over_http else 'sampler in the process'}")
                spawn = multiprocessing.get_context("spawn")
                with ProcessPoolExecutor(1, mp_context=spawn) as process:
                    yield process.submit(run_load, settings, load, delay_s, over_http=over_http).result()


def start_scripted_engine(exits: ExitStack, log: Path, vocabulary: int, delay_s: float) -> str:
    """Start a scripted engine, which ``exits`` ends, and return its address.

    Raises:
        EngineError: it does not start.
    """
    port = exits.enter_context(reserve_port())
    options = {"--port": port, "--vocabulary": vocabulary, "--delay-s": delay_s}
    words = [str(word) for pair in options.items() for word in pair]
    command = [sys.executable, str(Path(scripted_engine.__file__)), *words]
    name, url = "the scripted engine", f"http://{LOOPBACK}:{port}"
    engine = exits.enter_context(ChildProcess.start(command, log=log, name=name, error=EngineError))
    engine.wait_healthy(f"{url}/health", _START_S)
    return url


def run_load(settings: dict[str, Any], bench: EfficiencyBench, delay_s: float, *, over_http: bool) -> LoadTimes:
    """Run the episodes of one pass."""
    return asyncio.run(_run_load(validate(settings), bench, delay_s, over_http=over_http))


async def _run_load(config: Config, bench: EfficiencyBench, delay_s: float, *, over_http: bool) -> LoadTimes:
    source = resolve_model(config.model.path)
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        async with open_services(
            bench_config(config, bench), {"": NoTasks()}, source, Path(folder), config.run.seed
        ) as services:
            sampler = None if over_http else scripted_engine.ScriptedSampler(read_vocab_size(source), delay_s)
            runner = full_turns(services, bench.new_tokens, sampler)
            first, *jobs = make_jobs(source, replace(bench, episodes=bench.episodes + 1), config.run.seed)
            await runner.run_many([first])
            probe = LoopProbe()
            probing = asyncio.create_task(probe.run())
            times = await bench_rollout(runner, jobs)
            probing.cancel()
    return LoadTimes(
        concurrency=bench.concurrency,
        over_http=over_http,
        turns=times.turns,
        cpu_ms_per_turn=times.cpu_ms_per_turn,
        loop_ms_per_turn=times.loop_ms_per_turn,
        kib_per_episode=(probe.most_bytes - probe.first_bytes) / 1024 / bench.episodes,
        stall_ms=1e3 * probe.stall_s,
        threads=probe.threads,
    )


class LoopProbe:
    """Measures the longest stall of the event loop, and the memory and threads of the process."""

    def __init__(self) -> None:
        self._process = psutil.Process()
        self.first_bytes = self.most_bytes = self._process.memory_info().rss
        self.stall_s = 0.0
        self.threads = 0

    async def run(self) -> None:
        """Measure until this is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            due = loop.time() + _PROBE_S
            await asyncio.sleep(_PROBE_S)
            self.stall_s = max(self.stall_s, loop.time() - due)
            self.threads = max(self.threads, threading.active_count())
            self.most_bytes = max(self.most_bytes, self._process.memory_info().rss)
