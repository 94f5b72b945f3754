"""``agentrl containers ls``, ``rm`` and ``build``."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from agentrl.config.containers import ContainersConfig
from agentrl.core.errors import ConfigError, MissingError
from agentrl.core.extras import require
from agentrl.obs.console import make_console

if TYPE_CHECKING:
    from agentrl.containers.daemon import DaemonClient
    from agentrl.containers.listing import LeasedObject
    from agentrl.containers.spec import BuildSpec

HOST_HELP = (
    "address of a Docker daemon, as in containers.hosts; several times for several (DOCKER_HOST, or the usual socket)"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    ls = actions.add_parser("ls", help="list machines and snapshots, with their run, state, and time to live")
    rm = actions.add_parser("rm", help="remove machines with their services, and snapshots")
    rm.add_argument(
        "names", nargs="*", metavar="NAME", help="the beginning of an id, a run for all of its machines, or RUN/KEY"
    )
    rm.add_argument("--all", action="store_true", help="remove all, whoever uses them")
    build = actions.add_parser(
        "build", help="pull or build the images of tasks; those that are there are left as they are"
    )
    build.add_argument(
        "paths",
        nargs="+",
        type=Path,
        metavar="PATH",
        help="a task's folder, a folder of these, or a folder with a Dockerfile",
    )
    build.add_argument("--jobs", type=int, default=2, help="images made at the same time (%(default)s)")
    for action in (ls, rm, build):
        action.add_argument("--host", action="append", default=[], metavar="URL", help=HOST_HELP)


def run(arguments: argparse.Namespace) -> None:
    """List, remove or build."""
    require("docker", "agentrl containers")
    config = ContainersConfig.model_validate({"hosts": arguments.host})
    console = make_console()
    if arguments.action == "build":
        asyncio.run(_build(config.model_copy(update={"builds": arguments.jobs}), arguments.paths, console))
    elif arguments.action == "rm":
        if bool(arguments.names) == arguments.all:
            raise ConfigError("agentrl containers rm needs names of machines or runs, or --all")
        asyncio.run(_remove(config, arguments.names, arguments.all, console))
    else:
        asyncio.run(_list(config, console))


async def _connect(config: ContainersConfig) -> list[DaemonClient]:
    from agentrl.containers.daemon import DaemonClient, daemon_urls

    clients = [DaemonClient(url) for url in daemon_urls(config)]
    await asyncio.gather(*(client.connect() for client in clients))
    return clients


async def _rows(client: DaemonClient) -> list[LeasedObject]:
    from agentrl.containers.listing import list_objects

    return await client.call(lambda api: list_objects(api, client.url))


async def _list(config: ContainersConfig, console: Console) -> None:
    clients = await _connect(config)
    rows = [row for client in clients for row in await _rows(client)]
    for client in clients:
        await client.close()
    if not rows:
        console.print("no machines: nothing of container tasks is left at this daemon")
        return
    console.print(_table(rows, has_hosts=len(clients) > 1))


def _table(rows: Sequence[LeasedObject], *, has_hosts: bool) -> Table:
    heads = ["id", "run", "key", "state", "age", "time left", *(["host"] if has_hosts else [])]
    table = Table(*heads, box=None, padding=(0, 2, 0, 0))
    for row in rows:
        state = f"{row.state} + {row.services} services" if row.services else row.state
        time_left = _duration(row.left_s) if row.left_s > 0 else "past its time"
        key = row.key or "(warm pool)"
        cells = [row.id, row.owner, key, state, _duration(row.age_s), time_left, *([row.url] if has_hosts else [])]
        table.add_row(*(Text(cell) for cell in cells))
    return table


def _duration(seconds: float) -> str:
    total_s = max(0, round(seconds))
    hours, minutes = total_s // 3600, total_s // 60 % 60
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{total_s % 60:02}s"


async def _remove(config: ContainersConfig, names: Sequence[str], is_all: bool, console: Console) -> None:
    from agentrl.containers.listing import remove_objects, select

    clients = await _connect(config)
    rows = [row for client in clients for row in await _rows(client)]
    failures: list[str] = []
    selected = select(rows, names, is_all=is_all)
    for client in clients:
        of_client = [row for row in selected if row.url == client.url]
        failures += await remove_objects(
            client, of_client, lambda row: console.print(Text(f"{row.id} of {row.owner} is removed"), soft_wrap=True)
        )
        await client.close()
    if not selected:
        console.print("there was none to remove")
    if failures:
        raise MissingError("not removed: " + "; ".join(failures))


async def _build(config: ContainersConfig, paths: Sequence[Path], console: Console) -> None:
    from agentrl.containers.images import Images, prebuild
    from agentrl.containers.machines import state_folder

    images_by_name = await _images(paths)
    clients = await _connect(config)
    images = {client.url: Images(client, config, state_folder(config)) for client in clients}

    def progress(name: str, line: str) -> None:
        console.print(Text(f"{name}: {line}"), soft_wrap=True)

    try:
        failures = await prebuild(images, images_by_name, progress)
    finally:
        for client in clients:
            await images[client.url].close()
            await client.close()
    made = len(images_by_name) * len(clients) - len(failures)
    console.print(f"{made} images are there, {len(failures)} could not be made")
    if failures:
        raise MissingError("\n".join(f"{name}: {text}" for name, text in failures.items()))


async def _images(paths: Sequence[Path]) -> dict[str, tuple[str | None, BuildSpec | None]]:
    """Return the images of tasks and of plain folders, as arguments of `Images.ensure`, by name."""
    from agentrl.containers.spec import BuildSpec
    from agentrl.containers.task_folder import find_task_folders, load_task_folder
    from agentrl.containers.task_machines import task_images

    images: dict[str, tuple[str | None, BuildSpec | None]] = {}
    for path in paths:
        if folders := find_task_folders(path):
            for folder in folders:
                images |= await task_images(load_task_folder(folder))
        elif (path / "Dockerfile").is_file():
            images[str(path)] = (None, BuildSpec(context=path))
        else:
            raise ConfigError(f"{path}: neither a folder of container tasks, nor one with a Dockerfile")
    return images
