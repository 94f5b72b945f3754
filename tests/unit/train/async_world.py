"""A training run in virtual time: scripted engines with random latencies, a learner that takes seconds, all else real."""

from __future__ import annotations

import asyncio
import random
import zlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from byte_renderer import byte_renderer
from rich.console import Console

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.sample_conversion import load_convert
from agentrl.config.evaluation import EvalSet
from agentrl.config.load import load_config
from agentrl.config.recorded import recorded_keys
from agentrl.config.schema import Config
from agentrl.core.env import Env
from agentrl.core.errors import EngineError
from agentrl.core.lineup import Lineup
from agentrl.core.multi_agent_env import MultiAgentEnv
from agentrl.core.sampler import Sampler
from agentrl.core.task import Task
from agentrl.core.types import Generation, Message, Prompt, Rollout, SamplingParams
from agentrl.data.jobs import Job, TaskJobs
from agentrl.data.task_sources import count_epochs, make_data_source
from agentrl.episode.context import EpisodeContext
from agentrl.episode.failure_policy import FailurePolicy
from agentrl.episode.limits import Limits
from agentrl.episode.runner import EpisodeRunner, EpisodeSettings, EpisodeSlots, GroupRunner
from agentrl.evaluation.sets import EvalTasks
from agentrl.inference.fleet.time_sharing import EngineTimeSharing
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.obs.metrics import MetricsLog, read_metrics
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.rewards.grader import Grader
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.time_shared_runner import TimeSharedRunner
from agentrl.runtime.tool_servers import ToolServers
from agentrl.self_play.training import SelfPlay
from agentrl.testing import FakeLearner, ScriptedSampler
from agentrl.testing.virtual_time import run_virtual
from agentrl.train.engine_weights import EngineWeights, EvalEngines, open_gpus
from agentrl.train.evaluations import Evaluations, Evaluator
from agentrl.train.pipeline.journal import Journal
from agentrl.train.pipeline.scheduler import open_scheduler
from agentrl.train.rollout_source import RunInputs, StepRollouts, TaskPosition
from agentrl.train.sampling import RunRecords, Sampling, count_steps, with_steps
from agentrl.train.trainer import Trainer
from agentrl.train.training_step import StepTrainer
from agentrl.weight_sync.base import SyncedWeights
from tests.batches import step_settings
from tests.unit.episode.conftest import CHATML

TASKS = [Task(f"t{number}", (Message("user", f"task {number}"),)) for number in range(50)]
RENDERER = byte_renderer(CHATML)
TRAIN_S = 0.5
"""Of an optimizer step."""


async def run_first_group(
    journal: Journal, runner: EpisodeRunner, jobs: Sequence[Job], on_done: Callable[[Rollout], None] = lambda _: None
) -> list[Rollout]:
    """The rollouts of the first group of a run, which is the only one of the first step."""
    config = load_config(None, ["rollout.batch_size=1", "train.steps=1"])
    scheduler = open_scheduler(
        config,
        0,
        TaskPosition(),
        journal,
        runner=runner,
        group_jobs=lambda _: [*jobs],
        guard=nullcontext,
        on_done=on_done,
        self_play=None,
    )
    return (await scheduler.take()).rollouts


class Turns(Env):
    """Takes as many turns as the first letter of the policy's answer says."""

    def step(self, action: Message) -> Any:
        ends = "." in action.content
        return (() if ends else (Message("user", "on"),)), float(len(action.content) % 3), ends, False, {}


def answer(request: Any) -> str:
    """An answer that depends on the session and the turn alone; some episodes have many turns."""
    value = zlib.crc32(f"{request.session_id} {request.turn}".encode())
    return "x" * (1 + value % 5) + ("." if value % 4 else "")


