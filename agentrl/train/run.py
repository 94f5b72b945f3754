"""Brings up everything a training run needs, runs it, and takes it down."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.cluster.engine_actors import RayLauncher
from agentrl.cluster.learner_group import RayLearnerGroup, start_learners
from agentrl.cluster.placement_group import Room
from agentrl.cluster.placement_layout import lay_out
from agentrl.cluster.ray_address import learner_device
from agentrl.cluster.ray_runtime import RayRuntime, store_bytes
from agentrl.config.load import dump
from agentrl.config.schema import Config
from agentrl.core.errors import RunStopped
from agentrl.evaluation.sets import choose_tasks
from agentrl.inference.launch.launcher import EngineSpec, Launcher, LocalLauncher
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.models.reference_policy import pin_reference, resolve_reference
from agentrl.models.resolve import resolve_model
from agentrl.obs.learning_curve import plot_curve
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.progress import ProgressView
from agentrl.obs.rollouts import RolloutRecorder
from agentrl.obs.trackers import TensorBoard, Tracker
from agentrl.obs.waiting import PHASE, waiting
from agentrl.obs.wandb import open_wandb
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.checks import open_tasks
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.run_dir import choose_folder
from agentrl.runtime.services import open_stack
from agentrl.runtime.task_order import TaskOrder
from agentrl.train.replay import RecordedRollouts, Replay, sample_check
from agentrl.train.sampling import RolloutSource, Sampling
from agentrl.train.trainer import Trainer
from agentrl.train.warm_start import warmed_model
from agentrl.weight_sync.base import WeightSync
from agentrl.weight_sync.registry import make_sync

CURVE = ("reward", "exact_match")
"""Figures to draw."""


def curve_keys(config: Config) -> list[str]:
    """Return the metrics that the learning curve shows, those of each evaluation set among them."""
    prefixes = [f"eval/{name}/" for name in config.eval.sets] or ["eval/"]
    return ["train/reward", "rollout/exact_match", *(prefix + key for prefix in prefixes for key in CURVE)]


@dataclass(slots=True)
class Session:
    """What is known of a run before its parts are up."""

    config: Config
    folder: Path
    console: Console
    resume: bool
    checkpoint: Path | None
    """Where a resumed run goes on; None starts at step 0."""
    model: Path
    """The folder of the weights to begin with."""
    replay: Path | None
    """Recorded rollouts to train on in place of sampling."""
    state: Mapping[str, Any]
    """The driver's, of the checkpoint."""


