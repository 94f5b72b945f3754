"""The journal of a training run: rollouts of finished groups on disk, from which a run resumes.

A group counts as finished once its rollouts are on the disk, and a step is trained once its batch is. A run that resumes from the
checkpoint of step ``s`` with a journal up to step ``t`` trains the steps ``s + 1`` to ``t`` with the same rollouts again. Groups
that no step took are resumed: finished ones wait for a step, of others the episodes that have ended are kept.
"""

from __future__ import annotations

import asyncio
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType

from agentrl.config.recorded import GROUPED, TRAINED, changed_keys, check_sampled
from agentrl.core.atomic_files import append, write_atomically
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading
from agentrl.core.types import Rollout
from agentrl.learner.checkpoints import checkpoint_step, complete_checkpoints
from agentrl.obs.journal import (
    JOURNAL,
    JournaledBatch,
    JournaledGroup,
    JournalLog,
    JournalState,
    RecordedGroups,
    read_journal,
)
from agentrl.obs.records import check_record, decode_record, encode_record, split_records
from agentrl.train.pipeline.saved_episodes import SavedEpisodes
from agentrl.train.rollout_source import TaskPosition

GROUPS = "groups"


class Journal:
    """Writes the journal of one process of a run, and reads that of earlier processes. Nothing is changed before `begin`.

    Args:
        run: folder of the run.
        step: of the checkpoint from which the run resumes; 0 without one.
        position: of that checkpoint.
        keep: newest checkpoints that are kept. Rollouts that all of them have trained are removed.
        save_episodes_s: seconds after which an episode in progress is saved; None saves none.
        keys: that rollouts are made with; see `agentrl.config.recorded`. If one that decides which groups begin has changed,
            groups that no step took are sampled again.
        discard: use nothing that was recorded after the checkpoint.

    Raises:
        ConfigError: the journal is damaged, does not have what the checkpoint needs, or was recorded with other ``keys``.
    """

    def __init__(
        self,
        run: Path,
        *,
        step: int = 0,
        position: TaskPosition | None = None,
        keep: int = 1,
        save_episodes_s: float | None = None,
        keys: Mapping[str, str] = MappingProxyType({}),
        discard: bool = False,
    ) -> None:
        self._position = position or TaskPosition()
        state = read_journal(run) or JournalState()
        recorded = RecordedGroups({}, (), ()) if discard else state.after(step, self._position)
        if state.keys and changed_keys(state.keys[-1], keys, GROUPED):
            recorded = replace(recorded, untaken=())
        for process in recorded.processes:
            check_sampled(state.keys[process], keys, f"recorded rollouts ({recorded})")
        changes = [changed_keys(state.keys[process], keys, (*GROUPED, *TRAINED)) for process in recorded.processes]
        changed = ", ".join(dict.fromkeys(str(change) for of_process in changes for change in of_process))
        self.reuse = f"{recorded}{f' ({changed})' if changed else ''}"
        """One line on what is used again, and on keys of training that have changed since."""
        self._run, self._step, self._keep, self._discard, self._keys = run, step, keep, discard, keys
        self._folder = run / JOURNAL / GROUPS
        self._log: JournalLog
        self._batches = dict(recorded.batches)
        self._version = max([step, *self._batches])
        self._check_batches(step)
        self._waiting = {group.position: group for group in recorded.untaken}
        self.first_keys = state.keys[0] if state.keys else keys
        """``keys`` with which the run began."""
        self._finished = {group.position for group in self._waiting.values() if group.finished}
        self._finished.update(*((*batch.positions, *batch.dropped) for batch in self._batches.values()))
        self._reasons = {group.position: group.dropped for group in state.groups.values() if group.dropped}
        self._orders: dict[int, Sequence[int]] = {group.position: group.order for group in state.groups.values()}
        """Places of the records of finished groups in their files, in the order of their episodes."""
        self._admitted, self._begun = state.admitted, state.begun
        batches = {number: batch for number, batch in state.batches.items() if number <= step} | self._batches
        self._stored = {number: (*batch.positions, *batch.dropped) for number, batch in batches.items()}
        self.episodes = SavedEpisodes(run / JOURNAL / "episodes", save_episodes_s, self._version)
        """States of episodes in progress."""
        self._ended: defaultdict[int, dict[str, slice]] = defaultdict(dict)
        """By position and ``rollout_id``, where the file of a group that is not finished has the records of this process."""

    def begin(self) -> Journal:
        """Remove what is not used again, and record that this process begins to train."""
        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = JournalLog(self._run)
        self._log.write(
            "begin",
            step=self._step,
            first=self._position.first,
            ahead=self._position.ahead,
            keys=dict(self._keys),
            discards=self._discard,
        )
        self._remove_obsolete()
        return self

    def _check_batches(self, step: int) -> None:
        """Check that the steps after the checkpoint can be trained again."""
        missing_steps = [number for number in range(step + 1, self._version + 1) if number not in self._batches]
        positions = [position for batch in self._batches.values() for position in (*batch.positions, *batch.dropped)]
        missing_files = [path for path in map(self._file, positions) if not path.exists()]
        if missing_steps or missing_files:
            fault = f"{missing_files[0]} is missing" if missing_files else f"it has no batch of step {missing_steps[0]}"
            raise ConfigError(
                f"{self._folder.parent} does not reach back to the checkpoint of step {step}: {fault}. Resume from a newer "
                "checkpoint, or add --resample: groups that the checkpoint has not trained are sampled again then"
            )

    def check_rollouts(self) -> None:
        """Check that the rollouts that are used again are as they were written.

        Raises:
            ConfigError: a file is damaged.
        """
        try:
            for position in sorted(self._finished | self._waiting.keys()):
                path, is_finished = self._file(position), self.is_finished(position)
                if is_finished or path.exists():
                    count = _check(path, may_be_torn=not is_finished)
                    self._check_count(position, count)
        except ConfigError as error:
            raise ConfigError(
                f"{error}. Add --resample: what the journal has after the checkpoint is discarded, and sampled again"
            ) from error

    def _check_count(self, position: int, count: int) -> None:
        """Check that the file of a group has as many rollouts as it had when the group finished."""
        if self.is_finished(position) and count != (finished_count := len(self._orders[position])):
            raise ConfigError(
                f"{self._file(position)} is damaged: it has {count} rollouts, and {finished_count} when its group finished"
            )

    def batch(self, step: int) -> JournaledBatch | None:
        """Return the batch of a step that is trained again, or None if a step's groups are to be sampled."""
        return self._batches.get(step)

    def reason(self, position: int) -> str:
        """Return why a group was dropped before this process began; empty if it was not."""
        return self._reasons.get(position, "")

    def drawn_positions(self, step: int) -> int:
        """Return how many positions of the task order had begun when ``step``, which is trained again, was trained."""
        return self._admitted.get(step, self._begun)

    @property
    def pending(self) -> list[JournaledGroup]:
        """Return the groups that were in no batch when this process began, those admitted first at the beginning."""
        return list(self._waiting.values())

    def is_finished(self, position: int) -> bool:
        """Return whether all rollouts of a group are on the disk."""
        return position in self._finished

    def read_group(self, position: int) -> list[Rollout]:
        """Return the rollouts of a group that are on the disk; all, in their order, if it is finished.

        Raises:
            ConfigError: its file is damaged.
        """
        path = self._file(position)
        if self.is_finished(position):
            rollouts = _read(path)
            self._check_count(position, len(rollouts))
            return [rollouts[place] for place in self._orders[position]]
        if position not in self._waiting or not path.exists():
            return []
        _remove_torn_record(path)
        return [
            rollout for rollout in _read(path) if newest_version(rollout) <= self._version and not _has_failed(rollout)
        ]

    def record_admitted(self, position: int, version: int, opponent: str = "") -> None:
        """Record that a group begins while the engines have ``version``, in self-play against ``opponent``."""
        if position not in self._waiting and not self.is_finished(position):
            self._file(position).unlink(missing_ok=True)
            self.episodes.remove(position)
            self._log.write("admitted", position=position, version=version, opponent=opponent)

    def record_ended(self, position: int, rollout: Rollout) -> None:
        """Add a rollout of a group that is not finished. It has its reward, and does not change until `record_finished`.

        Its record is kept for files of rollouts.
        """
        rollout.record = record = rollout.record or encode_record(rollout)
        start = append(self._file(position), record)
        self._ended[position][rollout.rollout_id] = slice(start, start + len(record))
        self.episodes.group_states(position).discard(rollout.rollout_id)

    async def record_finished(self, position: int, rollouts: Sequence[Rollout]) -> None:
        """Record that all episodes of a group have ended, once its rollouts are on the disk."""
        if not self.is_finished(position):
            order = await asyncio.to_thread(self._write_group, position, rollouts, self._ended.pop(position, {}))
            self._finished.add(position)
            self._orders[position] = order
            failed = sum(map(_has_failed, rollouts))
            self._log.write("finished", position=position, rollouts=len(rollouts), failed=failed, order=[*order])
            await asyncio.to_thread(self.episodes.remove, position)

    def record_dropped(self, position: int, reason: str) -> None:
        """Record that no step trains a finished group."""
        self._log.write("dropped", position=position, reason=reason)

    async def record_taken(
        self, step: int, positions: Sequence[int], next_position: TaskPosition, dropped: Sequence[int] = ()
    ) -> None:
        """Record the groups that a step trains, and wait until this is on the disk.

        Args:
            step: from 1.
            positions: of the groups.
            next_position: the position once they are trained.
            dropped: positions of groups that were dropped since the step before.
        """
        if step not in self._batches:
            self._log.write(
                "taken",
                step=step,
                positions=positions,
                dropped=dropped,
                first=next_position.first,
                ahead=next_position.ahead,
            )
            await asyncio.to_thread(self._log.sync)
            self._stored[step] = (*positions, *dropped)
        self._finished.difference_update(positions)

    async def record_trained(self, step: int) -> None:
        """Record that a step was trained, and remove what no kept checkpoint needs."""
        self._log.write("trained", step=step)
        self._batches.pop(step, None)
        await asyncio.to_thread(self._prune)

    def close(self) -> None:
        """Close the files."""
        self._log.close()

    def _prune(self) -> None:
        """Remove the rollouts of steps that all kept checkpoints have trained."""
        checkpoints = complete_checkpoints(self._run / "checkpoints")[-self._keep :]
        oldest = checkpoint_step(checkpoints[0]) if checkpoints else 0
        for step in [number for number in self._stored if number <= oldest]:
            for position in self._stored.pop(step):
                self._file(position).unlink(missing_ok=True)

    def _remove_obsolete(self) -> None:
        """Remove rollouts of groups that are neither needed by a step nor waiting."""
        stored = {position for positions in self._stored.values() for position in positions}
        self.episodes.keep(self._waiting.keys() - self._finished)
        group_files = {self._file(position) for position in stored | self._waiting.keys()}
        for path in self._folder.iterdir():
            if path not in group_files:
                path.unlink()

    def _file(self, position: int) -> Path:
        return self._folder / f"{position:08d}.rollouts"

    def _write_group(self, position: int, rollouts: Sequence[Rollout], ended: Mapping[str, slice]) -> Sequence[int]:
        """Have the group's file hold exactly the rollouts, on the disk, and return the places of their records in it.

        Args:
            position: of the group.
            rollouts: in their order.
            ended: where the file has the records of those that have ended in this process.
        """
        spans = [ended.get(rollout.rollout_id) for rollout in rollouts]
        starts = [span.start for span in spans if span is not None]
        sizes = [span.stop - span.start for span in spans if span is not None]
        if starts and len(starts) == len(rollouts) and self._file(position).stat().st_size == sum(sizes):
            with self._file(position).open("rb") as file:
                os.fsync(file.fileno())
            places = {start: place for place, start in enumerate(sorted(starts))}
            return [places[start] for start in starts]
        written = self._file(position).read_bytes() if ended else b""
        records = [
            (rollout.record or encode_record(rollout)) if span is None else written[span]
            for rollout, span in zip(rollouts, spans, strict=True)
        ]
        with write_atomically(self._file(position)) as partial, partial.open("wb") as file:
            file.write(b"".join(records))
        return range(len(rollouts))


