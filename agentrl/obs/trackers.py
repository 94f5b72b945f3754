"""Metric trackers besides ``metrics.jsonl``: what they have in common, TensorBoard, and Weights & Biases.

`agentrl.obs.trackio_tracker` and `agentrl.obs.mlflow_tracker` are the others.
"""

from __future__ import annotations

import netrc
import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

from agentrl.config.obs import ObsConfig
from agentrl.core.atomic_files import write_atomically
from agentrl.core.extras import install_command, is_installed, require
from agentrl.core.types import Rollout

COLUMNS = ("task", "prompt", "response", "label", "reward", "stop reason", "turns", "sampled tokens")
"""Columns of a sample table."""


class Tracker(Protocol):
    """Receives a run's metrics. ``metrics.jsonl`` stays the record: a tracker that fails must not end the run."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics of a step; a step may be logged in several calls, and again after a resume."""
        ...

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Log some of a step's rollouts, as lines of `COLUMNS`; does nothing by default."""
        return

    def close(self) -> None:
        """Flush and close the tracker."""
        ...


class TensorBoard:
    """Event files under ``folder``; steps after ``resume_after`` of the run before a resume are hidden."""

    def __init__(self, folder: Path, note: Callable[[str], None], *, resume_after: int | None = None) -> None:
        require("tensorboard", "obs.tensorboard=true")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_after is None else resume_after + 1
        self._folder = folder
        self._note = note
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=5)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics as scalars."""

        def write(writer: Any) -> None:
            for key, value in metrics.items():
                writer.add_scalar(key, value, step)

        self._send(write)

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Write the table as text."""
        self._send(lambda writer: writer.add_text("samples", markdown(table), step))

    def close(self) -> None:
        """Flush and close the event files."""
        self._send(lambda writer: writer.close())

    def _send(self, write: Callable[[Any], None]) -> None:
        if self._writer is None:
            return
        try:
            write(self._writer)
        except Exception as error:  # any error: a tracker that fails must not end the run
            self._note(
                f"TensorBoard logs nothing more of this run: {self._folder}: {error} (metrics.jsonl has all metrics)"
            )
            self._writer = None


def open_tensorboard(
    folder: Path, setting: bool | Literal["auto"], note: Callable[[str], None], *, resume_after: int | None = None
) -> list[Tracker]:
    """Return the tracker that ``obs.tensorboard`` asks for, if any.

    Args:
        folder: of the run.
        setting: ``auto`` calls ``note`` if TensorBoard is not installed.
        note: prints a message for the user; also if a write fails, the last of this run.
        resume_after: see `TensorBoard`.

    Raises:
        MissingError: it is wanted, but not installed.
    """
    if setting == "auto" and not is_installed("tensorboard"):
        note(f"no TensorBoard files: {install_command('tensorboard')} (metrics.jsonl has all metrics)")
        return []
    return [TensorBoard(folder / "tensorboard", note, resume_after=resume_after)] if setting else []


