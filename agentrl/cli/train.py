"""``agentrl train``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.cli.options import add_config_arguments, command_line_layers, config_layers, load_environment
from agentrl.config.layers import Layer, annotate, differences, load_layers, merge_layers, saved_layers
from agentrl.config.recorded import recorded_keys
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.core.kernel_cache import share_kernels
from agentrl.obs.console import make_console, print_message


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
        "--replay",
        type=Path,
        metavar="SAMPLES",
        help="train on recorded rollouts without sampling: a run's folder, or a file of agentrl rollout",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the configuration that would run, and stop")


@dataclass(frozen=True, slots=True)
class Loaded:
    """The configuration of a run that is started or resumed."""

    layers: list[Layer]
    config: Config
    resumed: Path | None = None
    """Folder of the run that is resumed."""
    notes: tuple[str, ...] = ()
    """Lines for the user."""


def load_run(arguments: argparse.Namespace) -> Loaded:
    """Return the configuration of the command line; for ``--resume`` that of the run, with the command line's values on top.

    Raises:
        ConfigError, UnknownNameError: the configuration is not valid, there is no run to resume, or it would become another
            run.
    """
    if arguments.resample and not arguments.resume:
        raise ConfigError("--resample discards recorded rollouts of a run that is resumed: add --resume")
    rules = []
    if arguments.replay is None:
        from agentrl.weight_sync.registry import transport_faults

        rules.append(transport_faults)
    if not arguments.resume:
        layers = config_layers(arguments)
        return Loaded(layers, load_environment(layers, rules))
    from agentrl.runtime.run_dir import folder_to_resume
    from agentrl.train.resume import check_run_keys

    overriding_layers = command_line_layers(arguments)
    section = merge_layers(overriding_layers).get("run")
    run_dir = section.get("dir") if isinstance(section, dict) else None
    folder = folder_to_resume(None if run_dir is None else str(run_dir), arguments.env)
    run_layers = saved_layers(folder)
    layers = [*run_layers, *overriding_layers]
    saved_config, config = load_layers(run_layers), load_environment(layers, rules)
    check_run_keys(folder, recorded_keys(config))
    changed = [str(change) for change in differences(saved_config, config) if change.key != "run.dir"]
    return Loaded(layers, config, folder, (f"configuration {run_layers[0].origin}", *changed))


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
    lines, contents = list(loaded.notes), {}
    if arguments.replay is not None:
        from agentrl.train.replay import check_replay

        check_replay(config, arguments.replay)
    else:
        from agentrl.train.preflight import check_run

        plan = check_run(config)
        contents = plan.contents
        lines += [f"template {plan.template}", *plan.training, *plan.warnings]
    for line in lines:
        print_message(console, line, "bold yellow" if line.startswith("warning: ") else "")
    from agentrl.train.run import RunStart, run_training

    asyncio.run(run_training(config, console, RunStart(loaded.resumed, arguments.replay, contents, arguments.resample)))


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
    if loaded.resumed is None or not (contents or arguments.replay):
        return []
    from agentrl.train.resume import check_resume

    keys = {**recorded_keys(loaded.config), **contents}
    line = check_resume(loaded.resumed, keys, samples=arguments.replay is None, discard=arguments.resample)
    return [f"{'resume':<13}{line}"]
