"""The training loop with a fake learner and recorded rollouts: what it keeps when something ends it."""

import asyncio
import io
import os
import re
import signal
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from rich.console import Console

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.groups import RolloutGroups
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.evaluation import EvalSet
from agentrl.config.schema import Config
from agentrl.core.errors import EngineError, RunStopped
from agentrl.core.types import Failure, FailureKind, Rollout
from agentrl.data.jobs import OnDone
from agentrl.evaluation.evaluate import SetResult
from agentrl.evaluation.sets import EvalTasks
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import Checkpoints, complete_checkpoints, latest_checkpoint, read_state
from agentrl.obs.metrics import MetricsLog, read_metrics
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.runtime.interrupt import Interrupt
from agentrl.testing import FakeLearner
from agentrl.train.evaluations import Evaluations, Evaluator
from agentrl.train.replay import RecordedRollouts, Replay
from agentrl.train.rollout_source import TaskPosition
from agentrl.train.trainer import Trainer
from agentrl.train.training_step import StepTrainer
from tests.batches import step_settings
from tests.unit.train.test_replay import Letters, config, groups, rollout, samples_file


class Unchecked:
    """Takes any recorded rollouts."""

    renderer = Letters()

    def __call__(self, rollouts: Sequence[Rollout], where: str) -> None:
        pass


@dataclass(slots=True)
class Engines(Replay):
    """Recorded rollouts in place of those of engines, which may refuse weights."""

    measures = True
    refuse: int | None = None
    """The policy version that they do not take."""
    interrupted: bool = False
    """Whether a signal arrives in every evaluation."""
    synced: list[int] = field(default_factory=list)
    ratings: list[float] = field(default_factory=list)
    """Of the policy at each evaluation."""
    unchanged: float = 0.0
    """Whether each sync sends the weights of the sync before."""

    def metrics(self) -> dict[str, float]:
        return {"sync/unchanged": self.unchanged}

    async def sync_weights(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:
        if version == self.refuse:
            raise EngineError("the engine is gone")
        self.synced.append(version)

    episodes = 0

    @property
    def weights(self) -> "Engines":
        return self

    def learner_idle(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    @property
    def sets(self) -> Sequence[EvalTasks]:
        return [EvalTasks("", EvalSet(), [], "nothing")]

    @property
    def standing(self) -> dict[str, float]:
        return {"eval/rating": self.ratings.pop(0)} if self.ratings else {}

    async def begin(self) -> None:
        pass

    def engine_metrics(self) -> dict[str, float]:
        return {}

    async def evaluate(self, step: int, on_done: OnDone) -> list[SetResult]:
        if self.interrupted:
            raise RunStopped("interrupted")
        return []


def trainer(
    folder: Path,
    run_config: Config,
    learner: FakeLearner,
    *,
    rollouts: Sequence[Rollout] | None = None,
    console: Console | None = None,
    interrupt: Interrupt | None = None,
    resume_after: int | None = None,
    **options: object,
) -> Trainer:
    """A trainer of a run in ``folder``, with three steps of recorded rollouts if no others are given."""
    recorded = RecordedRollouts(samples_file(folder, rollouts or groups(*"abcdef")), run_config.rollout.batch_size)
    source = Engines(run_config, recorded, Unchecked(), interrupt or Interrupt(print), **options)  # type: ignore[arg-type]
    view = ProgressView(console or Console(quiet=True), source.steps, "plain")
    checkpoints = Checkpoints(folder / "run" / "checkpoints", keep=3)
    metrics = MetricsLog(folder / "run", resume_after=resume_after)
    estimators, evaluator = RunEstimators(run_config.algo.by_source), cast("Evaluator", source)
    steps = StepTrainer(step_settings(run_config), source, learner, estimators, view)
    evaluations = Evaluations(run_config.eval, run_config.train, evaluator, checkpoints, metrics, view)
    return Trainer(steps, checkpoints, metrics, view, evaluations)


def resumed(folder: Path, run_config: Config) -> Trainer:
    """A trainer that goes on from the last checkpoint of the run."""
    state = saved_state(folder)
    run = trainer(folder, run_config, FakeLearner(), resume_after=state["step"])
    run.step = run.saved = state["step"]
    run.position, run.evaluations.step = TaskPosition(state["position"]), state["evaluated"]
    run.steps.estimators.load_state(state["estimators"])
    return run


def steps(folder: Path) -> list[dict[str, float]]:
    """The rows of training steps, without those of evaluations."""
    return [row for row in read_metrics(folder / "run" / "metrics.jsonl") if "train/reward" in row]


def saved_state(folder: Path) -> dict[str, Any]:
    checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
    assert checkpoint is not None
    return read_state(checkpoint)


def test_a_trained_step_whose_weights_no_engine_took_is_saved_with_its_metrics(tmp_path: Path) -> None:
    run = trainer(tmp_path, config("train.save_every=0"), FakeLearner(metrics={"train/loss": 3.0}), refuse=2)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(run.run())
    assert saved_state(tmp_path)["step"] == 2
    rows = steps(tmp_path)
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 3.0), (2, 3.0)]


