"""``agentrl tune``."""

from __future__ import annotations

import argparse
import asyncio
import shlex
import signal
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from rich.console import Console

from agentrl.api.settings import load_environment
from agentrl.cli.options import add_config_arguments, config_layers
from agentrl.config.layers import Layer
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError
from agentrl.obs.console import make_console, print_message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument("--minutes", type=float, default=30.0, help="time for all trials (30)")
    parser.add_argument(
        "--steps", type=int, default=3, help="measured steps of a trial; one before is not measured (3)"
    )
    parser.add_argument("--out", type=Path, default=Path("tuned.yaml"), help="file for the settings found (tuned.yaml)")


def run(arguments: argparse.Namespace) -> None:
    """Search, print a table of the trials, and write the settings that were kept."""
    if arguments.steps < 2 or not arguments.minutes > 0:
        raise ConfigError(
            f"--steps {arguments.steps} --minutes {arguments.minutes:g}: set at least 2 steps, and some minutes"
        )
    out: Path = arguments.out
    if out.exists():
        raise ConfigError(f"--out {out}: the file exists; set another one, or remove it")
    if not out.parent.is_dir():
        raise ConfigError(f"--out {out}: there is no folder {out.parent}")
    layers = config_layers(arguments)
    config = load_environment(layers)
    from agentrl.train.preflight import check_run

    console = make_console()
    for warning in check_run(config).warnings:
        print_message(console, warning, "bold yellow")
    folder = Path("runs") / f"tune-{time.strftime('%Y%m%d-%H%M%S')}"
    if config.model.warm_start is not None:
        layers.append(asyncio.run(_warm_start(config, folder, console)))
        config = load_environment(layers)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        _search(arguments, config, layers, folder, console)
    finally:
        with suppress(OSError):  # runs that failed stay
            folder.rmdir()


async def _warm_start(config: Config, folder: Path, console: Console) -> Layer:
    """Return the warm-started policy, made once for all trials."""
    from agentrl.train.warm_start import initial_policy

    _, model, warm = initial_policy(config, folder, None, console)
    if warm is not None:
        await warm.train(console)
    return Layer("warm start", {"model": {"path": str(model), "warm_start": None}})


def _search(arguments: argparse.Namespace, config: Config, layers: list[Layer], folder: Path, console: Console) -> None:
    from agentrl.learner.device import gpu_bytes
    from agentrl.models.resolve import resolve_model
    from agentrl.tune.knobs import Machine, knobs
    from agentrl.tune.report import result_table, write_settings
    from agentrl.tune.resolve import resolver
    from agentrl.tune.search import Search
    from agentrl.tune.trials import TrialProcesses

    note, machine = partial(print_message, console), Machine.here()
    resolve = resolver(layers, resolve_model(config.model.path), gpu_bytes())
    with TrialProcesses(folder, arguments.steps) as processes:
        search = Search(processes, resolve, budget_s=60 * arguments.minutes, note=note)
        try:
            search.run([*knobs(resolve({}), machine)])
        except KeyboardInterrupt:
            if not search.trials:
                raise
            note("interrupted: what was found so far is written")
        finally:
            if search.trials:
                console.print(result_table(search.trials))
                about = [
                    _command(arguments, "tune"),
                    f"{time.strftime('%Y-%m-%d')}, {machine.cores} cores, {machine.gpus} GPUs",
                ]
                write_settings(arguments.out, search, about)
    print_message(console, f"{arguments.out}: use it with {_command(arguments, 'train')} --config {arguments.out}")


def _command(arguments: argparse.Namespace, name: str) -> str:
    """Return the command line of a subcommand with the same configuration."""
    words = ["agentrl", name, *(["--env", arguments.env] if arguments.env else [])]
    words += [word for file in arguments.config for word in ("--config", file)]
    return shlex.join([*words, *arguments.overrides])
