"""``agentrl doctor``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.core.errors import DiagnosisError
from agentrl.obs.console import make_console

if TYPE_CHECKING:
    from agentrl.doctor.record import Finding

STYLES = {"problem": "bold red", "hint": "yellow", "state": "bold green"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN_DIR", help="the folder of a run, alive or dead")


def run(arguments: argparse.Namespace) -> None:
    """Print the findings on a run, with evidence and advice.

    Raises:
        DiagnosisError: there is a problem.
    """
    from agentrl.doctor.diagnose import diagnose

    console = make_console()
    findings = diagnose(arguments.run_dir)
    for finding in findings:
        _print(console, finding)
    problems = sum(finding.severity == "problem" for finding in findings)
    if problems:
        raise DiagnosisError(f"{problems} problem{'s' if problems > 1 else ''} in {arguments.run_dir}")


def _print(console: Console, finding: Finding) -> None:
    console.print(f"{finding.severity}: {finding.title}", style=STYLES[finding.severity], soft_wrap=True)
    for line in finding.evidence:
        console.print(f"    {line}", soft_wrap=True)
    for line in finding.advice:
        console.print(f"    → {line}", soft_wrap=True)
