"""What must be true of a training run after its end, however often its processes were killed."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.data.jobs import INFRASTRUCTURE
from agentrl.obs.journal import read_journal
from agentrl.obs.rollouts import read_rollouts, rollout_files


@dataclass(slots=True)
class Audit:
    """The faults of a run."""

    lost: list[str] = field(default_factory=list)
    """Groups that no step trained."""
    duplicated: list[str] = field(default_factory=list)
    """Groups that two steps trained, or with the wrong number of samples."""
    faults: list[str] = field(default_factory=list)
    """Other faults, in words."""


def audit(folder: Path, steps: int, batch: int, samples: int) -> Audit:
    """Audit a finished run of ``steps`` steps of ``batch`` groups with ``samples`` episodes each."""
    audit_result = Audit()
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    numbers = [int(row["step"]) for row in rows if "train/reward" in row]
    if numbers != list(range(1, steps + 1)):
        audit_result.faults.append(f"metrics.jsonl has the training steps {numbers}")
    evaluated = Counter(int(row["step"]) for row in rows if "eval/reward" in row)
    if evaluated.get(steps) != 1:
        audit_result.faults.append(f"the last evaluation is there {evaluated.get(steps, 0)} times")
    _check_state(folder, steps, batch, audit_result)
    _check_groups(folder, steps, batch, samples, audit_result)
    journal = read_journal(folder)
    assert journal is not None, "a run has a journal"
    audit_result.faults += [f"journal: {fault}" for fault in journal.faults()]
    if journal.waiting:
        audit_result.faults.append(f"journal: {len(journal.waiting)} groups wait after the end")
    return audit_result


def _check_state(folder: Path, steps: int, batch: int, audit: Audit) -> None:
    state = json.loads((folder / "checkpoints" / f"step_{steps:06d}" / "state.json").read_text())
    counters = {name: state[name] for name in ("step", "position", "trained_ahead", "evaluated")}
    expected = {"step": steps, "position": steps * batch, "trained_ahead": [], "evaluated": steps}
    if counters != expected:
        audit.faults.append(f"the last checkpoint has {counters} instead of {expected}")


def _check_groups(folder: Path, steps: int, batch: int, samples: int, audit: Audit) -> None:
    trained: Counter[str] = Counter()
    tasks: dict[str, set[str]] = {}
    for path in rollout_files(folder).values():
        for rollout in read_rollouts(path):
            group = rollout.rollout_id.rpartition("/")[0]
            trained[rollout.rollout_id] += 1
            tasks.setdefault(group, set()).add(rollout.prompt_id)
            if rollout.failure is not None and rollout.failure.kind in INFRASTRUCTURE and not rollout.dropped:
                audit.faults.append(f"{rollout.rollout_id} failed by {rollout.failure} and was trained")
    for step in range(1, steps + 1):
        for offset in range(batch):
            group = f"{step}/{offset}"
            counts = [trained.pop(f"{group}/{sample}", 0) for sample in range(samples)]
            if not any(counts):
                audit.lost.append(group)
            elif counts != [1] * samples:
                audit.duplicated.append(f"{group}: {counts}")
    audit.faults += [f"{name} belongs to no step" for name in trained]
    owners = Counter(task for group in tasks.values() for task in group)
    audit.faults += [f"task {task} was trained {count} times" for task, count in owners.items() if count > 1]
