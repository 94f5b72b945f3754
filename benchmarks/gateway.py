"""``agentrl bench gateway``: CPU time of turns that agent programs request, over that of the runner's own turns.

Both sample a scripted engine over HTTP, in this order: the runner's own loop with a recorded environment, then sessions of the
gateway. What requests the turns of sessions is another process (`benchmarks.agent_clients`), whose CPU time does not count.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, asynccontextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from agentrl.config.agent import AgentConfig
from agentrl.config.load import validate
from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.core.sampler import Sampler
from agentrl.core.task import Task
from agentrl.core.types import Generation, Prompt, Rollout, SamplingParams
from agentrl.data.task_sources import NoTasks
from agentrl.episode.chat import Agent
from agentrl.gateway.agent_sessions import AgentSessions
from agentrl.gateway.server import Gateway
from agentrl.models.load import read_vocab_size
from agentrl.models.resolve import resolve_model
from agentrl.runtime.services import open_services
from benchmarks import agent_clients
from benchmarks.concurrency import start_scripted_engine
from benchmarks.efficiency import EfficiencyBench, bench_config, full_turns, make_jobs
from benchmarks.episode_runner import bench_rollout

PATHS = ("runner", *agent_clients.CLIENTS)
"""The runner's own loop, and the dialects of sessions."""
_TURN_S = 4e-3
"""Mean seconds of a turn for each concurrent episode: leaves the runner idle about half of the time."""


@dataclass(frozen=True, slots=True)
class GatewayTimes:
    """Measurements of one pass."""

    sessions: int
    """Concurrent episodes."""
    path: str
    """One of `PATHS`."""
    turns: int
    cpu_ms_per_turn: float
    """CPU time of the runner's process, all threads."""
    first_byte_ms: tuple[float, ...]
    """From the engine's reply to the first byte at the client, for each turn, sorted; empty without a client."""


def measure_gateway(
    config: Config,
    bench: EfficiencyBench,
    sessions: Sequence[int],
    paths: Sequence[str],
    progress: Callable[[str], None],
) -> Iterator[GatewayTimes]:
    """Run ``bench.repeats`` passes of each path at each number of sessions, each pass in a new process.

    A pass has ``bench.episodes`` episodes, or as many as there are concurrent sessions.

    Raises:
        EngineError: the scripted engine or the process of the clients does not start, or has ended.
    """
    source = resolve_model(config.model.path)
    for concurrency in sessions:
        load = replace(bench, concurrency=concurrency, episodes=max(concurrency, bench.episodes))
        with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder, ExitStack() as exits:
            log = Path(folder) / "engine.log"
            url = start_scripted_engine(exits, log, read_vocab_size(source), concurrency * _TURN_S)
            sampler = {"backend": "sglang", "url": url}
            settings = config.model_dump(mode="json", include={"run", "model", "render"}) | {"sampler": sampler}
            for repeat in range(bench.repeats):
                for path in paths:
                    progress(f"{concurrency} sessions, {path}, pass {repeat + 1} of {bench.repeats}")
                    spawn = multiprocessing.get_context("spawn")
                    with ProcessPoolExecutor(1, mp_context=spawn) as process:
                        yield process.submit(run_pass, settings, load, path).result()


def run_pass(settings: dict[str, Any], bench: EfficiencyBench, path: str) -> GatewayTimes:
    """Run the episodes of one pass."""
    return uvloop.run(_run_pass(validate(settings), bench, path))


async def _run_pass(config: Config, bench: EfficiencyBench, path: str) -> GatewayTimes:
    source = resolve_model(config.model.path)
    config = bench_config(config, bench)
    if path != "runner":
        rollout = config.rollout.model_copy(update={"generate": f"{play_session.__module__}:{play_session.__name__}"})
        config = config.model_copy(update={"rollout": rollout})
    first, *jobs = make_jobs(source, replace(bench, episodes=bench.episodes + 1), config.run.seed)
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        async with open_services(config, {"": NoTasks()}, source, Path(folder), config.run.seed) as services:
            sampler = TimedSampler(services.fleet.sampler)
            runner = full_turns(services, bench.new_tokens, sampler)
            if path == "runner":
                await runner.run_many([first])
                times, first_bytes_s = await bench_rollout(runner, jobs), dict[str, list[float]]()
            else:
                async with _run_clients(path, bench.turns, Path(folder) / "clients.log") as clients:
                    token = _clients.set(clients)
                    await runner.run_many([first])
                    times, first_bytes_s = await bench_rollout(runner, jobs), clients.first_bytes_s
                    _clients.reset(token)
    if times.sampled_tokens != bench.sampled_tokens:
        raise EngineError(f"{path}: {times.sampled_tokens} tokens were sampled, and {bench.sampled_tokens} requested")
    delays_ms = [
        1e3 * (received_s - sampled_s)
        for episode, episode_s in first_bytes_s.items()
        for received_s, sampled_s in zip(episode_s, sampler.sampled_s[episode], strict=True)
    ]
    return GatewayTimes(bench.concurrency, path, times.turns, times.cpu_ms_per_turn, tuple(sorted(delays_ms)))


