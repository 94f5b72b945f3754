"""``agentrl.train``, and ``agentrl.Run``: what a run has left in its folder."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from agentrl.api.evaluating import Evaluation, evaluate
from agentrl.api.event_loop import run_to_end, unchanged_environment
from agentrl.api.loading import Loaded, checked_start, load_fork, load_new, load_resumed, run_rules
from agentrl.api.notebook import notebook_trackers
from agentrl.api.python_settings import PYTHON_SETTINGS, ConfigLike, PythonSettings, new_layers, read_settings
from agentrl.api.run_page import run_page
from agentrl.api.settings import file_layers
from agentrl.config.layers import CONFIG, Layer, merge_layers, saved_layers
from agentrl.config.load import validate
from agentrl.config.schema import Config
from agentrl.core.callback import Callback
from agentrl.core.errors import ConfigError
from agentrl.core.extras import require
from agentrl.core.imports import python_objects
from agentrl.core.types import Rollout
from agentrl.learner.checkpoints import checkpoint_step, complete_checkpoints, saved_score
from agentrl.obs.console import make_console
from agentrl.obs.metrics import read_metrics
from agentrl.obs.rollouts import read_advantages, read_rollouts, rollout_files
from agentrl.obs.run_end import read_end

if TYPE_CHECKING:
    import pandas


def train(
    config: ConfigLike = None,
    *,
    callbacks: Sequence[Callback] = (),
    resume: str | Path | None = None,
    fork: str | None = None,
    **settings: object,
) -> Run:
    """Train a policy, as ``agentrl train`` does, and return its run once it is finished.

    Examples::

        agentrl.train(env="search_r1", train={"steps": 20})
        agentrl.train("my.yaml", **{"learner.optimizer.lr": 1e-6})
        agentrl.train(env=MyEnv, reward=score, model={"path": "Qwen/Qwen3-0.6B"}, callbacks=[StopWhenSolved()])
        agentrl.train(resume="runs/mine", train={"steps": 200})
        agentrl.train(fork="runs/mine@40", run={"seed": 1})

    Args:
        config: the configuration. A file or several are as ``--config``, with the preset of the environment below them. A
            mapping is settings, nested or with dotted keys, as ``key=value``. A `Config` is taken as it is.
        callbacks: are called before those of ``train.callbacks``.
        resume: folder of a run that is continued, with its own configuration; ``config`` and ``settings`` are on top.
        fork: ``RUN@STEP`` or ``RUN@latest``: a new run begins with that checkpoint, and the configuration of that run.
        settings: sections, or dotted keys, on top of ``config``. ``env`` may be a name, a class, or a function that returns a
            new environment; ``reward`` a function; other keys that name code take the object, too.

    Raises:
        UserError: a mistake in the configuration; the message has the value and the key to change.
        RunStopped: Ctrl-C, the interrupt of a notebook's kernel, or the failure policy ended the run, which is saved.
        AgentrlError: the run failed; the last finished step is saved if the learner still can.
    """
    if resume is not None and fork is not None:
        raise ConfigError(f"resume={resume}, fork={fork}: a run is continued, or a new one begins with its checkpoint")
    files, python = read_settings(config, settings)
    console = make_console()
    with unchanged_environment(), python_objects(python.objects):
        from agentrl.train.callbacks import check_objects
        from agentrl.train.run import RunExtras, run_training

        check_objects(callbacks)
        loaded = _load(config, files, python, resume, fork)
        python.check(loaded.config)
        start = checked_start(loaded, console)
        extras = RunExtras(notebook_trackers(loaded.config), callbacks)
        folder = run_to_end(lambda: run_training(loaded.config, console, start, extras), "agentrl.train")
    return Run(folder, python.objects)


def _load(
    config: ConfigLike, files: list[str], python: PythonSettings, resume: str | Path | None, fork: str | None
) -> Loaded:
    settings = Layer(PYTHON_SETTINGS, python.tree)
    rules = run_rules(None)
    if fork is not None:
        return load_fork(fork, [*file_layers(files), settings], rules)
    if resume is None:
        return load_new(new_layers(config, files, python), rules)
    from agentrl.runtime.run_dir import folder_to_resume

    return load_resumed(folder_to_resume(str(resume), None), [*file_layers(files), settings], rules)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A complete checkpoint of a run.

    Example: ``Checkpoint(step=40, path=Path("runs/mine/checkpoints/step_000040"), score=0.71)``.
    """

    step: int
    """Finished training steps."""
    path: Path
    """Its folder; ``path / "model"`` is a Hugging Face folder, of weights too unless ``learner.save_hf`` leaves them out."""
    score: float | None
    """The metric ``train.keep_best`` of its policy, if that was evaluated."""