def newest_version(rollout: Rollout) -> int:
    """Return the newest policy version that sampled a token of a rollout."""
    return max((int(row.versions.max(initial=-1)) for row in rollout.rows), default=-1)


def _has_failed(rollout: Rollout) -> bool:
    """Return whether the failure policy dropped a rollout; filters come later."""
    return rollout.dropped and rollout.failure is not None


def _check(path: Path, *, may_be_torn: bool) -> int:
    """Check the records of a group's file, and return how many it has."""
    with reading(path, "file of a group's rollouts"):
        records = split_records(path.read_bytes(), may_be_torn=may_be_torn)
    for number, record in enumerate(records, 1):
        with reading(f"{path}, record {number}", "rollout of the journal"):
            check_record(record)
    return len(records)


def _read(path: Path) -> list[Rollout]:
    """Return the rollouts of a group's file.

    Raises:
        ConfigError: a record is damaged or missing.
    """
    with reading(path, "file of a group's rollouts"):
        records = split_records(path.read_bytes())
    rollouts = []
    for number, record in enumerate(records, 1):
        with reading(f"{path}, record {number}", "rollout of the journal"):
            rollouts.append(decode_record(record))
    return rollouts


def _remove_torn_record(path: Path) -> None:
    """Remove an incomplete last record, of a process that was killed as it wrote it."""
    with reading(path, "file of a group's rollouts"), path.open("rb+") as file:
        file.truncate(sum(map(len, split_records(file.read(), may_be_torn=True))))
