"""``agentrl bench rollout`` and ``masks``: the measurements of their tables."""

from __future__ import annotations

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from agentrl.config.schema import Config
from agentrl.core.sampler import Sampler
from agentrl.core.types import Generation, Prompt, Row, SamplingParams
from agentrl.data.buffer import get_tasks
from agentrl.data.jobs import Job, episode_seed
from agentrl.data.task_sources import TaskSources, make_order, open_tasks, read_splits
from agentrl.episode.runner import GroupRunner
from agentrl.models.load import load_tokenizer
from agentrl.models.resolve import resolve_model
from agentrl.render.registry import make_renderer
from agentrl.runtime.services import open_services
from benchmarks.episode_runner import RolloutTimes, bench_rollout, synthetic_rows
from benchmarks.masks import MaskTimes, bench_masks
from benchmarks.tokenization import LongEpisode, converse, long_episode, retokenise


class Replay:
    """A sampler that replays the recorded answers of another sampler at once, to measure the runner without an engine."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._recorded: dict[str, list[Generation]] = {}
        self._turns: dict[str, int] = {}
        self.recording = True

    async def generate(
        self, prompt: Prompt, params: SamplingParams, *, session_id: str, request_id: str, policy: str = "main"
    ) -> Generation:
        """Sample and record, or return the recorded answer of this turn of the session."""
        if self.recording:
            sampled = await self._sampler.generate(
                prompt, params, session_id=session_id, request_id=request_id, policy=policy
            )
            self._recorded.setdefault(session_id, []).append(sampled)
            return sampled
        turn = self._turns.get(session_id, 0)
        self._turns[session_id] = turn + 1
        return self._recorded[session_id][turn]

    async def abort(self, request_id: str) -> None:
        """Abort at the recorded sampler."""
        await self._sampler.abort(request_id)

    async def close_session(self, session_id: str) -> None:
        """Close at the recorded sampler, and restart the session's replay."""
        self._turns.pop(session_id, None)
        if self.recording:
            await self._sampler.close_session(session_id)


def grouped_jobs(config: Config, tasks: TaskSources, episodes: int) -> list[Job]:
    """Return ``episodes`` jobs in groups, as in a training step."""
    samples = config.rollout.n_samples_per_prompt
    with closing(make_order(config, read_splits(config, tasks))) as source:
        tasks_of_groups = get_tasks(source, -(-episodes // samples))
    return [Job(tasks_of_groups[i // samples], episode_seed(config.run.seed, i), f"bench/{i}") for i in range(episodes)]


async def measure_rollout(config: Config, episodes: int, report: Callable[[str, RolloutTimes], None]) -> None:
    """Run the same episodes with the real engine and tools, then with the engine's answers replayed in the process.

    The difference in this process's CPU time per turn is the cost of the HTTP client. ``report`` receives each measurement, as
    soon as it is there, with its name: ``engine`` or ``replayed``.
    """
    tasks = open_tasks(config)
    model = resolve_model(config.model.path)
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as folder:
        async with open_services(config, tasks, model, Path(folder), config.run.seed) as services:
            replay = Replay(services.fleet.sampler)
            runner: GroupRunner = services.runner(sampler=replay)
            jobs = grouped_jobs(config, tasks, episodes)
            await bench_rollout(services.runner(), jobs[: min(64, len(jobs))])
            await services.fleet.flush()
            report("engine", await bench_rollout(runner, jobs))
            replay.recording = False
            await bench_rollout(runner, jobs)
            report("replayed", await bench_rollout(runner, jobs))


MASK_CASES = {
    "256 episodes x 4 turns x 100 tokens": (256, 4, 100),
    "16 episodes x 128 turns x 250 tokens": (16, 128, 250),
}


def measure_masks(config: Config) -> Iterator[tuple[str, MaskTimes]]:
    """Build, pack and check synthetic episodes of two shapes, after a short one that starts torch's threads."""
    bench_masks(lambda: synthetic_rows(1, 1, 1), tokens_per_micro=config.batch.micro_tokens)
    for name, (episodes, turns, tokens) in MASK_CASES.items():

        def build(episodes: int = episodes, turns: int = turns, tokens: int = tokens) -> list[Row]:
            return synthetic_rows(episodes, turns, tokens)

        yield (name, bench_masks(build, tokens_per_micro=config.batch.micro_tokens))


LONG_TURNS = (32, 64, 128)
"""Turns of the long episodes: 16k, 32k and 64k tokens."""
TURN_TOKENS = 512
"""Tokens per turn of the long episodes, half of them sampled."""
REPEATS = 5


@dataclass(frozen=True, slots=True)
class LongEpisodeTimes:
    """Cost of exact tokens in one long episode, and of retokenizing it every turn. CPU time of one thread."""

    turns: int
    tokens: int
    """Tokens of the finished conversation."""
    seconds: float
    """Rendering, bridges, parsing, trajectory, rows, packing and the check, including tokenizing observations; the
    median of five conversations."""
    retokenise_s: float
    """Tokenizing the whole conversation with the chat template before every turn, and nothing else."""

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of the conversation."""
        return self.tokens / self.seconds

    @property
    def ratio(self) -> float:
        """Ratio of the two costs."""
        return self.retokenise_s / self.seconds


def measure_long(config: Config) -> Iterator[LongEpisodeTimes]:
    """Measure conversations of increasing length with the tokenizer of ``model.path``, both ways.

    Raises:
        ModelError: the tokenizer has no chat template.
    """
    tokenizer = load_tokenizer(resolve_model(config.model.path), trust_remote_code=config.model.trust_remote_code)

    def seconds(episode: LongEpisode) -> tuple[float, int]:
        renderer = make_renderer(tokenizer, config.render)  # a new one has an empty cache
        sizes = {"tokens_per_micro": config.batch.micro_tokens}
        start = time.thread_time()
        times = bench_masks(lambda: asyncio.run(converse(renderer, episode)), **sizes)
        return time.thread_time() - start, times.tokens

    def episode(turns: int) -> LongEpisode:
        end = make_renderer(tokenizer, config.render).end_token_id
        return long_episode(tokenizer, end, turns, TURN_TOKENS, seed=turns)

    def texts(episode: LongEpisode) -> list[str]:
        return [str(tokenizer.decode(list(sample.token_ids[:-1]))) for sample in episode.samples]

    seconds(episode(4)), retokenise(tokenizer, episode(4), texts(episode(4)))
    for turns in LONG_TURNS:
        long = episode(turns)
        runs = [seconds(long) for _ in range(REPEATS)]
        spent = median(run for run, _ in runs)
        yield LongEpisodeTimes(turns, runs[0][1], spent, retokenise(tokenizer, long, texts(long)))
