"""``agentrl check``."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.core.errors import DiagnosisError, UserError
from agentrl.obs.console import make_console

if TYPE_CHECKING:
    from agentrl.train.function_report import FunctionReport


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("run_dir", type=Path, metavar="RUN", help="a run's folder with rollouts, or a file of rollouts")
    parser.add_argument(
        "settings",
        nargs="*",
        metavar="key=value",
        help="functions to try, such as reward=my_rewards.py:score; by default those of the run's config.yaml",
    )
    parser.add_argument("--step", type=int, help="training step whose rollouts are taken; the last one by default")


def run(arguments: argparse.Namespace) -> None:
    """Try functions of users on recorded rollouts, and print what they return and what breaks their contracts.

    Raises:
        DiagnosisError: something breaks a contract.
    """
    from agentrl.config.load import load_config
    from agentrl.obs.metrics import read_metrics
    from agentrl.obs.rollouts import read_rollouts
    from agentrl.obs.viewer.run_files import open_run
    from agentrl.train.function_check import check_functions
    from agentrl.train.function_report import RecordedStep

    files = open_run(arguments.run_dir)
    step = max(files.steps) if arguments.step is None else arguments.step
    if step not in files.steps:
        raise UserError(f"--step={step}: {files.folder} has rollouts of the steps {', '.join(map(str, files.steps))}")
    config = load_config(None, arguments.settings, base=files.config)
    path = files.folder / "metrics.jsonl"
    metrics = read_metrics(path) if path.is_file() else []
    console = make_console()
    with console.status("reading rollouts"):
        rollouts = read_rollouts(files.steps[step])
    if not rollouts:
        raise UserError(f"{files.steps[step]} has no rollouts")
    of_step = next((row for row in metrics if row.get("step") == step), {})
    reports = asyncio.run(check_functions(config, RecordedStep(files.folder, step, rollouts, of_step)))
    for report in reports:
        _print(console, report)
    faults = sum(len(report.faults) for report in reports)
    if faults:
        raise DiagnosisError(
            f"{faults} fault{'s' if faults > 1 else ''} on the rollouts of step {step} of {files.folder}"
        )


def _print(console: Console, report: FunctionReport) -> None:
    style = "bold red" if report.faults else "bold green"
    console.print(f"{report.key}={report.reference}", style=style, soft_wrap=True, markup=False)
    for line in report.lines:
        console.print(f"    {line}", soft_wrap=True, markup=False)
    for fault in report.faults:
        console.print(f"    fault: {fault}", style="red", soft_wrap=True, markup=False)