class TimedSampler:
    """A sampler that records when turns are sampled."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.sampled_s: defaultdict[str, list[float]] = defaultdict(list)
        """By session, when each turn was sampled, by the clock of all processes."""

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample, and record the time."""
        generation = await self._sampler.generate(
            prompt, params, session_id=session_id, request_id=request_id, policy=policy
        )
        self.sampled_s[session_id].append(time.monotonic())
        return generation

    async def abort(self, request_id: str) -> None:
        """Abort at the sampler."""
        await self._sampler.abort(request_id)

    async def close_session(self, session_id: str) -> None:
        """Close at the sampler."""
        await self._sampler.close_session(session_id)


@dataclass(slots=True)
class _Clients:
    """The process whose clients play sessions."""

    gateway: Gateway
    process: asyncio.subprocess.Process
    log: Path
    """Its errors."""
    first_bytes_s: dict[str, list[float]] = field(default_factory=dict)
    """By episode, when the first byte of each reply was read, by the clock of all processes."""
    waiting: dict[str, asyncio.Future[list[float]]] = field(default_factory=dict)
    """Sessions in progress, by key."""
    reading: asyncio.Task[None] = field(init=False)
    """Runs `read`."""

    async def play(self, key: str, task: Task, episode: str) -> None:
        """Let a client play a session.

        Raises:
            EngineError: the process has ended.
        """
        assert self.process.stdin is not None, "it is a pipe"
        session = self.waiting[key] = asyncio.get_running_loop().create_future()
        order = {"key": key, "prompt": task.question, "observations": task.metadata["observations"]}
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        await asyncio.wait({session, self.reading}, return_when=asyncio.FIRST_COMPLETED)
        if not session.done():
            self.reading.result()
            raise EngineError(f"the process of the clients has ended: {self.log.read_text()[-1000:]}")
        self.first_bytes_s[episode] = self.waiting.pop(key).result()

    async def read(self) -> None:
        """Read what the process prints until it ends."""
        assert self.process.stdout is not None, "it is a pipe"
        while line := await self.process.stdout.readline():
            played = json.loads(line)
            self.waiting[played["key"]].set_result(played["first_bytes_s"])


_clients: ContextVar[_Clients] = ContextVar("_clients")
"""What `play_session` uses: the runner loads it by name."""


@asynccontextmanager
async def _run_clients(path: str, turns: int, log: Path) -> AsyncIterator[_Clients]:
    """Serve the gateway, and start the process whose clients play sessions."""
    gateway = Gateway()
    async with gateway.serving() as url:
        command = [sys.executable, "-m", agent_clients.__name__, "--url", url, "--client", path, "--turns", str(turns)]
        with log.open("wb") as errors:
            process = await asyncio.create_subprocess_exec(
                *command, stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, limit=2**24
            )
        clients = _Clients(gateway, process, log)
        clients.reading = asyncio.create_task(clients.read())
        try:
            yield clients
        finally:
            assert process.stdin is not None, "it is a pipe"
            process.stdin.close()
            await process.wait()
            await clients.reading


async def play_session(task: Task, agent: Agent) -> list[Rollout]:
    """Let a client play an episode; for ``rollout.generate``."""
    clients = _clients.get()
    sessions = AgentSessions.open(agent, AgentConfig())
    async with clients.gateway.open(sessions) as key:
        await clients.play(key, task, agent.episode_id)
    if sessions.failure.done():
        raise sessions.failure.result()
    return sessions.rollouts(agent)
