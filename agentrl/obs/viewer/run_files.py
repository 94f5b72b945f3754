"""Rollouts of a run for the viewer: filtered, and sampled evenly if there are too many."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from agentrl.config.yaml_text import parse_yaml
from agentrl.core.errors import UserError
from agentrl.core.extras import require
from agentrl.core.reading import reading
from agentrl.core.types import Rollout, StopReason
from agentrl.obs.rollouts import SUFFIXES, count_rollouts, read_advantages, read_rollouts, rollout_files, sampled_with

READ_AHEAD = 4
"""Without filters, at most about this multiple of the requested rollouts is read; steps are sampled before."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A rollout with its step and advantage."""

    step: int
    """The training step that sampled it."""
    rollout: Rollout
    """The recorded rollout."""
    advantage: float | None = None
    """Its advantage in training; None if none was recorded."""


@dataclass(frozen=True, slots=True)
class Filters:
    """Filters of rollouts; the default selects all."""

    steps: tuple[int, int] | None = None
    """First and last step, both included."""
    reward_min: float | None = None
    """Only rewards of at least this."""
    reward_max: float | None = None
    """Only rewards of at most this."""
    stop_reason: StopReason | None = None
    """Only episodes with this stop reason."""
    failed: bool = False
    """Only episodes that failed or were dropped."""
    group: str | None = None
    """Only rollouts of this ``prompt_id``."""

    def admits(self, rollout: Rollout) -> bool:
        """Return whether a rollout passes the filters, except for its step. A NaN reward passes no bound."""
        low = self.reward_min is None or rollout.reward >= self.reward_min
        high = self.reward_max is None or rollout.reward <= self.reward_max
        stop = self.stop_reason is None or rollout.stop_reason is self.stop_reason
        failed = not self.failed or rollout.failure is not None or rollout.dropped
        return low and high and stop and failed and (self.group is None or rollout.prompt_id == self.group)

    @property
    def by_content(self) -> bool:
        """Whether any filter depends on the content of a rollout, not only on its step."""
        return self != Filters(steps=self.steps)

    def words(self) -> list[str]:
        """Return the filters as command line options, such as ``--reward-max 0.5``."""
        options = {
            "--reward-min": self.reward_min,
            "--reward-max": self.reward_max,
            "--stop-reason": self.stop_reason and self.stop_reason.value,
            "--group": self.group,
        }
        words = [f"{option} {value}" for option, value in options.items() if value is not None]
        if self.steps:
            first, last = self.steps
            words.insert(0, f"--steps {first}" if first == last else f"--steps {first}:{last}")
        return [*words, "--failed"] if self.failed else words


@dataclass(frozen=True, slots=True)
class RunFiles:
    """The rollout files of a run."""

    folder: Path
    """The run's folder."""
    rollouts: Path
    """Folder of the rollout files."""
    steps: dict[int, Path]
    """File of each step, in order; never empty."""
    config: dict[str, Any] = field(default_factory=dict)
    """``config.yaml``; empty if there is none."""

    def within(self, filters: Filters) -> list[int]:
        """Return the steps that pass the filters.

        Raises:
            UserError: there are none.
        """
        first, last = filters.steps or (min(self.steps), max(self.steps))
        steps = [step for step in self.steps if first <= step <= last]
        if not steps:
            raise UserError(
                f"--steps {first}:{last}: {self.folder} has rollouts of steps {min(self.steps)} to {max(self.steps)}"
            )
        return steps

    def no_rollouts(self, filters: Filters) -> UserError:
        """Return the error of a run without rollouts that pass the filters."""
        words = filters.words()
        return UserError(
            f"no rollout of {self.folder} fits {' '.join(words)}" if words else f"{self.folder} has no rollouts"
        )

    def read(self, step: int, filters: Filters) -> list[Entry]:
        """Return the rollouts of a step that pass the filters, in the order of its file."""
        advantages = read_advantages(self.rollouts, step)
        rollouts = [rollout for rollout in read_rollouts(self.steps[step]) if filters.admits(rollout)]
        return [Entry(step, rollout, advantages.get(rollout.rollout_id)) for rollout in rollouts]

    def count(self, steps: Iterable[int]) -> int:
        """Return the number of rollouts in the files of some steps, without decoding them."""
        return sum(_count(self.steps[step]) for step in steps)


