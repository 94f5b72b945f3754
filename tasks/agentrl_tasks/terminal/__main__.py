"""Make the image of the exercises, or write exercises: ``python -m agentrl_tasks.terminal``."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from agentrl import ConfigError, UserError

from .base_image import bootstrap, build
from .data import make_exercise
from .exercise import IMAGE
from .kinds import KINDS


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_tasks.terminal", description="Exercises for a shell.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    base = actions.add_parser("base", help=f"make the image {IMAGE}, from which all exercises begin")
    base.add_argument("--from", dest="source", default="debian:12", metavar="IMAGE", help="image of Debian to build on")
    base.add_argument(
        "--debootstrap", metavar="SUITE", help="make it from Debian's packages, such as bookworm, without an image"
    )
    write = actions.add_parser("write", help="write exercises as folders in Harbor's format")
    write.add_argument("folder", type=Path, metavar="FOLDER")
    write.add_argument("--count", type=int, default=1, metavar="N", help="of each kind; default 1")
    write.add_argument("--split", choices=("train", "eval"), default="train")
    write.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    try:
        if arguments.action == "base":
            bootstrap(arguments.debootstrap) if arguments.debootstrap else build(arguments.source)
            print(f"made {IMAGE}")
        else:
            print(f"wrote {_write(arguments)} exercises to {arguments.folder}")
    except UserError as error:
        sys.exit(str(error))


def _write(arguments: argparse.Namespace) -> int:
    exercises = {
        f"{kind}-{number}": make_exercise(kind, arguments.split, arguments.seed, number)
        for kind in KINDS
        for number in range(arguments.count)
    }
    for name, exercise in exercises.items():
        if (arguments.folder / name).exists():
            raise ConfigError(f"{arguments.folder / name} is there already; name another folder")
        exercise.write(arguments.folder / name)
    return len(exercises)


if __name__ == "__main__":
    main()
