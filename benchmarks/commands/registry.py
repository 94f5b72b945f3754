"""The table of benchmarks."""

from __future__ import annotations

import argparse
from types import ModuleType

from agentrl.obs.console import make_console
from benchmarks.commands import (
    asynchronous,
    containers,
    efficiency,
    gateway,
    images,
    learner,
    learning,
    masks,
    rollout,
    runners,
    sandbox,
    step,
    view,
    weights,
)

BENCHMARKS: dict[str, ModuleType] = {
    "step": step,
    "rollout": rollout,
    "efficiency": efficiency,
    "runners": runners,
    "gateway": gateway,
    "images": images,
    "weights": weights,
    "learner": learner,
    "learning": learning,
    "async": asynchronous,
    "masks": masks,
    "view": view,
    "sandbox": sandbox,
    "containers": containers,
}
"""Modules by name, in the order of the help."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subcommand with its options for each benchmark."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="WHAT")
    for name, benchmark in BENCHMARKS.items():
        benchmark.add_arguments(actions.add_parser(name, help=benchmark.HELP))


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    BENCHMARKS[arguments.action].run(arguments, make_console())
