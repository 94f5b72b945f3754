"""The diagnosis of a run."""

from __future__ import annotations

from pathlib import Path

from agentrl.doctor.learning_checks import learning_findings
from agentrl.doctor.process_checks import journal_findings, process_findings
from agentrl.doctor.record import Finding, RunRecord, read_record

_ORDER = ("state", "problem", "hint")


def diagnose(folder: Path) -> list[Finding]:
    """Return what is the case with the run in a folder, its state first. Nothing is written.

    Raises:
        ConfigError: it is no run, or one of its files is damaged.
    """
    return run_findings(read_record(folder))


def run_findings(run: RunRecord) -> list[Finding]:
    """Return the findings about what a run has left: that about its process first, then problems, then hints."""
    first, *process_problems = process_findings(run)
    findings = [*process_problems, *journal_findings(run), *learning_findings(run)]
    return [first, *sorted(findings, key=lambda finding: _ORDER.index(finding.severity))]