def test_an_evaluation_that_was_interrupted_is_made_up_for_once(tmp_path: Path) -> None:
    run_config = config("train.save_every=0", "train.eval_first=false", "train.eval_every=0")
    run = trainer(tmp_path, run_config, FakeLearner(), interrupted=True)
    with pytest.raises(RunStopped):
        asyncio.run(run.run())
    state = saved_state(tmp_path)
    assert (state["step"], state["evaluated"]) == (3, -1)
    for _ in range(2):
        again = resumed(tmp_path, run_config)
        asyncio.run(again.run())
        assert saved_state(tmp_path)["evaluated"] == 3
        assert again.step == 3
    rows = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "time/eval_s" in row]
    assert [row["step"] for row in rows] == [3], "not again by the second"


@pytest.mark.parametrize(
    ("rewards", "overrides", "words"),
    [
        (
            (1.0, 1.0),
            (),
            ["equal rewards (from 1 to 1 over 2 tasks, 0 of 4", "rollout.n_samples_per_prompt", "sampler.temp"],
        ),
        ((1.0,), ("rollout.n_samples_per_prompt=1",), ["rollout.n_samples_per_prompt=1", "4 or more"]),
        (None, (), ["all 4 episodes were dropped", "tool 4", "ToolFailure: no sandbox", "rollout.failure"]),
    ],
)
def test_a_step_that_trains_nothing_is_explained_once(
    rewards: tuple[float, ...] | None, overrides: tuple[str, ...], words: list[str], tmp_path: Path
) -> None:
    """The recorded rollouts of two steps have these rewards, or were dropped."""
    rollouts = [rollout(prompt, sample, reward) for prompt in "abcd" for sample, reward in enumerate(rewards or (0, 1))]
    if rewards is None:
        for each in rollouts:
            each.dropped, each.failure = True, Failure(FailureKind.TOOL, "ToolFailure", "no sandbox")
    out = io.StringIO()
    run = trainer(tmp_path, config(*overrides), FakeLearner(), rollouts=rollouts, console=Console(file=out, width=400))
    asyncio.run(run.run())
    output = [line.split(" ", 2)[2] for line in out.getvalue().splitlines() if re.match(r"[\d-]{10} [\d:]{8} ", line)]
    [warning] = [line for line in output if line.startswith("warning: step 1: nothing was trained")]
    for word in words:
        assert word in warning
    lines = [line for line in output if line.startswith("step ")]
    assert len(lines) == 2
    assert f"dropped {4 if rewards is None else 0}" in lines[0]


@pytest.mark.parametrize(("flat_groups", "taught"), [(3, "40%"), (2, None)])
def test_a_run_of_which_most_groups_teach_nothing_is_warned_once(
    flat_groups: int, taught: str | None, tmp_path: Path
) -> None:
    """Of the groups of each five, the first have equal rewards; a step has one group."""
    rollouts = [
        rollout(f"{number}", sample, 1.0 if number % 5 < flat_groups else float(sample))
        for number in range(10)
        for sample in range(2)
    ]
    out = io.StringIO()
    run_config = config("rollout.batch_size=1")
    asyncio.run(
        trainer(tmp_path, run_config, FakeLearner(), rollouts=rollouts, console=Console(file=out, width=600)).run()
    )
    assert [row["train/taught_groups"] for row in steps(tmp_path)] == 2 * (
        [0.0] * flat_groups + [1.0] * (5 - flat_groups)
    )
    assert out.getvalue().count("tasks.data_source.name=curriculum") == (taught is not None)
    assert taught is None or f"warning: step 5: {taught} of the groups of the last 5 steps taught" in out.getvalue()


