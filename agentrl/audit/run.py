"""Audit of rollout files, with one rollout in memory at a time."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from agentrl.audit.report import Fault, Report, Violation
from agentrl.audit.rows import graph_faults, row_faults
from agentrl.audit.texts import Texts, sampled_turns
from agentrl.batch.provenance import check_rows
from agentrl.core.errors import ProvenanceError
from agentrl.core.types import Rollout
from agentrl.obs.rollouts import scan_rollouts, trained_rollouts


def audit_files(paths: Iterable[Path], texts: Texts | None = None) -> Report:
    """Check every rollout of some files.

    Args:
        paths: ``….jsonl`` or ``….parquet``.
        texts: has the tokenizer of the model that sampled; without it, texts are not compared and drift is not measured.

    Raises:
        ConfigError: a file cannot be read at all.
    """
    report = Report()
    for path in paths:
        ids: dict[str, str] = {}
        expected = 0
        for line_number, (rollout, damaged, number) in enumerate(scan_rollouts(path), 1):
            location = f"{path}:{line_number}"
            if isinstance(rollout, str):
                report.violations.append(Violation(location, "", Fault(rollout)))
                expected += 1
                continue
            faults = [Fault("it is not as it was written: its checksum is another", row) for row in damaged]
            if number is not None and number != expected:
                words = f"it was written as rollout {number} of the file, and stands in place of rollout {expected}"
                faults.append(Fault(f"{words}: others were removed, added or moved"))
            expected = (expected if number is None else number) + 1
            if rollout.rollout_id in ids:
                faults.append(Fault("the file holds a rollout of this id already"))
            ids[rollout.rollout_id] = rollout.prompt_id
            faults += rollout_faults(rollout, texts)
            report.violations += [Violation(location, rollout.rollout_id, fault) for fault in faults]
            _count(report, rollout, texts, sound=not faults)
        report.violations += [Violation(str(path), "", fault) for fault in _lost(path, ids)]
    return report


def _lost(path: Path, prompts: Mapping[str, str]) -> Iterator[Fault]:
    """Yield trained rollouts that a step's file lacks. With ``obs.rollouts=first`` it has those of one task alone."""
    groups = {name.rpartition("/")[0] for name in prompts}
    has_several_tasks = len(set(prompts.values())) > 1
    trained = trained_rollouts(path)
    lost = sorted(
        name
        for name in trained
        if name not in prompts and (not prompts or has_several_tasks or name.rpartition("/")[0] in groups)
    )
    if lost:
        yield Fault(f"it lacks {len(lost)} of the rollouts that were trained, such as {lost[0]!r}: lines were removed")


def rollout_faults(rollout: Rollout, texts: Texts | None = None) -> list[Fault]:
    """Return the faults of a rollout. Rows are compared with each other if none has a fault."""
    if rollout.endpoint is not None:
        words = f"it has rows, and {rollout.endpoint.model} played at an endpoint, whose tokens are not known"
        return [Fault(words)] if rollout.rows else []
    faults = [fault for row in rollout.rows for fault in row_faults(row)]
    if not faults:
        faults = [*graph_faults(rollout), *_learner_faults(rollout)]
    if not faults and texts is not None:
        faults = list(texts.faults(rollout, sampled_turns(rollout)))
    return faults


def _learner_faults(rollout: Rollout) -> Iterator[Fault]:
    """Yield why the learner would refuse the rows."""
    try:
        check_rows(rollout.rows)
    except ProvenanceError as error:
        yield Fault(f"the learner refuses it: {error}")


def _count(report: Report, rollout: Rollout, texts: Texts | None, *, sound: bool) -> None:
    report.rollouts += 1
    report.endpoints += rollout.endpoint is not None
    report.rows += len(rollout.rows)
    report.tokens += sum(len(row.token_ids) for row in rollout.rows)
    report.trained += sum(int(row.mask.sum()) for row in rollout.rows)
    report.forks.update(row.fork.value for row in rollout.rows if row.fork is not None)
    if sound and rollout.endpoint is None:
        report.sampled += rollout.sampled_tokens
        if texts is not None:
            texts.measure(rollout, sampled_turns(rollout), report)
