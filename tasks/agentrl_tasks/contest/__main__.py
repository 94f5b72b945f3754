"""Check that reference solutions score: ``python -m agentrl_tasks.contest``."""

from __future__ import annotations

import argparse
import asyncio
import sys

from agentrl import UserError
from agentrl.config.sandbox import SandboxConfig
from agentrl.core.registry import SANDBOXES, names, tool_service
from agentrl.core.tool import ToolClient

from .data import FAMILIES, Contest
from .validate import validate


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl_tasks.contest", description="Check that reference solutions score 1."
    )
    parser.add_argument("--size", type=int, default=120, help="problems to draw, of all families in turn")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", choices=names(SANDBOXES), default="bubblewrap")
    arguments = parser.parse_args()
    sandbox = SandboxConfig(backend=arguments.backend).model_dump(mode="json")
    try:
        contest = Contest(seed=arguments.seed, families=tuple(FAMILIES), train_size=arguments.size)
        judge = tool_service("judge").local_client({}, {"sandbox": sandbox})
        faults = asyncio.run(_validate(contest, judge))
    except UserError as error:
        sys.exit(str(error))
    for fault in faults:
        print(fault)
    print(f"{arguments.size - len(faults)} of {arguments.size} solutions score 1")
    sys.exit(1 if faults else 0)


async def _validate(contest: Contest, judge: ToolClient) -> list[str]:
    try:
        return await validate(contest, contest.split("train"), judge)
    finally:
        await judge.aclose()


if __name__ == "__main__":
    main()