def test_a_gradient_that_is_not_finite_is_counted_and_explained_once(tmp_path: Path) -> None:
    out = io.StringIO()
    learner = FakeLearner(metrics={"train/nonfinite_gradients": 1.0, "train/loss": float("nan")})
    asyncio.run(trainer(tmp_path, config(), learner, console=Console(file=out, width=400)).run())
    assert out.getvalue().count("learner.optimizer.lr") == 1
    rows = steps(tmp_path)
    assert [row["train/nonfinite_gradients"] for row in rows] == [1.0, 1.0, 1.0]
    assert all("train/loss" not in row for row in rows), "no number"


@pytest.mark.parametrize(
    ("learned", "warnings"),
    [({"train/lr": 1e-6}, 1), ({"train/lr": 0.0}, 0), ({"train/lr": 1e-6, "train/nonfinite_gradients": 1.0}, 0)],
)
def test_weights_that_a_trained_step_did_not_change_are_explained_once(
    tmp_path: Path, learned: dict[str, float], warnings: int
) -> None:
    out = io.StringIO()
    console = Console(file=out, width=800)
    asyncio.run(trainer(tmp_path, config(), FakeLearner(metrics=learned), console=console, unchanged=1.0).run())
    assert out.getvalue().count("are those of the sync before") == warnings
    assert [row["sync/unchanged"] for row in steps(tmp_path)] == [1.0, 1.0, 1.0]


def test_a_resumed_run_has_the_baselines_of_its_checkpoint(tmp_path: Path) -> None:
    run_config = config("algo.advantage.name=rae", "train.save_every=1")
    full_trainer = trainer(tmp_path / "whole", run_config, FakeLearner())
    asyncio.run(full_trainer.run())
    assert [row["self_play/baseline"] for row in steps(tmp_path / "whole")]
    cut = trainer(tmp_path / "cut", run_config, FakeLearner(), refuse=2)
    with pytest.raises(EngineError):
        asyncio.run(cut.run())
    assert cut.steps.estimators.state()
    assert cut.steps.estimators.state() != full_trainer.steps.estimators.state()
    again = resumed(tmp_path / "cut", run_config)
    assert again.steps.estimators.state() == cut.steps.estimators.state()
    asyncio.run(again.run())
    assert again.steps.estimators.state() == full_trainer.steps.estimators.state()


def test_the_checkpoint_with_the_best_rating_is_kept(tmp_path: Path) -> None:
    run_config = config("train.keep_best=rating", "train.eval_every=1", "train.eval_first=false", "train.save_every=1")
    run = trainer(tmp_path, run_config, FakeLearner(), ratings=[5.0, 7.0, 6.0])
    run.checkpoints.keep = 1
    asyncio.run(run.run())
    assert [path.name for path in complete_checkpoints(tmp_path / "run" / "checkpoints")] == [
        "step_000002",
        "step_000003",
    ]


class Teaching:
    """Teachers that give every token -3, until they fail."""

    need_learner = False

    def __init__(self, fail_at: int) -> None:
        self.left = fail_at

    async def score(self, groups: RolloutGroups, learner: LearnerGroup, pad_id: int) -> dict[str, Any]:
        self.left -= 1
        if not self.left:
            raise EngineError("teacher 'a' (algo.distillation.teachers.a.url=http://a) does not answer")
        return {"a": {row.key: np.full(len(row.mask), -3.0, np.float32) for row in groups.rows}}


