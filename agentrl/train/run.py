"""A training run: starts its services, trains, and ends them."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from agentrl.cluster.run_cluster import RunCluster
from agentrl.config.load import dump
from agentrl.config.schema import Config
from agentrl.core.errors import AgentrlError, RunStopped
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.models.reference_policy import pin_reference
from agentrl.models.resolve import resolve_model
from agentrl.obs.console import print_message
from agentrl.obs.progress import ProgressView
from agentrl.obs.waiting import PHASE, waiting
from agentrl.obs.watchdog import Watchdog
from agentrl.runtime.interrupt import Interrupt
from agentrl.runtime.run_dir import choose_folder
from agentrl.train.rollout_sources import open_replay, open_sampling
from agentrl.train.run_outputs import draw_curve, open_metrics, print_summary
from agentrl.train.sampling import RolloutSource
from agentrl.train.trainer import Trainer
from agentrl.train.warm_start import warmed_model


@dataclass(slots=True)
class TrainingRun:
    """The inputs of a run, known before its services are started."""

    config: Config
    folder: Path
    console: Console
    resume: bool
    checkpoint: Path | None
    """The checkpoint from which the run resumes; None starts at step 0."""
    model: Path
    """The folder of the initial weights."""
    replay: Path | None
    """Recorded rollouts to train on in place of sampling."""
    state: dict[str, Any]
    """The trainer's state in the checkpoint; see `Trainer.state`."""

    async def train(self, interrupt: Interrupt) -> Trainer:
        """Start the services, train to the end, end the services, and return the finished trainer."""
        config, folder, step = self.config, self.folder, int(self.state["step"])
        async with AsyncExitStack() as exits:
            view = exits.enter_context(ProgressView(self.console, config.train.steps, config.obs.progress))
            view.phase("starting")
            exits.enter_context(Watchdog(config.obs.stall_warning_s, view.print_text, folder / "logs" / "watchdog.log"))
            with waiting(PHASE, "start"):
                source, learner = await self._open(interrupt, exits)
            view.total = source.steps
            metrics = open_metrics(config, folder, view.note, resume_after=step if self.checkpoint else None)
            trainer = Trainer(
                config=config,
                source=source,
                learner=learner,
                checkpoints=Checkpoints(folder / "checkpoints", keep=config.train.keep, began_with=self.checkpoint),
                metrics=exits.enter_context(metrics),
                view=view,
                step=step,
                position=self.state["position"],
                spent_s=self.state["spent_s"],
                evaluated=self.state["evaluated"],
                saved=step if self.checkpoint else -1,
            )
            await trainer.run()
            return trainer

    async def _open(self, interrupt: Interrupt, exits: AsyncExitStack) -> tuple[RolloutSource, LearnerGroup]:
        """Start rollout source and learner: concurrently, or one after the other if they share GPUs."""
        config, folder, model = self.config, self.folder, self.model
        cluster = RunCluster(config, folder, model, self.checkpoint, with_engines=self.replay is None)
        exits.push_async_callback(cluster.aclose)
        await cluster.open()
        if self.replay is not None:
            return open_replay(config, self.replay, model, interrupt), await cluster.learner()
        source = await open_sampling(
            config,
            folder,
            model,
            exits,
            interrupt,
            launcher=await cluster.engine_launcher(),
            resume_after=self.state["step"] if self.resume else None,
        )
        return source, await cluster.learner()


def resume_command(words: Sequence[str], folder: Path) -> str:
    """Return the command line that resumes the run in ``folder`` which was started with ``words``."""
    kept = [word for word in words if word != "--resume" and not word.startswith("run.dir=")]
    return shlex.join(["agentrl", *kept, f"run.dir={folder}", "--resume"])


async def run_training(
    config: Config, *, resume: bool, console: Console, words: Sequence[str], replay: Path | None = None
) -> None:
    """Train, and print a summary at the end.

    Args:
        config: of the run; checked by `check_run` of the preflight, or for a replay by `check_replay`.
        resume: continue from the newest complete checkpoint of the run's folder.
        console: shows the progress.
        words: of the command line, for the one that resumes the run.
        replay: a file of rollouts or a run's folder to train on in place of sampling.

    Raises:
        RunStopped: a signal or the failure policy ended the run; the last finished step is saved.
        AgentrlError: the run failed; the last finished step is saved if the learner still can.

    """
    folder = choose_folder(config, resume=resume)
    folder.mkdir(parents=True, exist_ok=True)
    checkpoint = latest_checkpoint(folder / "checkpoints") if resume else None
    resumed = f", going on from {checkpoint.name}" if checkpoint else ""
    print_message(console, f"run {folder}{resumed}")
    if resume and checkpoint is None:
        print_message(console, "no whole checkpoint there yet: starting at step 0")
    state = read_state(checkpoint) if checkpoint else {"step": 0, "position": 0, "spent_s": 0.0, "evaluated": -1}
    interrupt = Interrupt(ProgressView(console, 0, "plain").print_text)
    try:
        with interrupt:
            warm = None if checkpoint or replay else await warmed_model(config, folder, interrupt, console)
            config = pin_reference(config, folder if checkpoint else None, warm)
            (folder / "config.yaml").write_text(dump(config), encoding="utf-8")
            model = checkpoint / "model" if checkpoint else warm or resolve_model(config.model.path)
            run = TrainingRun(config, folder, console, resume, checkpoint, model, replay, state)
            trainer = await run.train(interrupt)
    except AgentrlError as error:
        if not isinstance(error, RunStopped) and not interrupt.requested.is_set():
            raise
        raise RunStopped(
            f"{error}. The run is in {folder}; resume it with:\n  {resume_command(words, folder)}"
        ) from None
    finally:
        curve = draw_curve(config, folder, console)
    print_summary(console, folder, trainer.step, trainer.evaluation, curve)
