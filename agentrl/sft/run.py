"""Supervised fine-tuning, on chats of a file, on recorded rollouts, or on the demonstrations of scripted experts."""

from __future__ import annotations

import math
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.batch.lr_schedule import lr_scale
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.layers import save_config
from agentrl.config.schema import Config
from agentrl.core.checksums import check_checksums
from agentrl.core.errors import RunStopped
from agentrl.core.types import Provenance
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.models.export import export_model
from agentrl.obs.metrics import MetricsLog
from agentrl.obs.run_end import recorded_end
from agentrl.obs.trackers import open_tensorboard
from agentrl.runtime.interrupt import handled_signals, leave_terminals, terminals
from agentrl.runtime.run_dir import SFT, run_folder
from agentrl.sft.base import EpochData
from agentrl.sft.batches import batches
from agentrl.sft.preflight import SftRun, prepare_sft
from agentrl.sft.resume import CHECKPOINTS, check_resumed, resume_command, sft_keys

SHOWN_EVERY = 50
"""Steps between lines on the console; ``metrics.jsonl`` has all steps."""


def sft(config: Config, *, note: Callable[[str], None], resumed: Path | None = None) -> Path:
    """Fine-tune ``model.path`` and return the folder of the finished policy; ``note`` prints progress.

    Args:
        config: of the run.
        note: prints a line.
        resumed: folder of the run that is continued from its newest checkpoint, or from the start if it has none.

    Raises:
        RunStopped: a signal; the policy so far is written first.
        UserError: the configuration is not valid, or a resumed run would become another one.
        LearnerError: a learner rank failed.
    """
    run = prepare_sft(config)
    with run_folder(config, resumed, name=SFT) as folder, recorded_end(folder):
        keys = sft_keys(config, run.content)
        checkpoint = latest_checkpoint(folder / CHECKPOINTS)
        if checkpoint is not None:
            check_resumed(checkpoint, keys)
            check_checksums(checkpoint)
        save_config(config, folder)
        start = f", resuming from step {read_state(checkpoint)['step']}" if checkpoint else ""
        note(f"run {folder}{start}")
        for line in run.lines:
            note(line)
        return _SftTraining(run, folder, keys, note).run(checkpoint)


