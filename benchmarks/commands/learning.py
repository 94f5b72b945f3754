"""``agentrl bench learning``."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.cli.options import add_plain_config_arguments
from agentrl.core.errors import ConfigError, unknown_name
from benchmarks.commands.output import open_table
from benchmarks.learning_suite import (
    AGENTRL,
    POLICIES,
    SINGLE_TURN,
    TASKS,
    TRAINERS,
    TRL,
    Result,
    append_result,
    make_small_policy,
    preset_names,
    read_bands,
    run_settings,
)

if TYPE_CHECKING:
    from agentrl.config.schema import Config

HELP = "small published tasks that a policy learns in minutes: scores before and after, minutes, and the bands of the scores"
_HEADS = ("task", "policy", "trainer", "seed", "before", "after", "minutes", "training min", "steps", "band")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument(
        "--policy",
        choices=POLICIES,
        default=POLICIES[0],
        help="small: 0.8M parameters, on two cores; smollm2: SmolLM2-135M-Instruct, on one GPU",
    )
    parser.add_argument(
        "--trainer",
        choices=TRAINERS,
        default=AGENTRL,
        help="trl: TRL's GRPOTrainer on the same tasks, policy and warm start, of the tasks of one turn",
    )
    parser.add_argument("--seed", type=int, action="append", help="seed of a run; may be repeated (default: 0)")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/learning"), help="folder of the runs, and of results.jsonl"
    )
    add_plain_config_arguments(parser)
    parser.epilog = f"key=value and, without =, names of tasks: {', '.join(TASKS)}; without a name all of them"


def run(arguments: argparse.Namespace, console: Console) -> None:
    """Train, and print a row for each run."""
    tasks = [word for word in arguments.overrides if "=" not in word]
    arguments.overrides = [word for word in arguments.overrides if "=" in word]
    playable = SINGLE_TURN if arguments.trainer == TRL else tuple(TASKS)
    for name in tasks:
        if name not in TASKS:
            raise unknown_name("task", name, TASKS, "agentrl bench learning TASK")
        if name not in playable:
            raise ConfigError(f"agentrl bench learning {name} --trainer trl: TRL plays {', '.join(playable)} alone")
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.policy == "small":
        make_small_policy(arguments.out)
    bands = read_bands()
    with open_table(console, "training", *_HEADS) as (table, _):
        for name in tasks or playable:
            for seed in arguments.seed or [0]:
                result = train_task(arguments, name, seed, console)
                append_result(arguments.out, result)
                table.add_row(*_row(result), result.place(bands))


def resolve_task(arguments: argparse.Namespace, task: str, seed: int) -> Config:
    """Return the configuration of a run of the suite: its presets, ``--config``, and settings of the command line on top.

    Raises:
        ConfigError: as in `resolve_config`.
    """
    from agentrl.api.settings import file_layers, load_environment
    from agentrl.cli.options import command_line_layers
    from agentrl.config.layers import Layer

    settings = Layer("the suite", run_settings(task, arguments.policy, arguments.out.absolute(), seed))
    presets = file_layers(preset_names(task, arguments.policy))
    return load_environment([*presets, settings, *command_line_layers(arguments)])


def train_task(arguments: argparse.Namespace, task: str, seed: int, console: Console) -> Result:
    """Train one task with the trainer of the command line.

    Raises:
        ConfigError: the run cannot start.
        AgentrlError: it failed.
    """
    from benchmarks.learning import train

    config = resolve_task(arguments, task, seed)
    if arguments.trainer == AGENTRL:
        return train(task, arguments.policy, config, console)
    from benchmarks.trl_learning import train_with_trl

    return train_with_trl(task, arguments.policy, config, console)


def _row(result: Result) -> list[str]:
    return [
        result.task,
        result.policy,
        result.trainer,
        str(result.seed),
        f"{result.initial:.3f}",
        f"{result.final:.3f}",
        f"{result.minutes:.1f}",
        f"{result.training_minutes:.1f}",
        str(result.steps),
    ]