class Engines(ScriptedSampler):
    """A sampler with latencies from 0.1 to 60 s. A weight sync waits for no request: tokens have the older version."""

    def __init__(self, seed: int) -> None:
        """Draw latencies with ``seed``."""
        super().__init__(answer, encode=RENDERER.encode, end_token_id=RENDERER.end_token_id)
        self.latency = random.Random(seed)
        self.paused: list[str] = []
        """Pauses, updates and ends of pauses."""
        self.running = 0
        """Requests in progress."""
        self.refused: int | None = None
        """The version that they do not take."""

    async def pause(self, mode: str) -> None:
        """Record the pause; no request is cut."""
        self.paused.append(mode)

    async def resume(self) -> None:
        """Record the end of the pause."""
        self.paused.append("resume")

    async def generate(self, prompt: Prompt, params: SamplingParams, **names: Any) -> Generation:
        """Return the script's answer after a while, with the version that the request began with."""
        version = self.version
        self.running += 1
        try:
            await asyncio.sleep(min(60.0, self.latency.lognormvariate(0.0, 1.5)))
        finally:
            self.running -= 1
        generation = await super().generate(prompt, params, **names)
        return Generation(
            generation.token_ids, generation.logprobs, generation.finish_reason, ((0, version),), 0, names["request_id"]
        )


class World(Sampling):
    """The rollout source of a run; training takes `TRAIN_S`."""

    async def release_gpus_for_training(self, learner: Any, watch: Stopwatch) -> None:
        await asyncio.sleep(TRAIN_S)


class Plain(World):
    """The synchronous loop as it is defined: all episodes of a step begin together, and all are waited for."""

    async def get_rollouts(self, step: int, position: TaskPosition, consume: Any = None) -> StepRollouts:
        positions = list(islice(position.untrained_positions(), self.config.rollout.batch_size))
        rollouts = await self.services.runner().run_many(self.tasks.groups(positions))
        self.records.recorder.write(step, rollouts)
        self._batch = StepRollouts(rollouts, position.after(positions))
        return self._batch


def make_config(*overrides: str) -> Config:
    fixed = ["rollout.batch_size=4", "rollout.n_samples_per_prompt=2", "rollout.concurrency=12", "train.save_every=1"]
    return load_config(None, [*fixed, "train.eval_first=false", "train.eval_every=0", *overrides])


def fleet_of(engines: Engines) -> Any:
    """A fleet whose engines all live."""

    async def check_now() -> None:
        """All engines live."""

    return SimpleNamespace(
        live=(engines,),
        group="eval",
        metrics=lambda: {"engines/eval/restarts": 1.0, "rollout/cache_hit": 0.5, "rollout/engine_restarts": 1.0},
        set_weight_sync=lambda sync, **_: None,
        check_now=check_now,
        wait_ended=check_now,
        sampler=engines,
        start=check_now,
        has_requests=False,
        on_demand=lambda call: None,
        restart_in=lambda context: None,
    )


def sync_of(engines: Engines) -> Any:
    """A weight sync that takes half a second."""

    async def sync_weights(learner: Any, some: Sequence[Any], version: int) -> SyncedWeights:
        assert list(some) == [engines]
        engines.paused.append(f"push {version}")
        await asyncio.sleep(0.5)
        engines.version = version
        if version == engines.refused:
            raise EngineError("no memory")
        return SyncedWeights(version, 0)

    return SimpleNamespace(sync_weights=sync_weights)


def make_source(
    config: Config,
    engines: Engines,
    kind: type[Sampling],
    records: RunRecords,
    env: Callable[[], Env | MultiAgentEnv] = Turns,
    grader: Grader | None = None,
    judges: Mapping[str, Any] | None = None,
) -> Sampling:
    fleet, sync = fleet_of(engines), sync_of(engines)
    time_sharing = None if judges is None else EngineTimeSharing(fleet, judges)

    def runner(*, sampler: Sampler | None = None) -> GroupRunner:
        episodes = EpisodeRunner(
            {
                "": EpisodeSettings(
                    EpisodeContext(
                        env_factory=env,
                        renderer=RENDERER,
                        sampler=sampler or engines,
                        tool_clients={},
                        limits=Limits(max_turns=6, max_tokens=1000, max_seconds=1e9, max_new_tokens=50),
                        sampling=SamplingParams(max_new_tokens=50, seed=0),
                    ),
                    grader=grader,
                    lineup=None if env is Turns else Lineup(),
                )
            },
            FailurePolicy(config.rollout.failure),
            EpisodeSlots(config.rollout.concurrency),
        )
        return episodes if time_sharing is None else TimeSharedRunner(episodes, time_sharing)

    services: Any = SimpleNamespace(
        config=config,
        fleet=fleet,
        runner=runner,
        check=lambda: None if time_sharing is None else time_sharing.check(),
        renderer=RENDERER,
        time_sharing=time_sharing,
        tools=ToolServers(config, {}, Path(), Path()),
    )
    batch_size, epochs = int(records.journal.first_keys["rollout.batch_size"]), count_epochs(config, {"": TASKS})
    order = make_data_source(config.tasks.data_source, TASKS, config.run.seed)
    tasks = TaskJobs(config, order, batch_size, epochs)
    weights = EngineWeights(config.weights, fleet, sync, open_gpus(config, fleet, time_sharing))
    return kind(config, services, tasks, weights, records, Interrupt(print))


