"""Check that the answers in files score: ``python -m agentrl_tasks.math_problems FILE …``."""

from __future__ import annotations

import argparse
import sys

from agentrl import UserError

from .data import MathProblems
from .rows import FORMATS
from .validate import validate


def main() -> None:
    """Run from the command line; without files the generated problems are checked."""
    parser = argparse.ArgumentParser(
        prog="python -m agentrl_tasks.math_problems", description="Check that the right answers score 1."
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="JSONL or parquet; without any, generated problems")
    parser.add_argument("--format", choices=("auto", *FORMATS), default="auto")
    arguments = parser.parse_args()
    try:
        tasks = MathProblems(train=arguments.files or None, format=arguments.format, train_size=1000).split("train")
        faults = validate(tasks)
    except UserError as error:
        sys.exit(str(error))
    for fault in faults:
        print(fault)
    print(f"{len(tasks) - len(faults)} of {len(tasks)} right answers score 1")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
