"""``agentrl rollout``."""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path

from agentrl.cli.eval import add_policy_arguments, policy_config
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    add_policy_arguments(parser)
    parser.add_argument("--out", type=Path, required=True, help="samples.jsonl or samples.parquet")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="which tasks; default train")
    parser.add_argument("--tasks", type=int, metavar="N", help="how many tasks; default rollout.batch_size")


def run(arguments: argparse.Namespace) -> None:
    """Sample episodes to a file and print their metrics."""
    from agentrl.evaluation.sample_to_file import SamplePlan, check_plan, sample

    console = make_console()
    config = policy_config(arguments, console)
    tasks = config.rollout.batch_size if arguments.tasks is None else arguments.tasks
    plan = SamplePlan(arguments.out, arguments.split, tasks)
    check_plan(config, plan)
    asyncio.run(sample(config, plan, console))