def make_evaluator(kind: Callable[..., Evaluator], source: Sampling) -> Evaluator:
    evaluated = [EvalTasks("", EvalSet(n_samples=1), TASKS[:3], "tasks")]
    records, weights = source.records, source.weights
    return kind(
        source.config.eval, source.services, evaluated, records.recorder, source.interrupt, weights, source.self_play
    )


def train(
    folder: Path,
    config: Config,
    *,
    kind: type[Sampling] = World,
    seed: int = 0,
    learner: FakeLearner | None = None,
    engines: Engines | None = None,
    env: Callable[[], Env | MultiAgentEnv] = Turns,
    self_play: Callable[[RunRecords, Mapping[str, Any], int | None], SelfPlay] | None = None,
    evaluator: Callable[..., Evaluator] = Evaluator,
    eval_engines: EvalEngines | None = None,
    discard: bool = False,
    grader: Grader | None = None,
    judges: Mapping[str, Any] | None = None,
) -> Trainer:
    """Train, from the newest checkpoint in ``folder`` on if there is one, and return the trainer."""
    checkpoint = latest_checkpoint(folder / "checkpoints") if folder.exists() else None
    state = read_state(checkpoint) if checkpoint else {"step": 0, "position": 0, "evaluated": -1}
    inputs = RunInputs(config, folder, folder, state, folder.exists(), recorded_keys(config), discard)

    async def main() -> Trainer:
        records = RunRecords.open(inputs)
        source = make_source(config, engines or Engines(seed), kind, records, env, grader, judges)
        time_sharing = source.services.time_sharing
        if time_sharing is not None:
            await time_sharing.start()
        if self_play is not None:
            source.self_play = self_play(records, state, inputs.resume_after)
        await source.begin()
        source.weights.eval_engines = eval_engines
        await source.weights.open()
        if checkpoint:
            source.tasks.buffer.load_state(state["source"]["data"])
        source.config = with_steps(config, count_steps(config, inputs.step, source.tasks.buffer))
        view = ProgressView(Console(quiet=True), source.steps, "plain")
        log = MetricsLog(folder, resume_after=inputs.resume_after)
        checkpoints = Checkpoints(folder / "checkpoints", keep=2)
        estimators = RunEstimators(config.algo.by_source)
        estimators.load_state(state.get("estimators", {}))
        learner_group = learner or FakeLearner()
        settings, evaluating = step_settings(config, source.epoch_steps), make_evaluator(evaluator, source)
        steps = StepTrainer(
            settings, source, learner_group, estimators, view, convert=load_convert(config.batch.convert)
        )
        evaluated, score = state["evaluated"], state.get("score")
        evaluations = Evaluations(config.eval, config.train, evaluating, checkpoints, log, view, evaluated, score)
        run = Trainer(steps, checkpoints, log, view, evaluations)
        run.keys = inputs.keys
        run.step, run.position = inputs.step, inputs.position
        run.saved = state["step"] if checkpoint else -1
        try:
            async with asyncio.timeout(1e6):
                await run.run()
        finally:
            await source.aclose()
            if time_sharing is not None:
                await time_sharing.aclose()
            checkpoints.finish()
        return run

    return run_virtual(main())


def steps(folder: Path) -> list[dict[str, float]]:
    """The rows of training steps."""
    return [row for row in read_metrics(folder / "metrics.jsonl") if "train/reward" in row]
