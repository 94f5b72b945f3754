"""Forks: a new run that begins with a checkpoint of another one, with its own folder, journal and trackers.

::

    FORK/
      checkpoints/step_000040/   files of the other run's, as hard links where the file system has them
      metrics.jsonl              rows of the other run up to the step
      warm_start/, snapshots/    what a run with LoRA or self-play needs of the other's folder
      fork.json                  {"run": "/path/of/the/other", "step": 40}
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.config.layers import CONFIG, save_config
from agentrl.config.recorded import LOADED, changed_keys, changed_tasks
from agentrl.config.schema import Config
from agentrl.core.atomic_files import partial_path, publish, write_atomically
from agentrl.core.errors import ConfigError
from agentrl.learner.checkpoints import STATE, checkpoint_step, complete_checkpoints, load_state, write_state
from agentrl.obs.metrics import copy_metrics
from agentrl.self_play.league import FILE as LEAGUE
from agentrl.self_play.snapshots import SNAPSHOTS, snapshots_in_state
from agentrl.train.warm_start import FOLDER as WARM_START

ORIGIN = "fork.json"
"""File in the run's folder that names the run and the step that it began with."""
LATEST = "latest"
WEIGHTS = ("model.path", "model.warm_start", "model.warm_start_options", "learner.lora", *LOADED)
"""Keys of the weights and their moments, which are those of the checkpoint."""
ORDER = ("run.seed", "env.name", "tasks", "data", "sources")
"""Keys that decide the order of the tasks: with another value it begins again."""


@dataclass(frozen=True, slots=True)
class Fork:
    """A checkpoint with which a new run begins."""

    run: Path
    """Folder of the other run."""
    checkpoint: Path
    """Folder of the checkpoint."""
    new_order: bool
    """Whether the order of the tasks begins again, with random states of the run's own seed."""

    @classmethod
    def check(
        cls, run: Path, step: int, recorded: Mapping[str, str], keys: Mapping[str, str], steps: int | None
    ) -> Fork:
        """Return the fork of a run, once it is checked that the keys of the new one allow it.

        Args:
            run: folder of the other run.
            step: of its checkpoint.
            recorded: keys of the other run; see `agentrl.config.recorded`.
            keys: of the new run.
            steps: ``train.steps`` of the new run; None with ``train.epochs``.

        Raises:
            ConfigError: the weights of the checkpoint cannot be used, or there is no step to train.
        """
        if changes := changed_keys(recorded, keys, WEIGHTS):
            change = changes[0]
            raise ConfigError(
                f"{change.key}={change.after}: the run in {run} has {change.before}, and a fork begins with its weights; leave "
                f"out {change.key}, or start another run with model.path={_checkpoint(run, step) / 'model'}"
            )
        if steps is not None and step >= steps:
            raise ConfigError(
                f"train.steps={steps}: the checkpoint has {step} steps already, and a fork counts on from it; set train.steps"
            )
        return cls(run, _checkpoint(run, step), bool(changed_keys(recorded, keys, ORDER)))

    def with_contents(self, contents: Mapping[str, str]) -> Fork:
        """Return the fork of a run with these checksums of its tasks: with other tasks the order begins again.

        Raises:
            CheckpointError: the state of the checkpoint is damaged.
        """
        recorded = load_state(self.checkpoint)["keys"]
        assert isinstance(recorded, dict), "see Trainer.state"
        return replace(self, new_order=self.new_order or bool(changed_tasks(recorded, contents)))

    @property
    def step(self) -> int:
        """Finished steps."""
        return checkpoint_step(self.checkpoint)

    def __str__(self) -> str:
        """Return one line for the user."""
        order = "; the order of the tasks begins again" if self.new_order else ""
        return f"fork of {self.run} after step {self.step}: weights, optimizer, random states{order}"

    def write(self, folder: Path, config: Config, keys: Mapping[str, str]) -> None:
        """Make the folder of the new run: what it is when it has been resumed from the checkpoint.

        Raises:
            CheckpointError, ConfigError: the other run's state or metrics are damaged.
            OSError: it cannot be written.
        """
        save_config(config, folder)
        with write_atomically(folder / ORIGIN) as partial:
            partial.write_text(json.dumps({"run": str(self.run.resolve()), "step": self.step}) + "\n", encoding="utf-8")
        copy_metrics(self.run / "metrics.jsonl", folder / "metrics.jsonl", until=self.step)
        state = self._state(keys)
        if (league := self.run / LEAGUE).is_file():
            shutil.copy(league, folder / LEAGUE)  # rows after the step are removed as the run begins
        for path in (Path(WARM_START), *(Path(SNAPSHOTS, name) for name in snapshots_in_state(state))):
            if (self.run / path).is_dir():
                shutil.copytree(self.run / path, folder / path, copy_function=_link, dirs_exist_ok=True)
        target = folder / "checkpoints" / self.checkpoint.name
        partial_folder = partial_path(target)
        shutil.copytree(
            self.checkpoint,
            partial_folder,
            copy_function=_link,
            ignore=shutil.ignore_patterns(STATE),
            dirs_exist_ok=True,
        )
        write_state(partial_folder, state)
        publish(partial_folder, target)

    def _state(self, keys: Mapping[str, str]) -> dict[str, object]:
        """Return the checkpoint's state as that of the new run."""
        state = load_state(self.checkpoint) | {"keys": dict(keys), "spent_s": 0.0}
        if self.new_order:
            state |= {"position": 0, "trained_ahead": []}
            source = state["source"]
            assert isinstance(source, dict), "see Trainer.state"
            state["source"] = {name: value for name, value in source.items() if name != "data"}
            state["random"] = None
        return state


def find_fork(name: str) -> tuple[Path, int]:
    """Return the folder of the run and the step of ``RUN@STEP`` or ``RUN@latest``.

    Raises:
        ConfigError: it is written otherwise, there is no such run, or it has no checkpoint of the step.
    """
    text, at, step_text = name.rpartition("@")
    if not at or not text or not (step_text == LATEST or step_text.isdecimal()):
        raise ConfigError(f"--fork {name}: write RUN@STEP or RUN@{LATEST}, such as runs/mine@40")
    folder = Path(text).expanduser()
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--fork {name}: {folder} is no run, because it has no {CONFIG}")
    steps = [checkpoint_step(path) for path in complete_checkpoints(folder / "checkpoints")]
    if not steps:
        raise ConfigError(f"--fork {name}: {folder} has no whole checkpoint")
    step = steps[-1] if step_text == LATEST else int(step_text)
    if step not in steps:
        raise ConfigError(
            f"--fork {name}: {folder} has no checkpoint of step {step}; it has those of the steps "
            f"{', '.join(map(str, steps))}. train.keep and train.save_every decide which there are"
        )
    return folder, step


def _checkpoint(run: Path, step: int) -> Path:
    return next(path for path in complete_checkpoints(run / "checkpoints") if checkpoint_step(path) == step)


def _link(source: str, target: str) -> None:
    """Link a file, or copy it to another file system. Files of checkpoints are replaced and never changed."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
