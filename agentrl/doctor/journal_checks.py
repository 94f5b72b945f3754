"""What a run's journal says: groups that were lost, trained twice or do not end."""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

from agentrl.doctor.findings import Finding, age
from agentrl.doctor.record import RunRecord

LATE = 5
"""A group hangs if it takes as many times as long as the others did, and longer than `obs.stall_warning_s`."""
RECENT = 100
"""Finished groups that it is compared with."""


def journal_findings(run: RunRecord) -> Iterator[Finding]:
    """Yield what is wrong with the groups of a run."""
    if run.journal is None:
        return
    if faults := run.journal.faults():
        advice = (
            "the run's results are not those of its configuration: start it again",
            "docs/checkpoints.md, Journal",
        )
        yield Finding("problem", "not every group was trained once", tuple(faults), advice)
    yield from _late(run)


def _late(run: RunRecord) -> Iterator[Finding]:
    """Yield the groups of a living run that take far longer than others."""
    assert run.journal is not None, "the caller has checked it"
    groups = [group for group in run.journal.waiting if not group.finished]
    took = [group.finished_at - group.admitted for group in run.journal.groups.values() if group.finished][-RECENT:]
    limit = max(run.config.obs.stall_warning_s, LATE * median(took) if took else 0.0)
    late = [group for group in groups if run.diagnosed_at - group.admitted > limit]
    if not run.runs or not late:
        return
    first = late[0]
    evidence = [
        f"group {first.position}, admitted {age(run.diagnosed_at - first.admitted)} ago with policy version {first.version}, "
        "has not ended",
        f"{len(groups)} groups run, {len(late)} of them for more than {age(limit)}",
    ]
    if took:
        evidence.append(f"the last {len(took)} groups took {age(median(took))} (median), at most {age(max(took))}")
    advice = (
        "the waits of the process, if it hangs, name the episode and the turn",
        "rollout.max_seconds and rollout.max_turns end long episodes",
    )
    yield Finding("problem", "a group of episodes does not end", tuple(evidence), advice)
