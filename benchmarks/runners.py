"""``agentrl bench runners``: turns a second by the number of runner processes, with scripted engines over HTTP."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from agentrl.config.load import validate
from agentrl.config.runners import rollout_form
from agentrl.config.schema import Config
from agentrl.data.task_sources import NoTasks
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.runtime.services import open_services
from benchmarks.concurrency import LoopProbe, start_scripted_engine
from benchmarks.efficiency import EfficiencyBench, bench_config, full_turns, make_jobs, runners_cpu_s
from benchmarks.episode_runner import SAMPLES, bench_loop

_DELAY_S = 0.1
"""Mean seconds of a turn at an engine: shorter than what the episodes of a runner wait for its CPU."""


@dataclass(frozen=True, slots=True)
class RunnerTimes:
    """Measurements of one pass."""

    runners: int
    """Processes; 0: all in the driver."""
    turns: int
    seconds: float
    driver_ms: float
    """CPU time of the driver a turn: groups, journal and files of rollouts."""
    runner_ms: float
    """CPU time of all runner processes a turn."""
    stall_ms: float
    """Longest time in which the driver's event loop did not run a callback that was due."""
    driver_bytes: int
    """Most memory of the driver, which has all rollouts of the pass at its end."""
    runners_bytes: int
    """Most memory of each runner process, added up."""
    journal_bytes: int
    rollout_bytes: int
    """Of the files of rollouts."""
    episodes: int


def measure_runners(
    config: Config, bench: EfficiencyBench, counts: Sequence[int], progress: Callable[[str], None]
) -> Iterator[RunnerTimes]:
    """Run ``bench.episodes`` episodes for each runner, ``bench.concurrency`` at a time, for each number of runners.

    Each runner has an engine. Each pass runs in a new process.

    Raises:
        EngineError: a scripted engine does not start.
    """
    source = resolve_model(config.model.path)
    for count in counts:
        progress(f"{count} runners")
        processes = max(1, count)
        load = replace(
            bench, runners=count, episodes=processes * bench.episodes, concurrency=processes * bench.concurrency
        )
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder, ExitStack() as exits:
            urls = [
                start_scripted_engine(exits, Path(folder) / f"engine-{number}.log", read_vocab_size(source), _DELAY_S)
                for number in range(processes)
            ]
            sampler = {"backend": "sglang", "url": ",".join(urls)}
            settings = config.model_dump(mode="json", include={"run", "model", "render"}) | {"sampler": sampler}
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                yield process.submit(_run_pass, settings, load).result()


def _run_pass(settings: dict[str, Any], bench: EfficiencyBench) -> RunnerTimes:
    return asyncio.run(_run_episodes(validate(settings), bench))


async def _run_episodes(config: Config, bench: EfficiencyBench) -> RunnerTimes:
    source = resolve_model(config.model.path)
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder = Path(name)
        async with open_services(
            bench_config(config, bench), {"": NoTasks()}, source, folder, config.run.seed
        ) as services:
            runner = full_turns(services, bench.new_tokens)
            jobs = make_jobs(source, bench, config.run.seed)
            pids = [] if services.pool is None else services.pool.pids
            warm = make_jobs(source, replace(bench, episodes=SAMPLES * max(1, len(pids))), 1)
            await bench_loop(runner, warm, bench.concurrency, 0, folder / "warm", rollout_form(services.config))
            probe = LoopProbe()
            probing = asyncio.create_task(probe.run())
            wall, cpu, runner_s = time.perf_counter(), time.process_time(), runners_cpu_s(services)
            times = await bench_loop(runner, jobs, bench.concurrency, 0, folder / "run", rollout_form(services.config))
            wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            runner_s = runners_cpu_s(services) - runner_s
            memory = [_peak_bytes(pid) for pid in (os.getpid(), *pids)]
            probing.cancel()
        return RunnerTimes(
            runners=len(pids),
            turns=times.turns,
            seconds=wall,
            driver_ms=1e3 * cpu / times.turns,
            runner_ms=1e3 * runner_s / times.turns,
            stall_ms=1e3 * probe.stall_s,
            driver_bytes=memory[0],
            runners_bytes=sum(memory[1:]),
            journal_bytes=_size(folder / "run" / "journal"),
            rollout_bytes=_size(folder / "run" / "rollouts"),
            episodes=times.episodes,
        )


def _peak_bytes(pid: int) -> int:
    """Return the most memory that a process has had resident."""
    [line] = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM:")]
    return int(line.split()[1]) << 10


def _size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
