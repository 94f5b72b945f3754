"""Brings up everything a training run needs, runs it, and takes it down."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.cluster.learners import RayLearnerGroup, start_learners
from agentrl.config.load import dump
from agentrl.config.schema import Config
from agentrl.errors import RunStopped
from agentrl.evaluation.sets import choose_tasks
from agentrl.interrupt import Interrupt
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.models.resolve import resolve_model
from agentrl.obs.curve import plot_curve
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.preflight import open_tasks
from agentrl.runfolder import choose_folder
from agentrl.stack import Stack, open_stack
from agentrl.task import TaskSet
from agentrl.train import Trainer
from agentrl.weights import make_sync

CURVE = ("train/reward", "rollout/exact_match", "eval/reward", "eval/exact_match")


async def run_training(config: Config, *, resume: bool, console: Console, command: str) -> None:
    """Train, and say at the end where everything lies.

    Args:
        config: what to run; checked by `agentrl.preflight.check_run`.
        resume: go on from the newest whole checkpoint of the run's folder.
        console: where progress is shown.
        command: what the user types to go on.

    Raises:
        RunStopped: Ctrl-C or the failure policy ended the run; what it had is saved.
        AgentrlError: something failed; what it had is saved where the learner still could.

    """
    folder = choose_folder(config, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
    console.print(f"run {folder}" + (f", going on from {checkpoint.name}" if checkpoint else ""), highlight=False)
    if resume and checkpoint is None:
        console.print("no whole checkpoint there yet: starting at step 0", highlight=False)
    try:
        with Interrupt() as interrupt, ProgressView(console, config.train.steps, config.obs.progress) as view:
            trainer = await _run(config, folder, checkpoint, view, interrupt)
    except RunStopped as stop:
        raise RunStopped(f"{stop}. The run lies in {folder}; go on with:\n  {command}") from None
    finally:
        curve = plot_curve(folder / "metrics.jsonl", folder / "curve.png", CURVE)
    _farewell(console, folder, trainer, curve)


async def _run(
    config: Config, folder: Path, checkpoint: Path | None, view: ProgressView, interrupt: Interrupt
) -> Trainer:
    tasks = open_tasks(config)
    model = resolve_model(config.model.path)
    start = checkpoint / "model" if checkpoint else model
    async with AsyncExitStack() as exits:
        view.phase("starting engine, tools and learner")
        learner = asyncio.ensure_future(asyncio.to_thread(_start_learner, config, start, folder, checkpoint))
        exits.push_async_callback(_close_learner, learner)
        stack = await exits.enter_async_context(open_stack(config, tasks, start, folder, config.run.seed))
        trainer = _trainer(config, folder, checkpoint, tasks, stack, await learner, view, interrupt)
        exits.callback(trainer.metrics.close)
        await trainer.run()
        return trainer


def _start_learner(config: Config, model: Path, folder: Path, checkpoint: Path | None) -> RayLearnerGroup:
    learner = start_learners(model, config.learner, config.algo, seed=config.run.seed, run_dir=folder)
    try:
        learner.ready()
        if checkpoint is not None:
            learner.load(checkpoint)
    except BaseException:
        learner.close()
        raise
    return learner


async def _close_learner(starting: asyncio.Future[RayLearnerGroup]) -> None:
    try:
        learner = await starting
    except Exception:
        return
    await asyncio.to_thread(learner.close)


def _trainer(
    config: Config,
    folder: Path,
    checkpoint: Path | None,
    tasks: TaskSet,
    stack: Stack,
    learner: RayLearnerGroup,
    view: ProgressView,
    interrupt: Interrupt,
) -> Trainer:
    state: dict[str, Any] = read_state(checkpoint) if checkpoint else {"step": 0, "position": 0, "spent_s": 0.0}
    return Trainer(
        config=config,
        tasks=tasks,
        stack=stack,
        learner=learner,
        sync=make_sync(
            config.weights.transport, bucket_bytes=config.weights.bucket_mib << 20, folder=folder / "weights"
        ),
        checkpoints=Checkpoints(folder / "checkpoints", keep=config.train.keep),
        metrics=MetricsLog(
            folder, tensorboard=config.obs.tensorboard, resume_after=state["step"] if checkpoint else None
        ),
        recorder=RolloutRecorder(folder / "rollouts"),
        view=view,
        interrupt=interrupt,
        sets=choose_tasks(config, tasks),
        step=state["step"],
        position=state["position"],
        spent_s=state["spent_s"],
        saved=state["step"] if checkpoint else -1,
    )


def _farewell(console: Console, folder: Path, trainer: Trainer, curve: Path | None) -> None:
    lines = {
        "checkpoint": folder / "checkpoints" / f"step_{trainer.step:06d}",
        "metrics": folder / "metrics.jsonl",
        "rollouts": folder / "rollouts",
        "curve": curve,
    }
    console.print(
        "\n".join(f"{name:<11} {path}" for name, path in lines.items() if path), highlight=False, soft_wrap=True
    )
    if trainer.figures:
        console.print(json.dumps({key: round(value, 4) for key, value in trainer.figures.items()}), highlight=False)
