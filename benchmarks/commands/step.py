"""``agentrl bench step``."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table

from agentrl.cli.options import add_config_arguments, resolve_config
from agentrl.core.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.obs.step_times import StepTimes

HELP = "whole training steps of a configuration: seconds and share of each phase, host CPU, idle engines and learner"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--steps", type=int, default=6, help="training steps; the first is not measured")
    parser.add_argument(
        "--scripted",
        type=float,
        metavar="SECONDS",
        help="an engine without a model, whose turns are random tokens and take so long, where that of the configuration does "
        "not run",
    )
    add_config_arguments(parser)


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Train and print."""
    from benchmarks.whole_step import run_steps, scripted_settings

    if arguments.steps < 2:
        raise ConfigError(f"--steps {arguments.steps}: the first step is not measured, so at least 2 are needed")
    with tempfile.TemporaryDirectory(prefix="agentrl-bench-") as name, ExitStack() as exits:
        folder = Path(name)
        settings: dict[str, Any] = {
            "run": {"dir": str(folder / "run")},
            "train": {"steps": arguments.steps},
            "obs": {"progress": "plain", "wandb": "off", "trackio": False, "mlflow": None},
        }
        if arguments.scripted is not None:
            settings |= scripted_settings(exits, folder, resolve_config(arguments), arguments.scripted)
        times: list[StepTimes] = []
        run_steps(resolve_config(arguments, settings), console, times.append)
    if not times:
        raise ConfigError(
            "the run ended with its first step, which is not measured: unset train.minutes and train.stop_at"
        )
    print_times(console, times)


def print_times(console: Console, times: Sequence[StepTimes]) -> None:
    """Print a table of phases, means of all steps, and where CPU and idle time were."""
    count, wall_s = len(times), sum(step.wall_s for step in times)
    seconds = _totals([step.phases() for step in times])
    cpu_s = _totals([step.cpu_s for step in times])
    table = Table("phase", "s a step", "share", "tenths", box=SIMPLE)
    for phase, phase_s in seconds.items():
        share = phase_s / wall_s
        if phase_s or phase.startswith("other"):
            table.add_row(phase, f"{phase_s / count:.3f}", f"{share:.1%}", "#" * round(10 * share))
    table.add_row("whole step", f"{wall_s / count:.3f}", "100%", "")
    console.print(table)
    processes = ", ".join(
        f"{kind} {used_s / count:.2f}" for kind, used_s in sorted(cpu_s.items(), key=lambda item: -item[1])
    )
    lines = [
        f"means of {count} steps, the first left out",
        f"host CPU s a step: {sum(cpu_s.values()) / count:.2f}, of it {processes}",
    ]
    for key, name in (("engine_idle/total", "engines"), ("learner_idle/total", "learner")):
        idle = [step.metrics[key] for step in times if key in step.metrics]
        if idle:
            lines.append(f"{name} busy: {1 - sum(idle) / len(idle):.1%} of the time")
    console.print("\n".join(lines), soft_wrap=True)


def _totals(rows: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {name: sum(row.get(name, 0.0) for row in rows) for name in {name: None for row in rows for name in row}}