def open_run(folder: Path) -> RunFiles:
    """Return the files of a run's folder; a single rollout file is accepted too, as step 0.

    Raises:
        UserError: the folder does not exist, is not a run, or has no rollouts.
    """
    config = _nearest_config(folder.absolute())
    if folder.is_file() and folder.suffix in SUFFIXES.values():
        return RunFiles(folder, folder.parent, {0: folder}, config)
    if folder.is_file():
        raise UserError(f"{folder}: no file of rollouts, whose name ends in {' or '.join(SUFFIXES.values())}")
    if not folder.is_dir():
        raise UserError(f"{folder}: there is no such folder; give the folder of a run, such as runs/NAME-DATE")
    steps = rollout_files(folder)
    inner = folder / "rollouts"
    if steps:
        return RunFiles(folder, inner if inner.is_dir() else folder, steps, config)
    if not config and not (folder / "metrics.jsonl").exists() and not inner.is_dir():
        raise UserError(f"{folder} is not a run: it has neither config.yaml nor metrics.jsonl nor rollouts/")
    if (config.get("obs") or {}).get("rollouts") == "none":
        raise UserError(f"{folder} has no rollouts: it ran with obs.rollouts=none; set obs.rollouts=all or =first")
    raise UserError(
        f"{folder} has no rollouts yet: {inner} holds no step_….jsonl; they are written with the first step"
    )


def _nearest_config(samples: Path) -> dict[str, Any]:
    """Return the configuration of a run's folder, of that whose ``rollouts/`` it is, or of a rollout file in one."""
    folders = [samples.parent, samples.parent.parent] if samples.is_file() else [samples]
    folders += [samples.parent] if samples.name == "rollouts" else []
    for path in (sampled_with(samples), *(folder / "config.yaml" for folder in folders)):
        if path.is_file():
            with reading(path, "configuration of a run"):
                config = parse_yaml(path.read_text(encoding="utf-8"), str(path))
                return config if isinstance(config, dict) else {}
    return {}


def _count(path: Path) -> int:
    if path.suffix == ".parquet":
        require("pyarrow", str(path))
        from pyarrow.parquet import read_metadata

        with reading(path, "parquet file"):
            return int(read_metadata(path).num_rows)
    return count_rollouts(path)


@dataclass(frozen=True, slots=True)
class Selection:
    """The rollouts to show."""

    groups: frozenset[tuple[int, str]] | None
    """``(step, prompt_id)`` of the groups to show; None shows all that pass the filters."""
    steps: Sequence[int]
    """The steps to read."""
    total: int
    """Rollouts in the run."""
    notes: tuple[str, ...]
    """Messages about omitted rollouts; empty if there are none."""

    def entries(self, run: RunFiles, filters: Filters) -> Iterator[Entry]:
        """Iterate over the selected rollouts, with one step in memory at a time."""
        for step in self.steps:
            for entry in run.read(step, filters):
                if self.groups is None or (step, entry.rollout.prompt_id) in self.groups:
                    yield entry


def select(run: RunFiles, filters: Filters, most: int) -> Selection:
    """Select whole groups, evenly over the steps, with at most ``most`` rollouts; 0 selects all.

    Raises:
        UserError: no rollout passes the filters.
    """
    total = run.count(run.steps)
    steps = run.within(filters)
    matching_rollouts = run.count(steps)
    if not matching_rollouts:
        raise run.no_rollouts(filters)
    notes = [f"Only {', '.join(filters.words())}."] if filters.words() else []
    if not filters.by_content:
        if not most or matching_rollouts <= most:
            return Selection(None, steps, total, tuple(notes))
        steps = _sample_steps(steps, max(1, int(len(steps) * READ_AHEAD * most / matching_rollouts)))
    sizes: dict[tuple[int, str], int] = {}
    for step in steps:
        for entry in run.read(step, filters):
            key = (step, entry.rollout.prompt_id)
            sizes[key] = sizes.get(key, 0) + 1
    matching = sum(sizes.values()) if filters.by_content else matching_rollouts
    if not sizes:
        raise run.no_rollouts(filters)
    if not most or matching <= most:
        return Selection(None, steps, total, tuple(notes))
    groups = evenly(sizes, most)
    shown = sum(sizes[key] for key in groups)
    notes.append(
        f"{shown:,} of {matching:,} rollouts: whole groups, evenly over the steps. "
        f"{matching - shown:,} are left out (--max-rollouts {most}; 0 shows all)."
    )
    return Selection(groups, sorted({step for step, _ in groups}), total, tuple(notes))


def evenly(sizes: dict[tuple[int, str], int], most: int) -> frozenset[tuple[int, str]]:
    """Return evenly spaced groups with at most ``most`` rollouts in total, but at least one group."""
    total = sum(sizes.values())
    chosen: set[tuple[int, str]] = set()
    seen = taken = 0
    for key, size in sizes.items():
        seen += size
        if taken + size <= most * seen / total:
            chosen.add(key)
            taken += size
    return frozenset(chosen or [next(reversed(sizes))])


def _sample_steps(steps: Sequence[int], keep: int) -> list[int]:
    if keep >= len(steps):
        return list(steps)
    return [steps[len(steps) - 1 - (index * len(steps)) // keep] for index in reversed(range(keep))]
