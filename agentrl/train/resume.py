"""What a resumed run uses again: a checkpoint and the journal; checked against the keys that they were recorded with."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.config.recorded import CONTENT, changed_tasks, check_fixed, check_sampled
from agentrl.config.self_play import PAST
from agentrl.core.errors import CheckpointError, ConfigError, OtherKeysError
from agentrl.core.reading import reading
from agentrl.learner.checkpoints import STATE, checkpoint_folders, load_state, older_checkpoint
from agentrl.obs.journal import JournalState, read_journal
from agentrl.obs.metrics import read_metrics
from agentrl.self_play.league import check_league
from agentrl.self_play.snapshots import SNAPSHOTS, snapshots_in_state
from agentrl.train.pipeline.journal import Journal
from agentrl.train.rollout_source import TaskPosition


def resume_command(folder: Path, replay: Path | None) -> str:
    """Return the command that resumes a run."""
    words = ["agentrl", "train", "--resume", f"run.dir={folder}", *(["--replay", str(replay)] if replay else [])]
    return shlex.join(words)


def with_older(error: CheckpointError, folder: Path, checkpoint: Path | None, replay: Path | None) -> CheckpointError:
    """Return the error of a damaged ``checkpoint`` with the one before it, if there is one."""
    older = None if checkpoint is None or isinstance(error, OtherKeysError) else older_checkpoint(checkpoint)
    if checkpoint is None or str(checkpoint) not in str(error) or older is None:
        return error
    again = resume_command(folder, replay)
    return CheckpointError(f"{error}. The one before it is {older}: move {checkpoint.name} away, then\n  {again}")


def check_run_keys(folder: Path, keys: Mapping[str, str]) -> None:
    """Check that a resumed run is the run that began in ``folder``: seed, environment, tasks, model and adapters.

    Raises:
        ConfigError: it is another one, or its journal is damaged.
        CheckpointError: the state of its newest checkpoint is damaged.
    """
    progress, journal = _read_progress(folder), read_journal(folder) or JournalState()
    for recorded in ([] if progress is None else [progress.keys]) + journal.keys[-1:]:
        check_fixed(recorded, keys, folder)


def check_resume(folder: Path, keys: Mapping[str, str], *, samples: bool = True, discard: bool = False) -> str:
    """Check what a resumed run uses again, and return one line that describes it.

    Args:
        folder: of the run.
        keys: of the resumed run, with checksums of its tasks and its model.
        samples: whether it samples; a replay uses the checkpoint alone.
        discard: use nothing that the journal has after the checkpoint (``--resample``).

    Raises:
        ConfigError: it is another run, what was recorded was made with other keys, or metrics, league or journal are damaged.
        CheckpointError: the state of the newest checkpoint is damaged.
    """
    check_run_keys(folder, keys)
    read_metrics(folder / "metrics.jsonl")
    check_league(folder)
    progress, text = _read_progress(folder), "starts at step 0"
    if progress is not None:
        count = progress.position.first + len(progress.position.ahead)
        text = f"resumes from step {progress.step}: weights, optimizer, random states, {count} tasks of the task order"
        _check_snapshots(folder, progress, keys)
        contents = {key: value for key, value in keys.items() if key.startswith(CONTENT) and key in progress.keys}
        recorded = {key: progress.keys[key] for key in contents}
        if samples and not discard:
            check_sampled(recorded, contents, f"the steps of {progress.checkpoint}")
        elif changes := changed_tasks(recorded, contents):
            text += (
                f" ({', '.join(map(str, changes))}: the order continues at its position, so that until its epoch ends a task may "
                f"come twice or not at all; agentrl train --fork {folder}@latest begins the order again)"
            )
    if not samples:
        return text
    step, position = (0, TaskPosition()) if progress is None else (progress.step, progress.position)
    journal = Journal(folder, step=step, position=position, keys=keys, discard=discard)
    journal.check_rollouts()
    return f"{text}; journal: {journal.reuse}"


def _check_snapshots(folder: Path, progress: _Progress, keys: Mapping[str, str]) -> None:
    """Check that the snapshots that play are there."""
    missing = [name for name in sorted(progress.snapshots) if not (folder / SNAPSHOTS / name).is_dir()]
    if missing and f"self_play.mix.{PAST}" in keys:
        raise ConfigError(
            f"{folder / SNAPSHOTS / missing[0]} is missing: the pool of {progress.checkpoint} has this opponent. Put the folder "
            f"back, or leave {PAST} out of self_play.mix"
        )


class _Progress(NamedTuple):
    """What a checkpoint records about its run."""

    checkpoint: Path
    step: int
    position: TaskPosition
    keys: dict[str, str]
    snapshots: frozenset[str]
    """Names of those in the pool of self-play."""


def _read_progress(folder: Path) -> _Progress | None:
    """Return what the newest checkpoint of a run records; None without one."""
    folders = checkpoint_folders(folder / "checkpoints")
    if not folders:
        return None
    checkpoint = folders[-1]
    try:
        with reading(checkpoint / STATE, "state of a whole checkpoint", CheckpointError):
            state: dict[str, Any] = load_state(checkpoint)
            position = TaskPosition(state["position"], tuple(state.get("trained_ahead", ())))
            return _Progress(
                checkpoint, int(state["step"]), position, dict(state["keys"]), frozenset(snapshots_in_state(state))
            )
    except CheckpointError as error:
        raise with_older(error, folder, checkpoint, None) from error
