"""Make the image of the exercises, write exercises, or demonstrations: ``python -m agentrl_tasks.terminal``."""

from __future__ import annotations

import argparse
import json
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl import ConfigError, UserError

from .agent_packages import add_packages
from .base_image import bootstrap, build
from .data import make_exercise
from .demonstrations import Chats
from .exercise import IMAGE
from .kinds import KINDS

FAULTS = {"idle": 0.12, "forgotten": 0.08, "name": 0.2, "place": 0.12, "option": 0.12}
"""Share of demonstrations with each mistake: two in three have one."""
PRACTICE = 0.3
"""Share of demonstrations that teach to copy numbers."""
PROGRESS_EVERY = 1000


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(prog="python -m agentrl_tasks.terminal", description="Exercises for a shell.")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    base = actions.add_parser("base", help=f"make the image {IMAGE}, from which all exercises begin")
    base.add_argument("--from", dest="source", default="debian:12", metavar="IMAGE", help="image of Debian to build on")
    base.add_argument(
        "--debootstrap", metavar="SUITE", help="make it from Debian's packages, such as bookworm, without an image"
    )
    base.add_argument(
        "--agent",
        nargs="+",
        default=(),
        metavar="PACKAGE",
        help="agent programs to install in it with pip, in /opt/agent",
    )
    write = actions.add_parser("write", help="write exercises as folders in Harbor's format")
    write.add_argument("folder", type=Path, metavar="FOLDER")
    write.add_argument("--count", type=int, default=1, metavar="N", help="of each kind; default 1")
    write.add_argument("--split", choices=("train", "eval"), default="train")
    write.add_argument("--seed", type=int, default=0)
    demonstrate = actions.add_parser(
        "demonstrate", help="write conversations to fine-tune on, for agentrl sft data.path=FILE"
    )
    demonstrate.add_argument("file", type=Path, metavar="FILE", help="new file of JSON lines")
    demonstrate.add_argument("--count", type=int, default=12_000, metavar="N", help="conversations; default 12000")
    demonstrate.add_argument("--seed", type=int, default=1, help="must differ from the seed of training; default 1")
    demonstrate.add_argument(
        "--kinds", nargs="+", default=tuple(KINDS), metavar="KIND", help="of exercises; default all"
    )
    demonstrate.add_argument(
        "--system", metavar="TEXT", help="begin each with a message of the system, as an agent program does"
    )
    arguments = parser.parse_args()
    try:
        if arguments.action == "base":
            bootstrap(arguments.debootstrap) if arguments.debootstrap else build(arguments.source)
            if arguments.agent:
                add_packages(tuple(arguments.agent))
            print(f"made {IMAGE}")
        elif arguments.action == "demonstrate":
            _demonstrate(
                arguments.file,
                arguments.count,
                Chats(FAULTS, arguments.seed, arguments.kinds, PRACTICE),
                arguments.system,
            )
            print(f"wrote {arguments.count} conversations to {arguments.file}")
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


def _demonstrate(file: Path, count: int, chats: Chats, system: str | None) -> None:
    """Write conversations as they are made; what is there of an interrupted call stays."""
    if file.exists():
        raise ConfigError(f"{file} is there already; name another file")
    with file.open("w") as lines, ThreadPoolExecutor(os.cpu_count()) as threads:
        for number, chat in enumerate(threads.map(chats.__getitem__, range(count)), 1):
            if system is not None:
                chat["messages"].insert(0, {"role": "system", "content": system})
            lines.write(f"{json.dumps(chat)}\n")
            if number % PROGRESS_EVERY == 0:
                print(f"{number}/{count}", file=sys.stderr)


if __name__ == "__main__":
    main()
