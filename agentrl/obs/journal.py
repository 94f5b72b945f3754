"""The journal of a run: which groups were admitted, finished, taken by a step, trained and dropped.

::

    journal/
      log.jsonl        one record a line: the CRC-32 of its JSON as eight hexadecimal digits, a space, the JSON
      groups/          rollouts of finished groups; see `agentrl.train.pipeline.journal`
      episodes/        states of episodes in progress

A record is written with one system call, so SIGKILL loses none that was written. An incomplete last record, of a machine that
has failed, does not count. A record that a full disk takes only a part of is removed.
"""

from __future__ import annotations

import os
import time
import zlib
from collections import defaultdict
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from agentrl.core.atomic_files import append_to
from agentrl.core.errors import ConfigError
from agentrl.core.reading import reading

JOURNAL = "journal"
"""Folder in the run folder."""
LOG = "log.jsonl"
SHOWN = 8
"""Positions that a message lists."""


@dataclass(slots=True)
class JournaledGroup:
    """A group of episodes, as the journal has it."""

    position: int
    """Position of its task in the order of the run."""
    version: int
    """The engines' policy version at its admission."""
    admitted: float
    """When, in seconds since the epoch."""
    finished_at: float = 0.0
    """When all of its rollouts were on the disk; 0 if they are not."""
    dropped: str = ""
    """Why no step trains it; empty if one may."""
    opponent: str = ""
    """In self-play, who plays against the policy."""
    process: int = 0
    """Number of the process that admitted it, from 0."""
    rollouts: int = 0
    """Number of its rollouts, once it is finished."""
    order: Sequence[int] = ()
    """For each of them the place of its record in the group's file."""
    failed: int = 0
    """Number of those that the failure policy dropped. Such a group that no step took is sampled again by a resumed run."""

    @property
    def finished(self) -> bool:
        """Whether all of its rollouts are on the disk."""
        return self.finished_at > 0


@dataclass(frozen=True, slots=True)
class JournaledBatch:
    """The groups that a step took, and the position in the task order once they are trained."""

    positions: tuple[int, ...]
    """Positions of groups that it trains."""
    first: int
    """All tasks before it are trained or dropped."""
    ahead: tuple[int, ...]
    """Those from ``first`` on that are."""
    dropped: tuple[int, ...] = ()
    """Positions of groups that were dropped since the batch before."""

    @property
    def done(self) -> str:
        """Return the position as text."""
        return f"{self.first}{f' and {len(self.ahead)} ahead' if self.ahead else ''}"


@dataclass(frozen=True, slots=True)
class RecordedGroups:
    """The groups of a journal that a resumed run uses again."""

    batches: Mapping[int, JournaledBatch]
    """Batches of the steps that are trained again, by step."""
    taken: Sequence[JournaledGroup]
    """The groups of these batches."""
    untaken: Sequence[JournaledGroup]
    """Those in no batch: finished ones wait for a step, the others continue."""

    @property
    def processes(self) -> list[int]:
        """Return the numbers of the processes that admitted them."""
        return sorted({group.process for group in (*self.taken, *self.untaken)})

    def __str__(self) -> str:
        """Return one line: how many there are, and what they are used for."""
        steps = f"steps {min(self.batches)} to {max(self.batches)}" if self.batches else ""
        groups_by_use = {
            f"groups of {steps}, trained again": [group for group in self.taken if not group.dropped],
            "groups that wait for a step": [group for group in self.untaken if group.finished and not group.dropped],
            "groups in progress": [group for group in self.untaken if not group.finished],
        }
        texts = []
        for use, groups in groups_by_use.items():
            rollouts = sum(group.rollouts for group in groups)
            texts += (
                [f"{use}: {len(groups)}" + (f" ({rollouts} rollouts with their rewards)" if rollouts else "")]
                if groups
                else []
            )
        return ", ".join(texts) or "no recorded rollouts are used again"


