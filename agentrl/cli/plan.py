"""``agentrl plan``."""

from __future__ import annotations

import argparse

from agentrl.cli.options import COMMAND_LINE, add_plain_config_arguments, check_one_model, command_line_layers
from agentrl.config.layers import Layer, merge_layers
from agentrl.obs.console import make_console
from agentrl.planner.engine import MEMORY_GIB, Gpus


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--model", help="model.path: a folder, or a Hugging Face name; nothing is downloaded")
    parser.add_argument("--gpus", type=int, default=8, help="GPUs of the whole run (8)")
    parser.add_argument("--gpu", default="h100", help=f"{', '.join(MEMORY_GIB)}, or a number of GiB (h100)")
    add_plain_config_arguments(parser)


def run(arguments: argparse.Namespace) -> None:
    """Print the plan."""
    from agentrl.planner.plan import make_plan, report

    layers = command_line_layers(arguments)
    if arguments.model is not None:
        check_one_model(arguments, f"--model {arguments.model}")
        layers.append(Layer(COMMAND_LINE, {"model": {"path": arguments.model}}))
    plan = make_plan(layers, Gpus.parse(arguments.gpus, arguments.gpu))
    make_console().print("\n".join(report(plan, merge_layers(layers))), soft_wrap=True)
