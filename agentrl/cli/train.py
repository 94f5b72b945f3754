"""``agentrl train``."""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from agentrl.cli.options import add_config_arguments, resolve_config
from agentrl.config.load import dump
from agentrl.config.schema import Config
from agentrl.obs.console import make_console, print_message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_config_arguments(parser)
    parser.add_argument("--resume", action="store_true", help="go on from the run's last checkpoint")
    parser.add_argument(
        "--replay",
        type=Path,
        metavar="SAMPLES",
        help="train on recorded rollouts without sampling: a run's folder, or a file of agentrl rollout",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the configuration that would run, and stop")


def run(arguments: argparse.Namespace) -> None:
    """Train, or print what would be trained."""
    config = resolve_config(arguments)
    if arguments.dry_run:
        sys.stdout.write(dump(config))
        lines = _plan(config, arguments.replay)
        make_console(stderr=True).print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)
        return
    if arguments.replay is not None:
        from agentrl.train.replay import check_replay

        check_replay(config, arguments.replay)
    else:
        from agentrl.train.preflight import check_run

        template = check_run(config).template
        print_message(make_console(), f"template {template}")
    from agentrl.train.run import run_training

    words = sys.argv[1:]
    asyncio.run(
        run_training(config, resume=arguments.resume, console=make_console(), words=words, replay=arguments.replay)
    )


def _plan(config: Config, replay: Path | None) -> list[str]:
    """Return in a few lines what would run."""
    if replay is not None:
        from agentrl.train.replay import check_replay

        return check_replay(config, replay)
    from agentrl.train.preflight import plan_run

    plan = plan_run(config)
    return [*plan.lines, *(f"missing here {lack}" for lack in plan.missing)]