class Run:
    """A run's folder: what a run has written, or writes while it runs. Files are read on access.

    It is a path: ``open(run / "metrics.jsonl")``. In a notebook it is shown with its curve.

    Args:
        path: folder of the run.
        objects: what `resume` uses again; see `agentrl.core.imports.python_objects`.

    Raises:
        ConfigError: the folder is that of no run.
    """

    def __init__(self, path: str | os.PathLike[str], objects: Mapping[str, object] = MappingProxyType({})) -> None:
        self.path = Path(path).expanduser()
        """Folder of the run."""
        self._objects = objects
        if not (self.path / CONFIG).is_file():
            raise ConfigError(f"{self.path} is no run, because it has no {CONFIG}")

    def __fspath__(self) -> str:
        """Return the folder."""
        return str(self.path)

    def __truediv__(self, name: str) -> Path:
        """Return a path in the folder."""
        return self.path / name

    def __repr__(self) -> str:
        """Return how it is made again."""
        return f"Run({str(self.path)!r})"

    def _repr_html_(self) -> str:
        return run_page(self.path, self.config)

    @property
    def config(self) -> Config:
        """The configuration of the run, with its secrets.

        Raises:
            ConfigError: it cannot be read.
        """
        with python_objects(self._objects):
            return validate(merge_layers(saved_layers(self.path)))

    def rows(self) -> list[dict[str, float]]:
        """Return the rows of ``metrics.jsonl``, one a step and one an evaluation, each with ``step``.

        Raises:
            ConfigError: the file is damaged.
        """
        return read_metrics(self.path / "metrics.jsonl")

    @property
    def metrics(self) -> pandas.DataFrame:
        """The metrics by step (the index), a column for each. Those of an evaluation are in the row of its step. NaN is what a
        step does not have. `rows` has them without pandas.

        Raises:
            MissingError: pandas is not installed.
            ConfigError: the file is damaged.
        """
        require("pandas", "Run.metrics")
        import pandas

        by_step: dict[int, dict[str, float]] = {}
        for row in self.rows():
            by_step.setdefault(int(row["step"]), {}).update(row)
        frame = pandas.DataFrame(list(by_step.values()), index=pandas.Index(by_step, name="step"))
        return frame.drop(columns="step", errors="ignore")

    def rollouts(self, step: int | None = None, *, evaluation: bool = False) -> Iterator[Rollout]:
        """Iterate over the rollouts of a training step, or of all of them in their order; one file is in memory at a time.

        Args:
            step: from 1; None: all steps whose rollouts are recorded (``obs.rollouts``).
            evaluation: those of the evaluation after ``step`` in place of it (``eval.save_rollouts``).

        Raises:
            ConfigError: there are none of the step, or a file is damaged.
        """
        files = rollout_files(self.path, evaluation=evaluation) if (self.path / "rollouts").is_dir() else {}
        if step is not None and step not in files:
            steps = f"those of the steps {', '.join(map(str, files))}" if files else "none"
            raise ConfigError(
                f"{self.path} has no {'evaluation ' if evaluation else ''}rollouts of step {step}; it has {steps}"
            )
        for path in files.values() if step is None else [files[step]]:
            yield from read_rollouts(path)

    def advantages(self, step: int) -> dict[str, float]:
        """Return the advantages with which the rollouts of a step were trained, by ``rollout_id``; empty if none was."""
        return read_advantages(self.path / "rollouts", step)

    @property
    def checkpoints(self) -> list[Checkpoint]:
        """The complete checkpoints, oldest first."""
        folder = self.path / "checkpoints"
        return [Checkpoint(checkpoint_step(path), path, saved_score(path)) for path in complete_checkpoints(folder)]

    @property
    def error(self) -> str | None:
        """What ended the run, such as ``RunStopped: interrupted by SIGINT``; empty if it has finished, None if it has not ended
        or was killed.
        """
        end = read_end(self.path)
        return None if end is None else f"{end.error}: {end.message}" if end.error else ""

    def evaluate(self, step: int | None = None, **settings: object) -> Evaluation:
        """Evaluate the policy of a checkpoint with the configuration of the run; see `evaluate`.

        Args:
            step: of the checkpoint; None: the newest.
            settings: on top of the run's configuration.

        Raises:
            ConfigError: there is no such checkpoint.
        """
        checkpoint = self.path
        if step is not None:
            paths = [path for path in self.checkpoints if path.step == step]
            if not paths:
                steps = ", ".join(str(path.step) for path in self.checkpoints) or "none"
                raise ConfigError(f"{self.path} has no checkpoint of step {step}; it has those of: {steps}")
            checkpoint = paths[0].path
        with python_objects(self._objects):
            return evaluate(checkpoint=checkpoint, **cast("dict[str, Any]", settings))

    def resume(self, *, callbacks: Sequence[Callback] = (), **settings: object) -> Run:
        """Continue the run from its newest checkpoint; see `train`.

        Objects that only Python has, such as a class of a notebook's cell, are those with which this object was made.
        ``Run(path)`` has none: give them again.
        """
        with python_objects(self._objects):
            run = train(settings, resume=self.path, callbacks=callbacks)
        return Run(run.path, {**self._objects, **run._objects})

    def fork(self, step: int | None = None, *, callbacks: Sequence[Callback] = (), **settings: object) -> Run:
        """Begin a new run with a checkpoint of this one; see `train`.

        Args:
            step: of the checkpoint; None: the newest.
            callbacks: of the new run.
            settings: on top of this run's configuration.
        """
        name = f"{self.path}@{'latest' if step is None else step}"
        with python_objects(self._objects):
            run = train(settings, fork=name, callbacks=callbacks)
        return Run(run.path, {**self._objects, **run._objects})