def test_a_teachers_term_is_trained_on_and_logged_until_it_fails(tmp_path: Path) -> None:
    """A step whose teacher fails is not trained on, with the term or without it; the steps before are saved."""
    run_config = config(
        "algo.distillation.teachers.a.url=http://a", "algo.distillation.reward_coef=0", "train.save_every=0"
    )
    learner = FakeLearner()
    run = trainer(tmp_path, run_config, learner)
    run.steps.teachers = Teaching(fail_at=3)  # type: ignore[assignment]
    with pytest.raises(EngineError, match="teacher 'a'"):
        asyncio.run(run.run())
    assert (learner.steps, saved_state(tmp_path)["step"]) == (2, 2)
    for row, batch in zip(steps(tmp_path), learner.batches, strict=True):
        micros = [micro for rank in batch.micro for micro in rank]
        gaps = torch.cat([(micro.logprobs_L + 3)[micro.mask_L] for micro in micros])
        advantages = torch.cat([micro.advantages_L[micro.mask_L] for micro in micros])
        torch.testing.assert_close(advantages, -gaps)
        assert row["train/teacher_kl"] == row["train/teacher_kl/a"] == pytest.approx(float(gaps.mean()), rel=1e-5)
        assert "time/teachers_s" in row


def test_a_signal_is_acknowledged_while_the_learner_works(tmp_path: Path) -> None:
    lines: list[str] = []

    class Working(FakeLearner):
        def work(self) -> None:
            os.kill(os.getpid(), signal.SIGTERM)
            acknowledged.wait(10)
            assert acknowledged.is_set()
            acknowledged.clear()

        def train_step(self, batch: GlobalBatch) -> dict[str, float]:
            if not lines:
                self.work()
            return super().train_step(batch)

    def acknowledge(line: str) -> None:
        lines.append(line)
        acknowledged.set()

    async def train() -> None:
        with run.source.interrupt:  # type: ignore[attr-defined]
            await run.run()

    acknowledged = threading.Event()
    run = trainer(tmp_path, config(), Working(), interrupt=Interrupt(acknowledge))
    with pytest.raises(RunStopped, match="SIGTERM"):
        asyncio.run(train())
    assert len(lines) == 1
    assert saved_state(tmp_path)["step"] == 1


def test_a_second_ctrl_c_in_a_save_begins_no_other_save(tmp_path: Path) -> None:
    """It would remove the files that the thread of the first save writes."""
    saving, released = threading.Event(), threading.Event()
    folders = []

    class SlowSave(FakeLearner):
        def save(self, folder: Path) -> None:
            folders.append(folder.name)
            if len(folders) == 1:
                saving.set()
                released.wait()
            super().save(folder)

    async def train() -> None:
        task = asyncio.create_task(trainer(tmp_path, config("train.save_every=1"), SlowSave()).run())
        await asyncio.to_thread(saving.wait)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        released.set()

    asyncio.run(train())
    assert folders == ["step_000001.partial"]


def test_all_that_a_step_waits_for_is_in_a_phase(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock advances only in what the trainer calls."""
    clock_s = 0.0

    def advance(seconds: float) -> None:
        nonlocal clock_s
        clock_s += seconds

    class SlowLearner(FakeLearner):
        def train_step(self, batch: GlobalBatch) -> dict[str, float]:
            advance(100)
            return super().train_step(batch)

        def save(self, folder: Path) -> None:
            advance(7)
            super().save(folder)

    def get_monitored() -> dict[str, float]:
        advance(20)
        return {}

    run = trainer(tmp_path, config("train.save_every=1", "train.eval_every=0"), SlowLearner())

    async def on_step_trained(source: Engines, step: int, advantages: Mapping[str, float]) -> None:
        advance(3)

    monkeypatch.setattr(time, "perf_counter", lambda: clock_s)
    monkeypatch.setattr(Engines, "on_step_trained", on_step_trained)
    run.monitor = get_monitored
    asyncio.run(run.run())
    for row in steps(tmp_path):
        times = {key: row.get(f"time/{key}_s", 0.0) for key in ("train", "record", "other", "step", "save")}
        assert times == {"train": 100, "record": 23, "other": 0, "step": 123, "save": 7 * (row["step"] > 1)}