def sample_table(rollouts: Sequence[Rollout], count: int) -> list[list[Any]]:
    """Return ``count`` rollouts, evenly spaced over the step, as lines of `COLUMNS`."""
    sampled = (
        [rollouts[index * len(rollouts) // count] for index in range(count)] if len(rollouts) > count else rollouts
    )
    return [
        [
            rollout.prompt_id,
            rollout.prompt,
            "".join(turn.action + turn.observation for turn in rollout.turns),
            "" if rollout.label is None else str(rollout.label),
            float(rollout.reward),
            rollout.stop_reason.value,
            len(rollout.turns),
            rollout.sampled_tokens,
        ]
        for rollout in sampled
    ]


def markdown(table: Sequence[Sequence[Any]]) -> str:
    """Return a table of `COLUMNS` as Markdown, with all text escaped."""
    head = f"| {' | '.join(COLUMNS)} |\n|{' --- |' * len(COLUMNS)}\n"
    return head + "".join(f"| {' | '.join(_cell(value) for value in line)} |\n" for line in table)


def _cell(value: Any) -> str:
    text = f"{value:g}" if isinstance(value, float) else str(value)
    escaped = text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").replace("|", "&#124;")
    return escaped.replace("\n", "<br>")


ID_FILE = "tracker_run_id"
"""File in the run's folder with the id under which trackers know the run, for a resume, and a line that names the folder."""
STEP = "step"
"""The x-axis of all metrics. W&B's own step counter only grows, and would reject the steps that a resumed run repeats."""


class Wandb:
    """A run at Weights & Biases, or on disk for ``wandb sync``; opened by `open_wandb`."""

    def __init__(self, run: Any, note: Callable[[str], None]) -> None:
        self._run = run
        self._note = note

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log metrics."""
        self._send({STEP: step, **metrics})

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Log the sample table of a step."""
        import wandb

        lines = [[step, *line] for line in table]
        self._send({STEP: step, "samples": wandb.Table(columns=[STEP, *COLUMNS], data=lines)})

    def close(self) -> None:
        """Finish the W&B run and end its process."""
        import wandb

        if self._run is not None:
            self._run.finish()
        wandb.teardown()

    def _send(self, data: Mapping[str, Any]) -> None:
        if self._run is None:
            return
        try:
            self._run.log(dict(data))
        except Exception as error:  # any error: a tracker that fails must not end the run
            self._note(f"Weights & Biases logs nothing more of this run: {type(error).__name__}: {error}")
            self._run = None


def open_wandb(
    folder: Path, obs: ObsConfig, *, config: Mapping[str, object], note: Callable[[str], None]
) -> Wandb | None:
    """Start a W&B run, or resume the one whose id is in ``folder``.

    Returns None, and calls ``note``, if an online run has no API key or ``WANDB_MODE`` disables W&B.

    Args:
        folder: folder of the run; W&B's files are in ``folder/wandb``.
        obs: with the mode, which the environment variable ``WANDB_MODE`` overrides, project, entity, group and tags.
        config: configuration to log.
        note: prints a message for the user.

    Raises:
        MissingError: the package is not installed.
    """
    require("wandb", f"obs.wandb={obs.wandb}")
    chosen = os.environ.get("WANDB_MODE", obs.wandb)
    if chosen not in ("online", "offline"):
        note(f"Weights & Biases is disabled by WANDB_MODE={chosen}")
        return None
    if chosen == "online" and not has_key():
        note("obs.wandb=online, but there is no API key: the run continues without Weights & Biases. "
             "Set WANDB_API_KEY or run `wandb login`, or set obs.wandb=offline")  # fmt: skip
        return None
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    return Wandb(_start_run(folder, chosen, obs, config, note), note)


def has_key() -> bool:
    """Return whether the environment or the netrc file has an API key for W&B; sends no request."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    path = Path(os.environ.get("NETRC", "~/.netrc")).expanduser()
    try:
        return netrc.netrc(path).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def run_id(folder: Path) -> str:
    """Return the id under which trackers know the run in a folder.

    A copy of a folder gets a new one; a folder that was moved keeps its id.
    """
    status = folder.stat()
    inode, path, file = f"{status.st_dev}:{status.st_ino}", str(folder.resolve()), folder / ID_FILE
    if file.is_file():
        saved_id, _, owner = file.read_text(encoding="utf-8").strip().partition("\n")
        saved_inode, _, saved_path = owner.partition(" ")
        if saved_inode == inode or saved_path == path:
            return saved_id
    new_id = secrets.token_hex(4)
    with write_atomically(file) as partial:
        partial.write_text(f"{new_id}\n{inode} {path}\n", encoding="utf-8")
    return new_id


def _start_run(
    folder: Path, mode: str, obs: ObsConfig, config: Mapping[str, object], note: Callable[[str], None]
) -> Any:
    import wandb

    wandb_id = run_id(folder)
    try:
        run = _init(folder, mode, obs, config, wandb_id)
    except wandb.errors.Error as error:
        note(f"Weights & Biases cannot be reached ({error}): the run is logged offline, for `wandb sync` later")
        mode = "offline"
        run = _init(folder, mode, obs, config, wandb_id)
    run.define_metric("*", step_metric=STEP)
    note(f"Weights & Biases: {run.url if mode == 'online' else folder / 'wandb'}")
    return run


def _init(folder: Path, mode: str, obs: ObsConfig, config: Mapping[str, object], wandb_id: str) -> Any:
    import wandb

    # Its console capture would break the live table.
    settings: dict[str, Any] = {"console": "off", "silent": True, "disable_git": True, "disable_code": True}
    settings["x_disable_meta"] = True  # it has the command line, whose settings may be secrets
    if mode == "offline" and "x_disable_machine_info" in wandb.Settings.model_fields:
        settings["x_disable_machine_info"] = True  # it would request cloud metadata over the network
    return wandb.init(
        project=obs.wandb_project,
        entity=obs.wandb_entity,
        group=obs.wandb_group,
        tags=obs.wandb_tags,
        dir=str(folder),
        id=wandb_id,
        name=folder.resolve().name,
        resume="allow",
        mode="online" if mode == "online" else "offline",
        config=dict(config),
        settings=wandb.Settings(**settings),
    )
