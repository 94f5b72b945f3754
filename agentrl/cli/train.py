"""``agentrl train``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from pathlib import Path

from agentrl.api.loading import Loaded, checked_start, load_fork, load_new, load_resumed, run_dir_setting, run_rules
from agentrl.cli.options import add_config_arguments, command_line_layers, config_layers
from agentrl.config.layers import annotate
from agentrl.config.recorded import recorded_keys
from agentrl.core.errors import ConfigError
from agentrl.core.kernel_cache import share_kernels
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--resume",
        action="store_true",
        help="continue the run in run.dir, or else the newest run that has a checkpoint, with its own configuration",
    )
    parser.add_argument(
        "--resample",
        action="store_true",
        help="with --resume: discard the rollouts that were recorded after the checkpoint, and sample them again",
    )
    parser.add_argument(
        "--fork",
        metavar="RUN@STEP",
        help="begin a new run with a checkpoint of another one, such as runs/mine@40 or runs/mine@latest, and its configuration",
    )
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="SAMPLES",
        help="train on recorded rollouts without sampling: a run's folder, or a file of agentrl rollout",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the configuration that would run, and stop")


def load_run(arguments: argparse.Namespace) -> Loaded:
    """Return the configuration of the command line; for ``--resume`` and ``--fork`` that of the run, with the command line's
    values on top.

    Raises:
        ConfigError, UnknownNameError: the configuration is not valid, there is no run to resume, or it would become another
            run.
    """
    if arguments.resample and not arguments.resume:
        raise ConfigError("--resample discards recorded rollouts of a run that is resumed: add --resume")
    if arguments.fork is not None and (arguments.resume or arguments.env):
        option = "--resume continues a run" if arguments.resume else "--env takes a preset"
        raise ConfigError(f"--fork {arguments.fork} begins a new run with the configuration of the other; {option}")
    rules = run_rules(arguments.replay)
    if arguments.fork is not None:
        return load_fork(arguments.fork, command_line_layers(arguments), rules)
    if not arguments.resume:
        return load_new(config_layers(arguments), rules)
    from agentrl.runtime.run_dir import folder_to_resume

    settings = command_line_layers(arguments)
    return load_resumed(folder_to_resume(run_dir_setting(settings), arguments.env), settings, rules)


def run(arguments: argparse.Namespace) -> None:
    """Train, or print what would be trained."""
    share_kernels()
    loaded = load_run(arguments)
    config, console = loaded.config, make_console(stderr=arguments.dry_run)
    if arguments.dry_run:
        sys.stdout.write(annotate(config, loaded.layers))
        lines = [*loaded.notes, *_plan(loaded, arguments)]
        console.print("\n".join(lines), soft_wrap=True)
        return
    start = checked_start(loaded, console, arguments.replay, discard=arguments.resample)
    from agentrl.train.run import run_training

    asyncio.run(run_training(config, console, start))


def _plan(loaded: Loaded, arguments: argparse.Namespace) -> list[str]:
    """Return in a few lines what would run."""
    if arguments.replay is not None:
        from agentrl.train.replay import check_replay

        return [*check_replay(loaded.config, arguments.replay), *_describe_resume(loaded, arguments, {})]
    from agentrl.train.preflight import plan_run

    plan = plan_run(loaded.config)
    lines = [*plan.lines, *_describe_resume(loaded, arguments, plan.contents), *plan.warnings]
    return [*lines, *(f"missing here {lack}" for lack in plan.missing_resources)]


def _describe_resume(loaded: Loaded, arguments: argparse.Namespace, contents: Mapping[str, str]) -> list[str]:
    """Return what the run uses again, on one line; nothing for a new run, or without the data to compare."""
    if loaded.fork is not None:
        return [str(loaded.fork.with_contents(contents))]
    if loaded.resumed is None or not (contents or arguments.replay):
        return []
    from agentrl.train.resume import check_resume

    keys = {**recorded_keys(loaded.config), **contents}
    line = check_resume(loaded.resumed, keys, samples=arguments.replay is None, discard=arguments.resample)
    return [f"{'resume':<13}{line}"]
