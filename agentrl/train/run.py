"""A training run: starts its services, trains, and ends them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from rich.console import Console

from agentrl.algo.estimate import RunEstimators
from agentrl.batch.sample_conversion import load_convert
from agentrl.config.layers import CONFIG, save_config
from agentrl.config.recorded import recorded_keys
from agentrl.config.schema import Config
from agentrl.config.secret_values import redact
from agentrl.core.atomic_files import DISK_ERRORS
from agentrl.core.callback import Callback, RunHandle
from agentrl.core.checksums import check_checksums
from agentrl.core.errors import AgentrlError, CheckpointError, ConfigError, RunStopped, UserError
from agentrl.evaluation.checkpoint_model import check_model
from agentrl.learner.checkpoints import Checkpoints, begin_random, latest_checkpoint, read_state, saved_score
from agentrl.obs.console import OUTPUT_CLOSED, OutputClosedError, print_message
from agentrl.obs.progress import ProgressView
from agentrl.obs.run_end import recorded_end
from agentrl.obs.trackers import Tracker
from agentrl.obs.waiting import PHASE, START, waiting
from agentrl.planner.training_summary import fit_to_gpu
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.run_dir import has_results, run_folder
from agentrl.train.callbacks import RunCallbacks, load_callbacks
from agentrl.train.evaluations import Evaluations
from agentrl.train.fork import Fork
from agentrl.train.resume import check_resume, resume_command, with_older
from agentrl.train.rollout_source import RunInputs
from agentrl.train.run_outputs import draw_curve, open_metrics, open_monitor, print_summary
from agentrl.train.start import RunParts, open_parts
from agentrl.train.step_scores import StepSettings, pack_options
from agentrl.train.trainer import Trainer
from agentrl.train.training_step import StepTrainer
from agentrl.train.warm_start import initial_policy


@dataclass(frozen=True, slots=True)
class RunStart:
    """How a run begins; by default as a new one."""

    resumed: Path | None = None
    """Folder of the run that is continued, from its newest complete checkpoint."""
    fork: Fork | None = None
    """The checkpoint of another run with which a new one begins."""
    replay: Path | None = None
    """A file of rollouts or a run's folder to train on in place of sampling."""
    contents: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the tasks and the model; see `agentrl.data.task_sources` and `agentrl.models.resolve`."""
    discard: bool = False
    """Sample again what the journal has after the checkpoint."""


@dataclass(frozen=True, slots=True)
class RunExtras:
    """What a caller adds to a run that its configuration does not have."""

    trackers: Sequence[Tracker] = ()
    """Receive the metrics."""
    callbacks: Sequence[Callback] = ()
    """Are called before those of ``train.callbacks``."""
    make_trainer: Callable[..., Trainer] = Trainer
    """Takes the arguments of `Trainer`."""


async def _train(
    run: RunInputs,
    console: Console,
    checkpoint: Path | None,
    replay: Path | None,
    interrupt: Interrupt,
    on_loaded: Callable[[], None],
    extras: RunExtras,
) -> Trainer:
    """Start the services, train to the end, end the services, and return the finished trainer.

    ``on_loaded`` is called once everything is loaded: what was there before is changed only then.
    """
    config, folder = run.config, run.folder
    async with AsyncExitStack() as exits:
        view = exits.enter_context(ProgressView(console, config.train.steps or 0, config.obs.progress, config.sources))
        view.phase("starting")
        traces, monitor = open_monitor(config, folder, view, run.step, exits)
        with waiting(PHASE, START):
            async with interrupt.guard():
                parts = await open_parts(run, checkpoint, replay, interrupt, exits, console)
        on_loaded()
        view.total = parts.source.steps
        if run.step >= view.total:
            view.note(
                f"step {run.step} is trained, and the run ends with step {view.total} (train.steps, train.epochs): nothing is "
                "left to train"
            )
        metrics = exits.enter_context(
            open_metrics(config, folder, view.note, run.resume_after, [*traces, *extras.trackers])
        )
        plan = config.train
        checkpoints = Checkpoints(
            folder / "checkpoints", keep=plan.keep, metric=plan.keep_best, resumed_from=checkpoint
        )
        settings = redact(config.model_dump(mode="json"))
        callbacks = RunCallbacks(
            [*extras.callbacks, *load_callbacks(config.train.callbacks)],
            RunHandle(folder, settings, parts.source.steps, run.step),
        )
        state = run.state
        trainer = extras.make_trainer(
            await _make_step_trainer(run, parts, view, callbacks),
            checkpoints,
            metrics,
            view,
            Evaluations(
                config.eval,
                plan,
                parts.evaluator,
                checkpoints,
                metrics,
                view,
                state["evaluated"],
                None if checkpoint is None else saved_score(checkpoint, plan.keep_best),
                callbacks=callbacks,
            ),
            step=run.step,
            position=run.position,
            spent_s=state["spent_s"],
            saved=run.step if checkpoint else -1,
            keys=run.keys,
            monitor=monitor,
            callbacks=callbacks,
        )
        begin_random(state, config.run.seed)  # starting services has drawn from the generators
        async with callbacks.running(view):
            await trainer.run()
        return trainer


async def _make_step_trainer(
    run: RunInputs, parts: RunParts, view: ProgressView, callbacks: RunCallbacks
) -> StepTrainer:
    source, learner, critic = parts.source, parts.learner, parts.critic
    models = (learner,) if critic is None else (learner, critic)
    packing = await asyncio.to_thread(pack_options, run.config, source.pad_token_id, *models)
    estimators = RunEstimators(run.config.algo.by_source)
    estimators.load_state(run.state["estimators"])
    return StepTrainer(
        StepSettings(run.config, packing, source.epoch_steps),
        source,
        learner,
        estimators,
        view,
        critic=critic,
        teachers=parts.teachers,
        callbacks=callbacks,
        convert=load_convert(run.config.batch.convert),
    )


NEW: Mapping[str, Any] = MappingProxyType(
    {"step": 0, "position": 0, "spent_s": 0.0, "evaluated": -1, "estimators": {}, "source": {}}
)
"""The trainer's state in a new run."""


