"""``agentrl bench async``: asynchronous against synchronous training in virtual time, each with its best split of the GPUs.

Episodes, admission and staleness are those of a run. Engines and learner only take time.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from agentrl.config.rollout import FailureConfig, RolloutConfig
from agentrl.core.env import AsyncEnv, Step
from agentrl.core.task import Task
from agentrl.core.types import Action, Message, Rollout, SamplingParams
from agentrl.data.jobs import Job
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots
from agentrl.render.registry import make_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.testing.virtual_time import run_virtual
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.scheduler import GroupScheduler, SynchronousScheduler
from agentrl.train.pipeline.staleness_bound import Admission
from benchmarks.scripted_engines import EngineRates, ScriptedEngines
from benchmarks.workload import EpisodePlan, Group, Tail, drawn_groups

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True)
class AsyncBench:
    """What is simulated. The learner's and the engines' figures are those of one GPU with a model of 0.6B parameters."""

    groups: Sequence[Group]
    """Recorded groups, from which those of the run are drawn."""
    gpus: int = 8
    steps: int = 16
    """Training steps of a measured run; splits are chosen with half of them."""
    prompts: int = 32
    """Groups of a step."""
    samples: int = 8
    """Episodes of a group."""
    token_scale: float = 16.0
    """Tokens of engines and learner for each recorded one: the recorded policy's vocabulary and documents are small."""
    tail: Tail = field(default_factory=Tail)
    engine: EngineRates = field(default_factory=EngineRates)
    learner_tokens_per_s: float = 83_356.0
    """Of one GPU, optimizer step included."""
    shared_cost: float = 1.08
    """Time of a token that is computed in a tree of rows with a common prompt, relative to one in a row."""
    tokens_per_micro: int = 16_384
    """Computed tokens of a micro-batch, in which the rows of a group share their prompt."""
    sync_s: float = 0.04
    """A weight sync, in which nothing is sampled."""
    switch_s: float = 0.25
    """Colocated: from sampling to training and back, in a step."""

    def computed_tokens(self, plans: Sequence[EpisodePlan]) -> float:
        """Return the tokens that the learner computes of a group, in the time of tokens of single rows."""
        prompt = self.token_scale * plans[0].prompt
        all_tokens = self.token_scale * sum(plan.tokens for plan in plans)
        added = all_tokens - len(plans) * prompt
        micro_batches = min(len(plans), math.ceil(added / max(1.0, self.tokens_per_micro - prompt)))
        return min(all_tokens, self.shared_cost * (added + micro_batches * prompt))


@dataclass(frozen=True, slots=True)
class Split:
    """GPUs of the engines and of the learner."""

    engines: int
    learner: int
    colocated: bool = False
    """They are the same GPUs, and take turns."""

    def __str__(self) -> str:
        """Return the split as in the table."""
        return f"{self.engines} shared" if self.colocated else f"{self.engines} + {self.learner}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Measurements of a simulated run."""

    seconds: float
    """From its start to the last weight sync."""
    ages_N: NDArray[np.int64]
    """Age of each trained token, in policy versions."""
    lengths_N: NDArray[np.int64]
    """Sampled tokens of each token's episode."""
    admitted: int
    """Episodes that began."""
    trained: int
    """Episodes that were trained."""
    engines_idle: float
    """Share of the time in which an engine had no request, averaged over engines."""
    learner_idle: float
    """Share of the time in which the learner did not compute."""
    prefilled: float
    """Tokens of contexts that engines computed; those in their prefix caches do not count."""

    @property
    def ages_by_length(self) -> list[float]:
        """Mean age of the tokens of each quarter of the trained tokens, from the shortest episodes to the longest."""
        order_N = np.argsort(self.lengths_N, kind="stable")
        return [float(quarter.mean()) for quarter in np.array_split(self.ages_N[order_N], 4)]


class _PlannedEnv(AsyncEnv):
    """Takes the planned number of turns, with the planned seconds between them."""

    def __init__(self) -> None:
        self._turn = 0

    async def astep(self, action: Action) -> Step:
        plan: EpisodePlan = self.task.metadata["plan"]
        self._turn += 1
        if self._turn == len(plan.turns):
            return (), 1.0, True, False, {}
        await asyncio.sleep(plan.tools_s / (len(plan.turns) - 1))
        return (Message("user", "."),), 0.0, False, False, {}


