"""``agentrl bench efficiency``: the loops of training against a bare client that sends the same requests to the same engines."""

from __future__ import annotations

import asyncio
import random
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Literal

import aiohttp
import orjson
import psutil

from agentrl.config.load import validate
from agentrl.config.runners import rollout_form
from agentrl.config.schema import Config
from agentrl.core.env import Env, Step
from agentrl.core.errors import EngineError
from agentrl.core.sampler import Sampler
from agentrl.core.task import Task
from agentrl.core.types import Action, Generation, Message, Prompt, SamplingParams
from agentrl.data.jobs import Job
from agentrl.data.task_sources import NoTasks
from agentrl.episode.runner import GroupRunner, SamplingChange
from agentrl.inference.client.generation import generate_body
from agentrl.models.load import load_tokenizer
from agentrl.models.random_models import find_model_shape, write_random_model
from agentrl.models.resolve import resolve_model
from agentrl.runtime.services import Services, open_services
from benchmarks.episode_runner import SAMPLES, bench_loop

_WARM_TOKENS = 4
"""Sampled tokens per turn while connections are opened and observations are recorded."""
_MARKUP = 32
"""Upper bound of the tokens that a chat format adds to a message."""

Who = Literal["synchronous", "bare client", "asynchronous"]
"""A loop of training, the second with a staleness of 1, or the client that they are compared with."""
_ORDER: tuple[Who, ...] = ("synchronous", "bare client", "asynchronous")


@dataclass(frozen=True, slots=True)
class EfficiencyBench:
    """Options of the benchmark; see the command."""

    size: str
    episodes: int
    concurrency: int
    turns: int
    new_tokens: int
    prompt_tokens: int
    observation_tokens: int
    repeats: int
    runners: int | Literal["auto"] = 0
    """``rollout.runners``."""

    @property
    def sampled_tokens(self) -> int:
        """Sampled tokens of one pass."""
        return self.episodes * self.turns * self.new_tokens

    @property
    def context(self) -> int:
        """Maximum tokens of an episode."""
        turn = self.new_tokens + self.observation_tokens + _MARKUP
        # The token counts of the texts are approximate.
        return 2 * self.prompt_tokens + _MARKUP + self.turns * (turn + self.observation_tokens)


@dataclass(frozen=True, slots=True)
class Pass:
    """Measurements of one pass over all episodes."""

    who: Who
    seconds: float
    tokens: int
    """Sampled tokens."""
    cpu_ms_per_turn: float
    """CPU time of this process per turn, all threads."""
    runner_ms_per_turn: float = 0.0
    """CPU time of all runner processes per turn."""

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens per second."""
        return self.tokens / self.seconds


def efficiency(passes: Sequence[Pass], loop: Who) -> float:
    """Return the ratio of a loop's tokens per second to the bare client's, each the median of its passes."""
    ours, bare = (
        median(measured.tokens_per_s for measured in passes if measured.who == who) for who in (loop, "bare client")
    )
    return ours / bare


class RecordedEnv(Env):
    """Returns the task's recorded observations in order, and ends after a fixed number of turns."""

    blocking: ClassVar[bool] = False

    def __init__(self, turns: int) -> None:
        self._turns = turns
        self._turn = 0

    def step(self, action: Action) -> Step:
        """Return the recorded observation of this turn."""
        self._turn += 1
        if self._turn == self._turns:
            return (), 1.0, True, False, {}
        return (Message("user", self.task.metadata["observations"][self._turn - 1]),), 0.0, False, False, {}


@dataclass(slots=True)
class Script:
    """The requests of one episode for the bare client."""

    prompt: tuple[int, ...]
    """Prompt of the first turn."""
    added: list[tuple[int, ...]] = field(default_factory=list)
    """Tokens appended to the sampled ones of each turn but the last."""
    params: list[SamplingParams] = field(default_factory=list)
    """Sampling parameters of each turn."""
    token_count: int = 0
    """Number of tokens up to the end of the last recorded turn."""