@dataclass(slots=True)
class JournalState:
    """What the records of a journal say.

    A step is trained in the policy's lineage until a run begins again at an earlier checkpoint. Its batch stays, and is trained
    again.
    """

    groups: dict[int, JournaledGroup] = field(default_factory=dict)
    """By position, those admitted last at the end."""
    batches: dict[int, JournaledBatch] = field(default_factory=dict)
    """By step."""
    trained: int = 0
    """The last trained step in the lineage."""
    admitted: dict[int, int] = field(default_factory=dict)
    """By step, how many positions of the task order had begun when it was trained first."""
    begun: int = 0
    """How many positions of the task order have begun."""
    begins: int = 0
    """How often a process began to train."""
    base: JournaledBatch = JournaledBatch((), 0, ())
    """What was trained before the journal began; nothing, unless an older run had none."""
    base_step: int = 0
    keys: list[Mapping[str, str]] = field(default_factory=list)
    """The configuration keys that rollouts are made with, as text, of each process; see `agentrl.config.recorded`."""
    conflicts: list[str] = field(default_factory=list)
    """Records that contradict earlier ones."""

    def add(self, record: Mapping[str, Any]) -> None:
        """Take the next record.

        Raises:
            LookupError, TypeError, ValueError: it is none, or cannot follow the records before it.
        """
        event = record["event"]
        if event == "begin":
            self._begin(record["step"], _batch(record, ()), discards=record["discards"])
            self.keys.append(record["keys"])
        elif event == "admitted":
            position = record["position"]
            self.groups.pop(position, None)
            self.groups[position] = JournaledGroup(
                position,
                record["version"],
                record["time"],
                opponent=record.get("opponent", ""),
                process=len(self.keys) - 1,
            )
            self.begun = max(self.begun, position + 1)
        elif event == "finished":
            group = self.groups[record["position"]]
            group.finished_at, group.rollouts, group.failed = record["time"], record["rollouts"], record["failed"]
            group.order = record["order"]
        elif event == "dropped":
            self.groups[record["position"]].dropped = record["reason"]
        elif event == "taken":
            step, batch = record["step"], _batch(record, tuple(record["positions"]), tuple(record["dropped"]))
            if self.batches.setdefault(step, batch).positions != batch.positions:
                self.conflicts.append(f"step {step} was trained again with other groups than before")
                self.batches[step] = batch
        elif event == "trained":
            if record["step"] != self.trained + 1:
                self.conflicts.append(f"step {record['step']} was trained after step {self.trained}")
            self.trained = record["step"]
            self.admitted.setdefault(self.trained, self.begun)
        else:
            raise ValueError(f"there is no event {event!r}")

    def _begin(self, step: int, done: JournaledBatch, *, discards: bool) -> None:
        if discards:
            self.batches = {number: batch for number, batch in self.batches.items() if number <= step}
            self.admitted = {number: count for number, count in self.admitted.items() if number <= step}
        for group in self.untaken:
            if discards or group.failed:
                del self.groups[group.position]
        if discards:
            self.begun = max([*self.groups, -1]) + 1
        if not self.begins:
            self.base, self.base_step = done, step
        elif step > self.base_step and step in self.batches:
            batch = self.batches[step]
            if (batch.first, batch.ahead) != (done.first, done.ahead):
                self.conflicts.append(
                    f"the checkpoint of step {step} has the position {done.done}, the journal {batch.done}"
                )
        self.begins, self.trained = self.begins + 1, step

    @property
    def last_batch(self) -> int:
        """Return the last step that took a batch."""
        return max(self.batches, default=self.base_step)

    @property
    def untaken(self) -> list[JournaledGroup]:
        """Return the groups that are in no batch, those admitted first at the beginning."""
        taken = {position for batch in self.batches.values() for position in (*batch.positions, *batch.dropped)}
        return [group for group in self.groups.values() if group.position not in taken]

    @property
    def waiting(self) -> list[JournaledGroup]:
        """Return the groups that a later step may train, those admitted first at the beginning."""
        return [group for group in self.untaken if not group.dropped]

    def after(self, step: int, done: Container[int]) -> RecordedGroups:
        """Return the groups that a run uses again which resumes from the checkpoint of ``step`` with the positions ``done``."""
        batches = {number: batch for number, batch in self.batches.items() if number > step}
        untaken = [group for group in self.untaken if group.position not in done and not group.failed]
        positions = {position for batch in batches.values() for position in (*batch.positions, *batch.dropped)}
        taken = [group for position, group in self.groups.items() if position in positions]
        return RecordedGroups(batches, taken, untaken)

    def training_steps(self) -> dict[int, list[int]]:
        """Return by position the steps of the lineage that trained a group, ascending; all should have one."""
        steps: dict[int, list[int]] = defaultdict(list)
        for step in range(self.base_step + 1, self.trained + 1):
            for position in self.batches[step].positions if step in self.batches else ():
                steps[position].append(step)
        return steps

    def faults(self) -> list[str]:
        """Return what shows that a group was lost, or trained more than once; empty if every group is accounted for."""
        return [*self.conflicts, *self._faults()]

    def _faults(self) -> Iterator[str]:
        for step in range(self.base_step + 1, self.trained + 1):
            if step not in self.batches:
                yield f"step {step} was trained, but took no groups"
        trained = self.training_steps()
        for position, steps in trained.items():
            if len(steps) > 1:
                yield f"group {position} was trained {len(steps)} times: in the steps {_format_positions(steps)}"
            if position < self.base.first or position in self.base.ahead:
                yield f"group {position} was trained in step {steps[0]}, and before the journal began"
            group = self.groups.get(position)
            if group is None or not group.finished:
                yield f"group {position} was trained in step {steps[0]}, but not finished"
            elif group.dropped:
                yield f"group {position} was trained in step {steps[0]}, and dropped: {group.dropped}"
        last = self.batches.get(self.trained, self.base)
        done = {*range(self.base.first, last.first), *last.ahead} - {*self.base.ahead}
        dropped = {group.position for group in self.groups.values() if group.dropped}
        if lost := sorted(done - trained.keys() - dropped):
            yield f"{len(lost)} group(s) were lost, neither trained nor dropped: {_format_positions(lost)}"
        if stray := sorted(trained.keys() - done):
            yield f"{len(stray)} group(s) were trained, and are to be trained again: {_format_positions(stray)}"