def byte_renderer() -> ChatRenderer:
    """Return a renderer of a vocabulary of bytes."""
    vocabulary = {letter: index for index, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    base = Tokenizer(models.BPE(vocabulary, []))
    base.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    base.decoder = decoders.ByteLevel()
    kind: Any = PreTrainedTokenizerFast
    tokenizer = kind(tokenizer_object=base, eos_token="<|im_end|>", pad_token="<|pad|>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]}, replace_extra_special_tokens=False)
    tokenizer.chat_template = _TEMPLATE
    return make_renderer(tokenizer)


class Simulation:
    """A run of training steps, for one split and one staleness.

    Args:
        bench: the workload.
        renderer: see `byte_renderer`.
        split: of the GPUs.
        max_staleness: ``async.max_staleness``.
        seed: of the drawn episodes.
    """

    def __init__(
        self,
        bench: AsyncBench,
        renderer: ChatRenderer,
        split: Split,
        max_staleness: int,
        seed: int,
        *,
        streams: bool = False,
    ) -> None:
        self.bench, self.split, self.max_staleness, self.streams = bench, split, max_staleness, streams
        self._groups: list[Group] = list(
            itertools.islice(drawn_groups(bench.groups, bench.samples, bench.tail, seed), bench.steps * bench.prompts)
        )
        self._plans: dict[str, EpisodePlan] = {}
        token_id = renderer.encode("x")[0]
        self._engines = ScriptedEngines(
            self._plans, split.engines, bench.engine, bench.token_scale, token_id, renderer.end_token_id
        )
        self._runner = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=_PlannedEnv,
                        renderer=renderer,
                        sampler=self._engines.sampler,
                        tool_clients={},
                        limits=Limits(max_turns=10**6, max_tokens=10**9, max_seconds=1e9, max_new_tokens=10**9),
                        sampling=SamplingParams(max_new_tokens=10**9),
                    )
                )
            },
            FailurePolicy(FailureConfig()),
            EpisodeSlots(self._concurrency),
        )
        self._learner_s = 0.0
        self._pending: dict[str, float] = {}
        """Computed tokens of groups of the step that are too few for a micro-batch, by task."""
        self._early: set[str] = set()
        """Tasks of the step whose groups were computed before its batch was full."""
        self._ages: list[NDArray[np.int64]] = []
        self._lengths: list[NDArray[np.int64]] = []
        self._trained = 0

    @property
    def _concurrency(self) -> int:
        return (self.max_staleness + 1) * self.bench.prompts * self.bench.samples

    def run(self) -> Outcome:
        """Return what the run took."""
        with TemporaryDirectory(prefix="agentrl-bench-") as folder:
            return run_virtual(self._run(Journal(Path(folder)).begin()))

    async def _run(self, journal: Journal) -> Outcome:
        bench, loop = self.bench, asyncio.get_running_loop()
        admission = Admission(
            itertools.count(), step=0, steps=bench.steps, batch_size=bench.prompts, max_staleness=self.max_staleness
        )
        kind = GroupScheduler if self.max_staleness else SynchronousScheduler
        rollout = RolloutConfig(concurrency=self._concurrency)
        scheduler = kind(admission, self._runner, self._jobs, nullcontext, journal, rollout)
        for step in range(bench.steps):
            taken = await scheduler.take(self._train_early if self.streams else None)
            assert taken is not None, "the admission has groups for all steps"
            await self._train(taken.rollouts, step)
            self._engines.pause()
            await asyncio.sleep(bench.sync_s)
            self._engines.resume(step + 1)
            scheduler.set_version(step + 1)
        seconds = loop.time()
        await scheduler.aclose()
        return Outcome(
            seconds,
            np.concatenate(self._ages),
            np.concatenate(self._lengths),
            admitted=len(self._plans),
            trained=self._trained,
            engines_idle=1 - self._engines.busy_s() / seconds,
            learner_idle=1 - self._learner_s / seconds,
            prefilled=self._engines.prefilled_tokens(),
        )

    def _jobs(self, position: int) -> list[Job]:
        jobs = []
        for sample, plan in enumerate(self._groups[position]):
            self._plans[f"{position}/{sample}"] = plan
            task = Task(str(position), (Message("user", str(position)),), metadata={"plan": plan})
            jobs.append(Job(task, sample, f"{position}/{sample}"))
        return jobs

    def _computed_tokens(self, rollouts: Sequence[Rollout]) -> dict[str, float]:
        """Return the tokens that the learner computes of each group; see `AsyncBench.computed_tokens`."""
        by_task: dict[str, list[EpisodePlan]] = {}
        for rollout in rollouts:
            by_task.setdefault(rollout.prompt_id, []).append(self._plans[rollout.rollout_id])
        return {task: self.bench.computed_tokens(plans) for task, plans in by_task.items()}

    async def _compute(self, tokens: float) -> None:
        seconds = tokens / (self.bench.learner_tokens_per_s * self.split.learner)
        self._learner_s += seconds
        await asyncio.sleep(seconds)

    async def _train_early(self, rollouts: Sequence[Rollout]) -> None:
        """Take the time of the groups that fill a micro-batch of each GPU, and keep the others."""
        self._pending |= self._computed_tokens(rollouts)
        if sum(self._pending.values()) >= self.bench.tokens_per_micro * self.split.learner:
            self._early |= self._pending.keys()
            tokens, self._pending = sum(self._pending.values()), {}
            await self._compute(tokens)

    async def _train(self, rollouts: Sequence[Rollout], version: int) -> None:
        """Take the time of a training step, without the groups that were computed early."""
        computed = self._computed_tokens(rollouts)
        await self._compute(sum(tokens for task, tokens in computed.items() if task not in self._early))
        self._early, self._pending = set(), {}
        await asyncio.sleep(self.bench.switch_s if self.split.colocated else 0.0)
        for rollout in rollouts:
            assert not rollout.dropped
            ages = [version - row.versions[row.mask == 1].astype(np.int64) for row in rollout.rows]
            self._ages += ages
            self._lengths += [np.full(len(row_ages), rollout.sampled_tokens) for row_ages in ages]
        self._trained += len(rollouts)


