"""``agentrl engines``."""

from __future__ import annotations

import argparse

from agentrl.core.errors import ConfigError
from agentrl.inference.launch.kept_engines import EngineRecord, engines_folder, free_engines, read_record
from agentrl.obs.console import make_console


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument(
        "--end", nargs="*", metavar="URL", help="end the engines with these addresses, without any all that no run uses"
    )


def run(arguments: argparse.Namespace) -> None:
    """List the engines of ``sampler.keep_minutes`` on this machine, or end some."""
    console = make_console()
    lines = _end(arguments.end) if arguments.end is not None else _list()
    console.print("\n".join(lines), soft_wrap=True)


def _list() -> list[str]:
    lines = []
    free_folders = set()
    for record, child in free_engines():
        free_folders.add(child.folder)
        lines.append(_line(record, f"free, ends in {child.minutes:.1f} minutes"))
        child.unlock()
    for folder in sorted(set(engines_folder().iterdir()) - free_folders):
        if (used := read_record(folder)) is not None:
            lines.append(_line(used, "a run uses it"))
    return lines or ["no engines are kept on this machine: see sampler.keep_minutes"]


def _line(record: EngineRecord, state: str) -> str:
    gpus = f", GPU {','.join(record.gpus)}" if record.gpus else ""
    return f"{record.url}  {state}  {record.text}{gpus}, log {record.log}"


def _end(urls: list[str]) -> list[str]:
    ended = []
    for record, child in free_engines():
        if not urls or record.url in urls:
            child.stop()
            ended.append(record.url)
        else:
            child.unlock()
    if unknown_urls := [url for url in urls if url not in ended]:
        raise ConfigError(
            f"--end {' '.join(unknown_urls)}: no free engine has this address; agentrl engines lists them"
        )
    return [f"{url} has ended" for url in ended] or ["there was none to end"]