class Recorder:
    """A sampler that records the requests of episodes."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self.scripts: dict[str, Script] = {}

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample, and record the request."""
        script = self.scripts.get(session_id)
        if script is None:
            script = self.scripts[session_id] = Script(prompt.token_ids)
        else:
            script.added.append(prompt.token_ids[script.token_count :])
        script.params.append(params)
        sampled = await self._sampler.generate(
            prompt, params, session_id=session_id, request_id=request_id, policy=policy
        )
        script.token_count = len(prompt.token_ids) + len(sampled.token_ids)
        return sampled

    async def abort(self, request_id: str) -> None:
        """Abort at the recorded sampler."""
        await self._sampler.abort(request_id)

    async def close_session(self, session_id: str) -> None:
        """Close at the recorded sampler."""
        await self._sampler.close_session(session_id)


class BareClient:
    """Sends the requests of scripts to engines, and reads only the ids of the replies.

    Every episode continues from its own samples, so that the prefix cache has the same hits as with the runner.
    """

    def __init__(self, urls: Sequence[str], concurrency: int, timeout_s: float) -> None:
        """Run ``concurrency`` episodes at the same time, in the running event loop."""
        self._urls = [url.rstrip("/") + "/generate" for url in urls]
        self._slots = asyncio.Semaphore(concurrency)
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers={"content-type": "application/json"},
            timeout=aiohttp.ClientTimeout(total=timeout_s),
        )

    async def aclose(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def run(self, scripts: Sequence[Script]) -> int:
        """Run all scripts and return the number of sampled tokens."""
        return sum(await asyncio.gather(*(self._play(number, script) for number, script in enumerate(scripts))))

    async def _play(self, number: int, script: Script) -> int:
        url, ids, sampled = self._urls[number % len(self._urls)], list(script.prompt), 0
        async with self._slots:
            for turn, params in enumerate(script.params):
                body = generate_body(ids, params, params.max_new_tokens, f"bare-{number}-{turn}:0")
                async with self._session.post(url, data=orjson.dumps(body)) as reply:
                    content = await reply.read()
                if reply.status != 200:
                    raise EngineError(f"the engine at {url} answers HTTP {reply.status}: {content[:200]!r}")
                new = orjson.loads(content)["output_ids"]
                sampled += len(new)
                if turn < len(script.added):
                    ids += [*new, *script.added[turn]]
        return sampled


async def measure_efficiency(
    config: Config, bench: EfficiencyBench, progress: Callable[[str], None]
) -> AsyncIterator[Pass]:
    """Start engines with a random model and run the episodes with each loop and the bare client in turn, in alternating order
    and with a flushed cache.

    Raises:
        EngineError: an engine sampled another number of tokens than requested.
    """
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name:
        folder, source = Path(name), resolve_model(config.model.path)
        config = bench_config(config, bench)
        random_weights = config.sampler.sglang.get("load_format") == "dummy" and config.sampler.backend == "sglang"
        write_random_model(folder / "model", find_model_shape(bench.size), tokenizer=source, weights=not random_weights)
        progress("starting the engine")
        async with open_services(config, {"": NoTasks()}, folder / "model", folder, config.run.seed) as services:
            urls = [client.url for client in services.fleet.live]
            bare = BareClient(urls, bench.concurrency, config.sampler.request_timeout_s)
            try:
                jobs = make_jobs(source, bench, config.run.seed)
                async for measured in _passes(services, bare, jobs, bench, folder, progress):
                    yield measured
            finally:
                await bare.aclose()


async def _passes(
    services: Services,
    bare: BareClient,
    jobs: Sequence[Job],
    bench: EfficiencyBench,
    folder: Path,
    progress: Callable[[str], None],
) -> AsyncIterator[Pass]:
    progress("warming up")
    scripts = await _record(services, jobs)
    await bare.run(scripts)
    scripts = [
        replace(script, params=[replace(measured, max_new_tokens=bench.new_tokens) for measured in script.params])
        for script in scripts
    ]
    runner, form = full_turns(services, bench.new_tokens), rollout_form(services.config)
    if services.pool is not None:
        await bench_loop(full_turns(services, _WARM_TOKENS), jobs, bench.concurrency, 0, folder / "warm", form)
    order = [who for repeat in range(bench.repeats) for who in (_ORDER, _ORDER[::-1])[repeat % 2]]
    for number, who in enumerate(order, 1):
        progress(f"pass {number} of {len(order)}")
        await services.fleet.flush()
        if who == "bare client":
            measured = await _by_bare_client(bare, scripts)
        else:
            staleness = int(who == "asynchronous")
            runners_s = runners_cpu_s(services)
            times = await bench_loop(runner, jobs, bench.concurrency, staleness, folder / f"pass-{number}", form)
            runner_ms = 1e3 * (runners_cpu_s(services) - runners_s) / times.turns
            measured = Pass(who, times.seconds, times.sampled_tokens, times.cpu_ms_per_turn, runner_ms)
        if measured.tokens != bench.sampled_tokens:
            raise EngineError(
                f"the {measured.who} pass received {measured.tokens} tokens from the engine, and requested {bench.sampled_tokens}"
            )
        yield measured


async def _record(services: Services, jobs: Sequence[Job]) -> list[Script]:
    recorder = Recorder(services.fleet.sampler)
    await full_turns(services, _WARM_TOKENS, recorder).run_many(jobs)
    return list(recorder.scripts.values())


def full_turns(services: Services, new_tokens: int, sampler: Sampler | None = None) -> GroupRunner:
    """Return a runner in which every turn has ``new_tokens`` tokens."""
    options = services.config.sampler
    change = SamplingChange(options.temperature, options.top_p, options.top_k, new_tokens, ignore_eos=True)
    return services.runner(sampler=sampler).with_sampling(change)


def runners_cpu_s(services: Services) -> float:
    """Return the CPU time of all runner processes so far, in seconds."""
    pids = () if services.pool is None else services.pool.pids
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


async def _by_bare_client(bare: BareClient, scripts: Sequence[Script]) -> Pass:
    wall, cpu = time.perf_counter(), time.process_time()
    tokens = await bare.run(scripts)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Pass("bare client", wall, tokens, 1e3 * cpu / sum(len(script.params) for script in scripts))


def bench_config(config: Config, bench: EfficiencyBench) -> Config:
    """Return a configuration with the engines of ``config`` and the episodes of ``bench``."""
    settings = config.model_dump(mode="json", include={"run", "model", "render", "sampler"})
    sampler: dict[str, Any] = settings["sampler"]
    sampler["max_new_tokens"] = bench.new_tokens
    if config.sampler.backend == "sglang":
        # Random weights need no file, and no text is needed.
        no_files = {"load_format": "dummy", "skip_tokenizer_init": True}
        sampler["sglang"] = no_files | sampler["sglang"]
    else:
        sampler["embedded"] |= {"slots": bench.concurrency, "context": bench.context}
    rollout = {
        "max_turns": bench.turns,
        "max_tokens": bench.context,
        "max_seconds": 3600.0,
        "concurrency": bench.concurrency,
        "batch_size": max(1, bench.concurrency // SAMPLES),
        "n_samples_per_prompt": SAMPLES,
        "runners": bench.runners,
        "failure": dict.fromkeys(("sampler", "environment", "task"), "stop"),
    }
    env = {"name": f"{RecordedEnv.__module__}:{RecordedEnv.__qualname__}", "options": {"turns": bench.turns}}
    return validate({**settings, "env": env, "rollout": rollout})


def make_jobs(source: Path, bench: EfficiencyBench, seed: int) -> list[Job]:
    """Return the episodes: prompts and observations of distinct words, with about the configured lengths."""
    tokenizer: Any = load_tokenizer(source)
    rng = random.Random(seed)

    def text(words: int) -> str:
        return " ".join(f"{rng.randrange(10**6):x}" for _ in range(words))

    sample = text(1000)
    words_a_token = 1000 / len(tokenizer.encode(sample, add_special_tokens=False))
    jobs = []
    for number in range(bench.episodes):
        prompt = Message("user", text(max(1, round(bench.prompt_tokens * words_a_token))))
        size = max(1, round(bench.observation_tokens * words_a_token))
        task = Task(f"bench/{number}", (prompt,), metadata={"observations": [text(size) for _ in range(bench.turns)]})
        jobs.append(Job(task, number, f"bench/{number}"))
    return jobs
