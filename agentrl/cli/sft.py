"""``agentrl sft``."""

from __future__ import annotations

import argparse
import sys
from functools import partial

from agentrl.cli.options import add_config_arguments, config_layers, load_environment
from agentrl.config.layers import annotate
from agentrl.core.child_process import exit_with_parent
from agentrl.obs.console import make_console, print_message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument("--dry-run", action="store_true", help="print the configuration that would run, and stop")


def run(arguments: argparse.Namespace) -> None:
    """Fine-tune on demonstrations."""
    exit_with_parent()  # a run that warm-starts its policy may be killed
    layers = config_layers(arguments)
    config = load_environment(layers)
    if arguments.dry_run:
        sys.stdout.write(annotate(config, layers))
        from agentrl.sft.preflight import plan_sft

        for lack in plan_sft(config):
            make_console(stderr=True).print(f"missing here {lack}", soft_wrap=True)
        return
    from agentrl.sft.run import sft

    sft(config, note=partial(print_message, make_console()))