def best_split(bench: AsyncBench, measure: Callable[[Split], float], first: int) -> Split:
    """Return the split of separate GPUs with the least seconds: from ``first`` engines on, downhill."""
    seconds_by_engines: dict[int, float] = {}

    def seconds(engines: int) -> float:
        if not 0 < engines < bench.gpus:
            return float("inf")
        if engines not in seconds_by_engines:
            seconds_by_engines[engines] = measure(Split(engines, bench.gpus - engines))
        return seconds_by_engines[engines]

    best = first
    while (better := min((best - 1, best + 1), key=seconds)) and seconds(better) < seconds(best):
        best = better
    return Split(best, bench.gpus - best)


@dataclass(frozen=True, slots=True)
class Mode:
    """A staleness with its best split, and a run for each seed."""

    max_staleness: int
    streams: bool
    """``async.streaming``."""
    split: Split
    outcomes: list[Outcome]

    @property
    def seconds(self) -> list[float]:
        """Of each seed."""
        return [outcome.seconds for outcome in self.outcomes]


def measure_async(
    bench: AsyncBench, staleness: Sequence[int], seeds: int, progress: Callable[[str], None], *, streams: bool = False
) -> Iterator[Mode]:
    """Yield the synchronous loop with shared and with separate GPUs, then each other staleness.

    Splits are chosen with a seed that is not measured. With ``streams`` the others stream groups, and the synchronous loop with
    separate GPUs comes with and without it.
    """
    renderer, engines, short = byte_renderer(), bench.gpus // 2, replace(bench, steps=max(1, bench.steps // 2))

    def run(case: tuple[int, bool], workload: AsyncBench, seed: int, split: Split) -> Outcome:
        progress(f"staleness {case[0]}{', streaming' if case[1] else ''}, {split} GPUs, seed {seed}")
        return Simulation(workload, renderer, split, case[0], seed, streams=case[1]).run()

    shared = Split(bench.gpus, bench.gpus, colocated=True)
    yield Mode(0, False, shared, [run((0, False), bench, seed, shared) for seed in range(seeds)])
    for case in [
        (0, False),
        *([(0, True)] if streams else []),
        *((max_staleness, streams) for max_staleness in staleness if max_staleness),
    ]:
        run_case = partial(run, case, short, seeds)
        best = best_split(bench, lambda split, run_case=run_case: run_case(split).seconds, engines)  # type: ignore[misc]
        engines = best.engines
        yield Mode(*case, best, [run(case, bench, seed, best) for seed in range(seeds)])
