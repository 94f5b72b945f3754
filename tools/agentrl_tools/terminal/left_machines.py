"""Machines that a killed run has left, and that its resumed episodes do not take up."""

from __future__ import annotations

import asyncio
import json
import logging
import shutil
from collections.abc import Callable, Collection
from functools import partial
from pathlib import Path

from agentrl.containers.daemon import DaemonClient, daemon_urls, message
from agentrl.containers.listing import LeasedObject, list_objects, remove_objects
from agentrl.containers.machines import state_folder
from agentrl.core.errors import MissingError, SandboxFailure

from .episodes import record_file
from .options import TerminalOptions

_log = logging.getLogger(__name__)


async def remove_left_machines(
    options: TerminalOptions, find_resumed: Callable[[Collection[str]], Collection[str]]
) -> int:
    """Remove the owner's machines and snapshots at all daemons, except those of resumed episodes.

    Args:
        options: with the owner; none of its processes has opened a machine yet.
        find_resumed: returns those of some keys whose episodes continue.

    Returns:
        how many were removed. A daemon that does not answer is named in a warning: its machines stay until their leases end.
    """
    clients = [DaemonClient(url) for url in daemon_urls(options.containers)]
    return sum(await asyncio.gather(*(_remove_at(client, options, find_resumed) for client in clients)))


async def _remove_at(
    client: DaemonClient, options: TerminalOptions, find_resumed: Callable[[Collection[str]], Collection[str]]
) -> int:
    removed: list[LeasedObject] = []
    try:
        await client.connect()
        rows = [row for row in await client.call(partial(list_objects, url=client.url)) if row.owner == options.owner]
        resumed = find_resumed([row.key for row in rows if row.key])
        lost = [row for row in rows if row.key not in resumed]
        failures = await remove_objects(client, lost, removed.append)
        for failure in failures:
            _log.warning("a machine that the run has left stays until its lease ends: %s", failure)
    except (MissingError, SandboxFailure) as error:
        _log.warning("machines that the run has left at %s stay until their leases end: %s", client.url, message(error))
    finally:
        await client.close()
    for row in removed:
        await asyncio.to_thread(_remove_files, options, row)
    return len(removed)


def _remove_files(options: TerminalOptions, row: LeasedObject) -> None:
    """Remove results of commands, and the record of the episode unless it has a grade."""
    shutil.rmtree(state_folder(options.containers) / row.id, ignore_errors=True)
    file: Path = record_file(options.containers, options.owner, row.key)
    if file.exists() and json.loads(file.read_text())["grade"] is None:
        file.unlink()
