"""Metric trackers besides ``metrics.jsonl``: TensorBoard, and Weights & Biases (`agentrl.obs.wandb`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

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
        """Log some of a step's rollouts, as lines of `COLUMNS`."""
        ...

    def close(self) -> None:
        """Flush and close the tracker."""
        ...


class TensorBoard:
    """Event files under ``folder``; steps after ``resume_after`` of the run before a resume are hidden."""

    def __init__(self, folder: Path, *, resume_after: int | None = None) -> None:
        require("tensorboard", "obs.tensorboard=true")
        from torch.utils.tensorboard import SummaryWriter

        purge = None if resume_after is None else resume_after + 1
        self._writer: Any = SummaryWriter(str(folder), purge_step=purge, flush_secs=5)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Write metrics as scalars."""
        for key, value in metrics.items():
            self._writer.add_scalar(key, value, step)

    def samples(self, step: int, table: Sequence[Sequence[Any]]) -> None:
        """Write the table as text."""
        self._writer.add_text("samples", markdown(table), step)

    def close(self) -> None:
        """Flush and close the event files."""
        self._writer.close()


def open_tensorboard(
    folder: Path, setting: bool | Literal["auto"], note: Callable[[str], None], *, resume_after: int | None = None
) -> list[Tracker]:
    """Return the tracker that ``obs.tensorboard`` asks for, if any.

    Args:
        folder: of the run.
        setting: ``auto`` calls ``note`` if TensorBoard is not installed.
        note: prints a message for the user.
        resume_after: see `TensorBoard`.

    Raises:
        MissingError: it is wanted, but not installed.
    """
    if setting == "auto" and not is_installed("tensorboard"):
        note(f"no TensorBoard files: {install_command('tensorboard')} (metrics.jsonl has all metrics)")
        return []
    return [TensorBoard(folder / "tensorboard", resume_after=resume_after)] if setting else []


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
