"""``agentrl sft``."""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path

from agentrl.api.settings import load_environment
from agentrl.cli.options import add_config_arguments, command_line_layers, config_layers
from agentrl.config.layers import CONFIG, Layer, annotate, merge_layers, saved_layers
from agentrl.core.child_process import exit_with_parent
from agentrl.core.errors import ConfigError
from agentrl.core.kernel_cache import share_kernels
from agentrl.core.openmp import limit_spinning
from agentrl.obs.console import make_console, print_message
from agentrl.obs.journal import has_journal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="continue the run in run.dir from its newest checkpoint")
    parser.add_argument("--dry-run", action="store_true", help="print the configuration that would run, and stop")


def run(arguments: argparse.Namespace) -> None:
    """Fine-tune on chats, recorded rollouts or demonstrations."""
    exit_with_parent()  # a run that warm-starts its policy may be killed
    share_kernels()
    limit_spinning()
    layers, resumed = _layers(arguments)
    config = load_environment(layers)
    if arguments.dry_run:
        sys.stdout.write(annotate(config, layers))
        from agentrl.sft.preflight import plan_sft

        plan = plan_sft(config)
        lines = [*plan.lines, *(f"missing here {lack}" for lack in plan.missing_resources)]
        make_console(stderr=True).print("\n".join(lines), soft_wrap=True)
        return
    if config.sft.workers:
        from agentrl.sft.workers import sft_processes

        sft_processes()
    from agentrl.sft.run import sft

    sft(config, note=partial(print_message, make_console()), resumed=resumed)


def _layers(arguments: argparse.Namespace) -> tuple[list[Layer], Path | None]:
    """Return the layers of the configuration, and the folder of the run that is resumed.

    Raises:
        ConfigError: there is no run to resume.
    """
    settings = command_line_layers(arguments)
    tree = merge_layers(settings)
    names = ("run", "data", "sft")
    sections = {name: section if isinstance(section := tree.get(name), dict) else {} for name in names}
    if not arguments.resume:
        # Chats and recorded rollouts need no preset of an environment, which names a taskset.
        is_recorded = sections["data"].get("path") or sections["sft"].get("rollouts")
        return (settings if is_recorded else config_layers(arguments)), None
    if sections["run"].get("dir") is None:
        raise ConfigError("--resume: set run.dir to the folder of the run to continue")
    folder = Path(str(sections["run"]["dir"])).expanduser()
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"--resume: run.dir={folder} is no run, because it has no {CONFIG}")
    if has_journal(folder) or (folder / "checkpoints").exists():
        raise ConfigError(f"--resume: run.dir={folder} is a run of agentrl train: agentrl train --resume continues it")
    return [*saved_layers(folder), *settings], folder
