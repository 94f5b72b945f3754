"""Supervised fine-tuning on the demonstrations of scripted experts."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.batch.lr_schedule import lr_scale
from agentrl.cluster.learner_group import start_learners
from agentrl.config.layers import save_config
from agentrl.config.model import RenderConfig
from agentrl.config.schema import Config
from agentrl.core.errors import RunStopped
from agentrl.learner.base import LearnerGroup
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.export import export_model
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.run_end import recorded_end
from agentrl.obs.trackers import open_tensorboard
from agentrl.render.registry import load_renderer
from agentrl.render.renderer import ChatRenderer
from agentrl.runtime.interrupt import handled_signals, leave_terminals, terminals
from agentrl.runtime.run_dir import run_folder
from agentrl.sft.batches import batches
from agentrl.sft.demonstrations import Demonstrations
from agentrl.sft.preflight import prepare_sft

SHOWN_EVERY = 50
"""Steps between lines on the console; ``metrics.jsonl`` has all steps."""


def sft(config: Config, *, note: Callable[[str], None]) -> Path:
    """Fine-tune ``model.path`` on demonstrations and return the folder of the finished policy; ``note`` prints progress.

    Raises:
        RunStopped: a signal; the policy so far is written first.
        UserError: the configuration is not valid.
        LearnerError: a learner rank failed.
    """
    resolved, model, lines = prepare_sft(config)
    data = Demonstrations(config, RendererOf(model, config.render, config.model.trust_remote_code))
    with run_folder(config) as folder, recorded_end(folder):
        save_config(config, folder)
        for line in lines:
            note(line)
        return _run(resolved, model, data, folder, note)


def _run(config: Config, model: Path, data: Demonstrations, folder: Path, note: Callable[[str], None]) -> Path:
    out = config.sft.out or folder / "model"
    note(f"run {folder}: {config.sft.steps} steps of {config.sft.batch_size} demonstrations")
    learner = _start_learner(config, model, folder)
    try:
        boards = open_tensorboard(folder, config.obs.tensorboard, note)
        with MetricsLog(folder, trackers=boards) as metrics:
            step, interrupted = _train(config, learner, data, metrics, note)
        learner.save(folder / "checkpoint")
        learner.finish_save()
    finally:
        learner.close()
        data.close()
    export_model(folder / "checkpoint" / "model", out, config.sft.dtype)
    note(f"policy {out}")
    if interrupted:
        raise RunStopped(f"interrupted after {step} of {config.sft.steps} steps; the policy so far is in {out}")
    return out


def _start_learner(config: Config, model: Path, folder: Path) -> LearnerGroup:
    """Return a learner in this process for one rank, else one of Ray actors."""
    if config.learner.ranks == 1:
        return LocalLearnerGroup(model, config.learner, config.algo, seed=config.run.seed)
    return start_learners(model, config.learner, config.algo, seed=config.run.seed, run_dir=folder)


def _train(
    config: Config, learner: LearnerGroup, data: Demonstrations, metrics: MetricsLog, note: Callable[[str], None]
) -> tuple[int, bool]:
    """Run the steps; return their number, and whether a signal ended them."""
    step, start = 0, time.perf_counter()
    with _interrupts() as interrupted:
        for batch in batches(config, data):
            begin = time.perf_counter()
            progress = max(step / config.sft.steps, (begin - start) / 60 / (config.sft.minutes or float("inf")))
            if progress >= 1 or interrupted.is_set():
                break
            scale = lr_scale(config.learner.optimizer, progress, config.sft.steps, "linear")
            step_metrics = {**batch.metrics, **learner.train_step(replace(batch, lr_scale=scale))}
            step += 1
            spent = time.perf_counter() - start
            step_metrics |= {"time/step_s": time.perf_counter() - begin, "time/spent_s": spent}
            metrics.write(step, step_metrics)
            if step % SHOWN_EVERY == 0 or step == config.sft.steps:
                note(_line(config.sft.steps, step, spent, step_metrics))
    return step, interrupted.is_set()


@contextmanager
def _interrupts() -> Iterator[threading.Event]:
    """Turn `handled_signals` into an event, so that the running step ends; a second Ctrl-C raises."""
    event, terminal_files = threading.Event(), terminals()
    previous_handlers = {number: signal.getsignal(number) for number in handled_signals()}

    def request(number: int, frame: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous_handlers[signal.SIGINT])
        if number == signal.SIGHUP:
            leave_terminals(terminal_files)

    for number in previous_handlers:
        signal.signal(number, request)
    try:
        yield event
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def _line(steps: int, step: int, spent: float, step_metrics: dict[str, float]) -> str:
    return (
        f"step {step}/{steps}  loss {step_metrics['train/loss']:.4f}  "
        f"expert's reward {step_metrics['sft/reward']:.3f}  "
        f"tokens/s {step_metrics['batch/tokens'] / step_metrics['time/step_s']:,.0f}  {spent:.0f} s"
    )


@dataclass(frozen=True, slots=True)
class RendererOf:
    """Builds the renderer of a model folder in the calling process."""

    folder: Path
    config: RenderConfig
    trust_remote_code: bool = False

    def __call__(self) -> ChatRenderer:
        """Return a new renderer."""
        return load_renderer(self.folder, self.config, trust_remote_code=self.trust_remote_code)