async def run_training(
    config: Config, *, resume: bool, console: Console, command: str, replay: Path | None = None
) -> None:
    """Train, and say at the end where everything lies.

    Args:
        config: what to run; checked by `check_run` of the preflight, or for a replay by `check_replay`.
        resume: go on from the newest whole checkpoint of the run's folder.
        console: where progress is shown.
        command: what the user types to go on.
        replay: a file of rollouts or a run's folder to train on in place of sampling.

    Raises:
        RunStopped: Ctrl-C or the failure policy ended the run; what it had is saved.
        AgentrlError: something failed; what it had is saved where the learner still could.

    """
    folder = choose_folder(config, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    console.print(
        f"run {folder}" + (f", going on from {checkpoint.name}" if checkpoint else ""), highlight=False, soft_wrap=True
    )
    if resume and checkpoint is None:
        console.print("no whole checkpoint there yet: starting at step 0", highlight=False)
    state = read_state(checkpoint) if checkpoint else {"step": 0, "position": 0, "spent_s": 0.0}
    try:
        with Interrupt() as interrupt:
            warm = None if checkpoint or replay else await warmed_model(config, folder, interrupt, console)
            config = pin_reference(config, folder if checkpoint else None, warm)
            (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
            model = checkpoint / "model" if checkpoint else warm or resolve_model(config.model.path)
            session = Session(config, folder, console, resume, checkpoint, model, replay, state)
            trainer = await _run(session, interrupt)
    except RunStopped as stop:
        raise RunStopped(f"{stop}. The run lies in {folder}; go on with:\n  {command}") from None
    finally:
        curve = plot_curve(folder / "metrics.jsonl", folder / "curve.png", curve_keys(config))
    _farewell(session, trainer, curve)


async def _run(session: Session, interrupt: Interrupt) -> Trainer:
    config, folder = session.config, session.folder
    async with AsyncExitStack() as exits:
        view = exits.enter_context(ProgressView(session.console, config.train.steps, config.obs.progress))
        view.phase("starting")
        exits.enter_context(Watchdog(config.obs.stall_warning_s, view.say, folder / "logs" / "watchdog.log"))
        with waiting(PHASE, "start"):
            source, learner = await _open(session, interrupt, exits)
        view.total = source.steps
        metrics = exits.enter_context(_open_metrics(session, view))
        trainer = Trainer(
            config=config,
            source=source,
            learner=learner,
            checkpoints=Checkpoints(folder / "checkpoints", keep=config.train.keep, began_with=session.checkpoint),
            metrics=metrics,
            view=view,
            step=session.state["step"],
            position=session.state["position"],
            spent_s=session.state["spent_s"],
            saved=session.state["step"] if session.checkpoint else -1,
        )
        await trainer.run()
        return trainer


async def _open(session: Session, interrupt: Interrupt, exits: AsyncExitStack) -> tuple[RolloutSource, RayLearnerGroup]:
    """Start whoever samples and whoever learns: side by side, or in turns where they are to have the same GPUs in turns."""
    room = await _reserve(session, exits)
    ranks = asyncio.ensure_future(asyncio.to_thread(_start_ranks, session, room))
    exits.push_async_callback(_close_ranks, ranks)
    in_turns = room is not None and session.config.placement.mode == "colocate"
    loading = None if in_turns else asyncio.ensure_future(_load(session, ranks))
    if loading is not None:
        exits.push_async_callback(_wait_for_end, loading)
    if session.replay:
        source = await _open_replay(session, session.replay, interrupt)
    else:
        launcher = LocalLauncher if room is None else await _in_room(room, ranks)
        source = await _open_sampling(session, interrupt, exits, launcher)
    return source, await (loading or _load(session, ranks))


async def _open_sampling(
    session: Session, interrupt: Interrupt, exits: AsyncExitStack, launcher: Callable[[EngineSpec], Launcher]
) -> RolloutSource:
    config, folder = session.config, session.folder
    tasks = open_tasks(config)
    opening = open_stack(config, tasks, session.model, folder, config.run.seed, launcher=launcher)
    stack = await exits.enter_async_context(opening)
    if config.placement.mode == "colocate":  # the learner loads next
        await asyncio.gather(*(engine.release_memory() for engine in stack.fleet.live))
    sync = _make_sync(session, config.weights.transport)
    exits.push_async_callback(sync.aclose)
    source = Sampling(
        config=config,
        stack=stack,
        order=TaskOrder(tasks.split(config.tasks.train_split), config.run.seed),
        sync=sync,
        recorder=RolloutRecorder(
            folder / "rollouts",
            keep=config.obs.rollouts,
            form=config.obs.rollout_format,
            after=session.state["step"] if session.resume else None,
        ),
        interrupt=interrupt,
        eval_sets=choose_tasks(config, tasks),
        # A learner that sleeps has nothing on a GPU that an engine could open.
        restart_sync=_make_sync(session, "tensor") if config.weights.transport == "ipc" else None,
    )
    await source.open()
    return source


def _make_sync(session: Session, transport: str) -> WeightSync:
    config = session.config
    return make_sync(
        transport,
        bucket_bytes=config.weights.bucket_mib << 20,
        folder=session.folder / "weights",
        dtype=config.weights.dtype,
        check=config.weights.check,
        backend=group_backend(config),
        timeout_s=config.sampler.request_timeout_s,
    )


async def _open_replay(session: Session, replay: Path, interrupt: Interrupt) -> RolloutSource:
    samples = RecordedRollouts(replay, session.config.rollout.batch_size)
    check = sample_check(session.model, session.config.sampler.temperature)
    return Replay(session.config, samples, check, interrupt)


def group_backend(config: Config) -> str:
    """Return what ``weights.transport=distributed`` sends through: NCCL where learner and engines have GPUs."""
    return "nccl" if config.sampler.device == learner_device(config.learner) == "cuda" else "gloo"


def _open_metrics(session: Session, view: ProgressView) -> MetricsLog:
    config, folder = session.config, session.folder
    after = session.state["step"] if session.checkpoint else None
    trackers: list[Tracker] = []
    if config.obs.tensorboard:
        trackers.append(TensorBoard(folder / "tensorboard", resume_after=after))
    if config.obs.wandb != "off":
        shown = config.model_dump(mode="json")
        wandb = open_wandb(
            folder, mode=config.obs.wandb, project=config.obs.wandb_project, config=shown, note=view.note
        )
        trackers += [wandb] if wandb else []
    return MetricsLog(folder, trackers=trackers, table_rows=config.obs.table_rows, resume_after=after)


async def _reserve(session: Session, exits: AsyncExitStack) -> Room | None:
    """Reserve what ``placement.mode`` wants from Ray; None: nothing."""
    config = session.config
    if config.placement.mode == "separate" or session.replay:
        return None
    layout = lay_out(config, learner_device(config.learner))
    runtime = RayRuntime(cpus=layout.total["CPU"], store_bytes=store_bytes(session.model))
    room = await asyncio.to_thread(Room.reserve, layout, runtime, config.learner.start_timeout_s)
    exits.push_async_callback(asyncio.to_thread, room.close)
    return room


async def _in_room(room: Room, ranks: asyncio.Future[RayLearnerGroup]) -> Callable[[EngineSpec], Launcher]:
    """Return what starts engines beside the learner's ranks."""
    group = await asyncio.shield(ranks)
    seats = await asyncio.to_thread(group.seats)
    return lambda spec: RayLauncher(spec, room, seats)


def _start_ranks(session: Session, room: Room | None) -> RayLearnerGroup:
    config = session.config
    return start_learners(
        session.model,
        config.learner,
        config.algo,
        seed=config.run.seed,
        run_dir=session.folder,
        reference=resolve_reference(config),
        room=room,
    )


async def _load(session: Session, ranks: asyncio.Future[RayLearnerGroup]) -> RayLearnerGroup:
    """Have the ranks load what they begin with."""
    learner = await asyncio.shield(ranks)
    await asyncio.to_thread(learner.ready)
    if session.checkpoint is not None:
        await asyncio.to_thread(learner.load, session.checkpoint)
    return learner


async def _wait_for_end(loading: asyncio.Future[RayLearnerGroup]) -> None:
    await asyncio.gather(loading, return_exceptions=True)


async def _close_ranks(ranks: asyncio.Future[RayLearnerGroup]) -> None:
    try:
        learner = await ranks
    except Exception:
        return
    await asyncio.to_thread(learner.close)


def _farewell(session: Session, trainer: Trainer, curve: Path | None) -> None:
    folder = session.folder
    lines = {
        "checkpoint": folder / "checkpoints" / f"step_{trainer.step:06d}",
        "metrics": folder / "metrics.jsonl",
        "rollouts": folder / "rollouts",
        "curve": curve,
    }
    session.console.print(
        "\n".join(f"{name:<11} {path}" for name, path in lines.items() if path and path.exists()),
        highlight=False,
        soft_wrap=True,
    )
    if trainer.evaluation:
        shown = {key: round(value, 4) for key, value in trainer.evaluation.items() if _worth_a_look(key)}
        session.console.print(json.dumps(shown), highlight=False, markup=False, soft_wrap=True)


def _worth_a_look(key: str) -> bool:
    """Return whether to show an evaluation's figure once more at the end; ``metrics.jsonl`` has them all."""
    figure, _, rest = key.rpartition("/")
    return rest != "ci95" and ("=" not in rest or figure.endswith(CURVE))