@dataclass(slots=True)
class _SftTraining:
    """The steps of a run."""

    data: SftRun
    folder: Path
    keys: Mapping[str, str]
    """What checkpoints are made with."""
    note: Callable[[str], None]
    step: int = 0
    """Finished steps."""
    spent_s: float = 0.0
    """Time of these steps."""
    _saved: int = -1
    """Step of the newest checkpoint."""

    @property
    def steps(self) -> int:
        """All steps of the run."""
        assert self.data.config.sft.steps is not None, "prepare_sft has set it"
        return self.data.config.sft.steps

    def run(self, checkpoint: Path | None) -> Path:
        """Train to the end, from a checkpoint on, write the policy, and return its folder."""
        config, folder = self.data.config, self.folder
        if checkpoint is not None:
            state = read_state(checkpoint)
            self.step, self.spent_s, self._saved = state["step"], state["spent_s"], state["step"]
        step_batches = batches(config, self.data.data, self.step)  # made while the learner starts
        with ExitStack() as exits:
            learner = _start_learner(config, self.data.model, folder)
            try:
                if checkpoint is not None:
                    learner.load(checkpoint)
                checkpoints = Checkpoints(folder / CHECKPOINTS, keep=1, resumed_from=checkpoint)
                resume_after = self.step if checkpoint else None
                requested = exits.enter_context(_interrupts())  # until the policy is written
                boards = open_tensorboard(folder, config.obs.tensorboard, self.note, resume_after=resume_after)
                with MetricsLog(folder, trackers=boards, resume_after=resume_after) as metrics:
                    interrupted = self._train(step_batches, learner, metrics, checkpoints, requested)
                if interrupted:
                    self.note(f"stopping after step {self.step}. Ctrl-C again stops at once, without saving.")
                saved = self._save(learner, checkpoints)
                checkpoints.finish()
            finally:
                learner.close()
                self.data.data.close()
            own = folder / "model"
            out = own if interrupted or config.sft.out is None else config.sft.out
            shutil.rmtree(own, ignore_errors=True)  # of the run before it was resumed
            export_model(saved / "model", out, config.sft.dtype)
        self.note(f"policy {out}")
        if interrupted:
            raise RunStopped(
                f"interrupted after {self.step} of {self.steps} steps; the policy so far is in {out}; resume it with:\n  "
                f"{resume_command(folder)}"
            )
        return out

    def _save(self, learner: LearnerGroup, checkpoints: Checkpoints) -> Path:
        folder = self.folder / CHECKPOINTS / f"step_{self.step:06d}"
        if self.step == self._saved:
            return folder
        self._saved = self.step
        state = {"step": self.step, "spent_s": self.spent_s, "keys": dict(self.keys)}
        return checkpoints.save(self.step, learner, state)

    def _train(
        self,
        step_batches: Iterator[GlobalBatch],
        learner: LearnerGroup,
        metrics: MetricsLog,
        checkpoints: Checkpoints,
        requested: threading.Event,
    ) -> bool:
        """Run the steps; return whether a signal, which sets ``requested``, ended them."""
        config = self.data.config
        sft, start = config.sft, time.perf_counter() - self.spent_s
        for batch in step_batches:
            begin = time.perf_counter()
            progress = max(self.step / self.steps, (begin - start) / 60 / (sft.minutes or math.inf))
            if progress >= 1 or requested.is_set():
                break
            scale = lr_scale(config.learner.optimizer, progress, self.steps, "linear")
            step_metrics = {**batch.metrics, **learner.train_step(replace(batch, lr_scale=scale))}
            self.step += 1
            self.spent_s = time.perf_counter() - start
            step_metrics |= {"time/step_s": time.perf_counter() - begin, "time/spent_s": self.spent_s}
            is_last = self.step == self.steps
            if self.data.evaluation and (is_last or (sft.eval_every and self.step % sft.eval_every == 0)):
                step_metrics |= evaluate(config, self.data.evaluation, learner)
            metrics.write(self.step, step_metrics)
            if self.step % SHOWN_EVERY == 0 or is_last or "eval/loss" in step_metrics:
                self.note(_line(self.steps, self.step, self.spent_s, step_metrics))
            if sft.save_every and self.step % sft.save_every == 0 and not is_last:
                self._save(learner, checkpoints)
        return requested.is_set()


def evaluate(config: Config, data: EpochData, learner: LearnerGroup) -> dict[str, float]:
    """Return mean loss and perplexity of the trained tokens of chats or rollouts."""
    loss, count = 0.0, 0
    for batch in batches(config, data):
        logprobs = learner.logprobs(batch)
        for micro in (micro for micros in batch.micro for micro in micros):
            trained_L = micro.mask_L & (micro.provenance_L != Provenance.OBSERVED)
            for number, key in enumerate(micro.keys):
                trained_T = trained_L[micro.row_L == number].numpy()
                loss -= float(logprobs[key][trained_T].sum(dtype="float64"))
                count += int(trained_T.sum())
    mean = loss / max(1, count)
    return {"eval/loss": mean, "eval/perplexity": math.exp(min(mean, 700.0)), "eval/tokens": float(count)}


def _start_learner(config: Config, model: Path, folder: Path) -> LearnerGroup:
    """Return a learner in this process for one rank, else one of Ray actors."""
    if config.learner.ranks == 1:
        return LocalLearnerGroup(model, config.learner, config.algo, seed=config.run.seed)
    from agentrl.cluster.learner_group import start_learners  # imports Ray

    return start_learners(
        model,
        config.learner,
        config.algo,
        seed=config.run.seed,
        run_dir=folder,
        trust_remote_code=config.model.trust_remote_code,
    )


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


def _line(steps: int, step: int, spent: float, step_metrics: Mapping[str, float]) -> str:
    shown = {
        "expert's reward": "sft/reward",
        "epoch": "sft/epoch",
        "eval loss": "eval/loss",
        "perplexity": "eval/perplexity",
    }
    parts = [f"{name} {step_metrics[key]:.3f}" for name, key in shown.items() if key in step_metrics]
    speed = step_metrics["batch/tokens"] / step_metrics["time/step_s"]
    return "  ".join(
        [
            f"step {step}/{steps}",
            f"loss {step_metrics['train/loss']:.4f}",
            *parts,
            f"tokens/s {speed:,.0f}",
            f"{spent:.0f} s",
        ]
    )