def _batch(record: Mapping[str, Any], positions: tuple[int, ...], dropped: tuple[int, ...] = ()) -> JournaledBatch:
    return JournaledBatch(positions, record["first"], tuple(record["ahead"]), dropped)


def _format_positions(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers[:SHOWN])) + (" …" if len(numbers) > SHOWN else "")


def has_journal(run: Path) -> bool:
    """Return whether a run's folder has a journal."""
    return (run / JOURNAL / LOG).is_file()


def read_journal(run: Path) -> JournalState | None:
    """Return what the journal in a run's folder records, also while the run is alive; None if there is none.

    Raises:
        ConfigError: it is damaged.
    """
    path = run / JOURNAL / LOG
    if not has_journal(run):
        return None
    with reading(path, "journal"):
        data = path.read_bytes()
    state = JournalState()
    for number, line in enumerate(data.split(b"\n")[:-1], 1):
        with reading(f"{path}, line {number}", "record of a journal"):
            try:
                state.add(orjson.loads(without_checksum(line)))
            except (LookupError, TypeError, ValueError) as error:
                raise ConfigError(
                    f"{path}, line {number} is damaged: {error!r}. Move {path.parent} away to resume without it; groups that the "
                    "checkpoint has not trained are sampled again then"
                ) from error
    return state


def with_checksum(data: bytes) -> bytes:
    """Return JSON as a line: its CRC-32 as eight hexadecimal digits, a space, and the JSON."""
    return b"%08x %b\n" % (zlib.crc32(data), data)


def without_checksum(line: bytes) -> bytes:
    """Return the JSON of a line that `with_checksum` wrote, without its end.

    Raises:
        ValueError: it is damaged.
    """
    if line[:9] != b"%08x " % zlib.crc32(line[9:]):
        raise ValueError("the checksum (crc32) is wrong")
    return line[9:]


class JournalLog:
    """Appends records to the journal of a run. An incomplete last record is removed first."""

    def __init__(self, run: Path) -> None:
        """Open the journal in a run's folder, which is created if it is not there."""
        self.folder = run / JOURNAL
        self.folder.mkdir(parents=True, exist_ok=True)
        self._file = os.open(self.folder / LOG, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        data = (self.folder / LOG).read_bytes()
        os.ftruncate(self._file, data.rfind(b"\n") + 1)

    def write(self, event: str, **fields: Any) -> None:
        """Append a record as a whole or not at all; returns after the system call.

        Raises:
            OSError: such as of a full disk; it names the file.
        """
        record = {"event": event, "time": time.time(), **fields}
        append_to(self._file, self.folder / LOG, with_checksum(orjson.dumps(record)))

    def sync(self) -> None:
        """Wait until all records are on the disk (fsync)."""
        os.fsync(self._file)

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)
