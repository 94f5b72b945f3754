"""``agentrl eval``."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from agentrl.cli.options import add_config_arguments, resolve_config
from agentrl.config.load import Tree, load_config, merge, read_yaml
from agentrl.config.schema import Config
from agentrl.errors import ConfigError

if TYPE_CHECKING:
    from agentrl.types import Rollout


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument(
        "--checkpoint",
        help="a run's folder, a checkpoint, or a model folder; default model.path. "
        "Without --env and --config the configuration is that of the run",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file too")
    parser.add_argument("--rollouts", type=Path, metavar="FILE", help="write the samples to this file, JSON lines")


def run(arguments: argparse.Namespace) -> None:
    """Evaluate a policy and print its figures."""
    from agentrl.eval import evaluate_policy
    from agentrl.evaluation.result import flat_figures, report
    from agentrl.evaluation.show import results_table

    console = Console()
    config = _config(arguments, console)
    for file in (arguments.json, arguments.rollouts):
        _check_writable(file)
    results = asyncio.run(evaluate_policy(config, console, _writer(arguments.rollouts)))
    console.print(results_table(results, f"{config.env.name}: {config.model.path}"))
    if arguments.json:
        content = {"env": config.env.name, "model": config.model.path, **flat_figures(results), "sets": report(results)}
        arguments.json.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for file in (arguments.json, arguments.rollouts):
        if file is not None:
            console.print(f"written {file}", highlight=False, soft_wrap=True)


def _config(arguments: argparse.Namespace, console: Console) -> Config:
    from agentrl.eval import checkpoint_model, run_config_file

    if not arguments.checkpoint:
        return resolve_config(arguments)
    model = {"model": {"path": checkpoint_model(arguments.checkpoint)}}
    file = None if arguments.env or arguments.config else run_config_file(arguments.checkpoint)
    if file is None:
        config = resolve_config(arguments, model)
    else:
        config = load_config(None, arguments.overrides, base=merge(_of_its_own(read_yaml(file)), model))
        console.print(f"configuration {file}", highlight=False, soft_wrap=True)
    if config.sampler.url is not None:
        raise ConfigError(
            f"sampler.url={config.sampler.url} with --checkpoint: an engine that runs already samples with its own "
            "weights, not the checkpoint's. Leave out sampler.url, or leave out --checkpoint and set model.path"
        )
    return config


def _of_its_own(tree: Tree) -> Tree:
    """Return a run's configuration without its engine and ports: the run may still be using them."""
    tools = {name: {**tool, "port": 0} for name, tool in tree.get("tools", {}).items()}
    return merge(tree, {"sampler": {"url": None, "port": 0}, "tools": tools})


def _check_writable(file: Path | None) -> None:
    if file is not None and not file.parent.is_dir():
        raise ConfigError(f"{file}: there is no folder {file.parent}")


def _writer(file: Path | None) -> Callable[[Rollout], None] | None:
    """Return what writes each rollout to ``file`` as it ends, so that an interrupted evaluation leaves what it had."""
    if file is None:
        return None
    from agentrl.obs.rolloutformat import encode_rollout

    file.write_bytes(b"")

    def write(rollout: Rollout) -> None:
        with file.open("ab") as out:
            out.write(encode_rollout(rollout))

    return write