async def run_training(
    config: Config,
    console: Console,
    start: RunStart = RunStart(),
    extras: RunExtras = RunExtras(),
) -> Path:
    """Train, print a summary at the end, and return the folder of the run.

    Args:
        config: of the run; checked by `check_run` of the preflight, or for a replay by `check_replay`.
        console: shows the progress.
        start: whether it is new or resumed, and what it trains on.
        extras: what the caller adds.

    Raises:
        ConfigError: another process uses the folder, a new run would overwrite an older one, or what was recorded was made
            with other keys.
        RunStopped: a signal or the failure policy ended the run; the last finished step is saved.
        AgentrlError: the run failed; the last finished step is saved if the learner still can.
    """
    resumed, replay = start.resumed, start.replay
    if resumed is not None:  # before anything of the run is changed
        keys = {**recorded_keys(config), **start.contents}
        reuse = check_resume(resumed, keys, samples=replay is None, discard=start.discard)
    interrupt = Interrupt(ProgressView(console, 0, "plain").print_text)
    with interrupt, run_folder(config, resumed) as folder, recorded_end(folder, resumed=resumed is not None) as begin:
        if start.fork is not None:
            await asyncio.to_thread(check_checksums, start.fork.checkpoint)
            await asyncio.to_thread(start.fork.write, folder, config, recorded_keys(config) | dict(start.contents))
            print_message(console, str(start.fork))
        checkpoint = latest_checkpoint(folder / "checkpoints")
        origin = f", resuming from {checkpoint.name}" if checkpoint else ", starting at step 0" if resumed else ""
        print_message(console, f"run {folder}{origin}")
        if resumed is not None:
            print_message(console, reuse)
        try:
            with _named_resume(folder, checkpoint, replay, interrupt, console):
                inputs = await _read_inputs(config, folder, checkpoint, start, console)
                # Other GPUs may resume the run: its folder has the configuration as it was before.
                fitted, lines = await asyncio.to_thread(fit_to_gpu, inputs.config, inputs.shape, critic=True)
                for line in lines:
                    print_message(console, line)

                def on_loaded() -> None:
                    begin()
                    save_config(inputs.config, folder)

                run = replace(inputs, config=fitted)
                trainer = await _train(run, console, checkpoint, replay, interrupt, on_loaded, extras)
        finally:
            curve = draw_curve(config, folder, console)
            if config.sampler.keep_minutes is not None:
                minutes = f"sampler.keep_minutes={config.sampler.keep_minutes:g}"
                print_message(
                    console, f"engines that are whole stay ({minutes}): agentrl engines lists, and --end ends them"
                )
        print_summary(console, folder, trainer.step, trainer.evaluations.results, curve)
    return folder


async def _read_inputs(
    config: Config, folder: Path, checkpoint: Path | None, start: RunStart, console: Console
) -> RunInputs:
    """Return what a run trains with: its checkpoint's state, and its model, which a warm start may have to train first."""
    if checkpoint is not None:
        await asyncio.to_thread(check_checksums, checkpoint)
    state = NEW if checkpoint is None else read_state(checkpoint)
    if not has_results(folder):
        save_config(config, folder)  # a run that is stopped in its warm start is resumed with it
    config, model, warm = initial_policy(config, folder, checkpoint, console)
    if checkpoint is None and warm is None:
        await asyncio.to_thread(check_model, model)
    is_resumed = checkpoint is not None or start.resumed is not None
    keys = {**recorded_keys(config), **start.contents}
    return RunInputs(config, folder, model, state, is_resumed, keys, start.discard, warm)


@contextmanager
def _named_resume(
    folder: Path, checkpoint: Path | None, replay: Path | None, interrupt: Interrupt, console: Console
) -> Iterator[None]:
    """Say with each end of a run that is not its own how to resume it.

    Raises:
        RunStopped: in place of errors, if a signal ended the run or standard output was closed.
        ConfigError: the folder was removed.
    """
    try:
        yield
    except CheckpointError as error:
        raise with_older(error, folder, checkpoint, replay) from error
    except AgentrlError as error:
        again = resume_command(folder, replay)
        if not isinstance(error, RunStopped) and not interrupt.requested.is_set():
            if not isinstance(error, UserError):
                print_message(console, f"the run is in {folder}; resume it with: {again}")
            raise
        raise RunStopped(f"{error}. The run is in {folder}; resume it with:\n  {again}") from None
    except (asyncio.CancelledError, KeyboardInterrupt):  # a second Ctrl-C
        print_message(console, f"the run is in {folder}; resume it with: {resume_command(folder, replay)}")
        raise
    except OSError as error:
        again = resume_command(folder, replay)
        if isinstance(error, OutputClosedError):
            raise RunStopped(f"{OUTPUT_CLOSED}. The run is in {folder}; resume it with:\n  {again}") from error
        if error.errno in DISK_ERRORS:
            print_message(console, f"the run is in {folder}; mend this, then resume it with: {again}")
        elif not (folder / CONFIG).exists():
            raise ConfigError(f"run.dir={folder} was removed while the run wrote to it: {error}") from error
        raise
