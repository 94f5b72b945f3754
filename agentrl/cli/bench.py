"""``agentrl bench``: the benchmarks, which are part of a checkout and not of an installed wheel."""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

import agentrl
from agentrl.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command.

    Raises:
        ConfigError: agentrl was not installed from a checkout.
    """
    checkout = Path(agentrl.__file__).parents[1]
    if not (checkout / "benchmarks" / "commands" / "registry.py").is_file():
        raise ConfigError(
            f"agentrl bench: {checkout} has no benchmarks/, which is not part of the wheel; clone the repository and install it "
            "with pip install -e ."
        )
    if str(checkout) not in sys.path:
        sys.path.append(str(checkout))
    importlib.import_module("benchmarks.commands.registry").add_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    importlib.import_module("benchmarks.commands.registry").run(arguments)
