"""Programs in a machine that speak over their standard streams, and connections to what listens in a machine."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.containers import attached_process, exec_process
from agentrl.containers.allowlist import connect_inside
from agentrl.containers.machine import Machine
from agentrl.containers.machine_access import inspect_machine

if TYPE_CHECKING:
    from agentrl.containers.attached_process import Request

SCRIPT = Path(attached_process.__file__)


def attached_command(machine: Machine, words: Sequence[str], *, user: str | None) -> tuple[str, ...]:
    """Return a command of this machine that runs a program in ``machine`` with its own standard streams.

    When the command ends, the program is killed with all that it has started.

    Args:
        machine: open.
        words: program and arguments.
        user: as ``NAME`` or ``UID[:GID]``; None: that of the machine.
    """
    marker = uuid.uuid4().hex
    request: Request = {
        "daemon": machine.client.url,
        "version": machine.client.version,
        "container": machine.container,
        "marker": marker,
        "exec": {
            "Cmd": list(words),
            "Env": [f"{exec_process.MARKER}={marker}"],
            "User": user or "",
            "AttachStdin": True,
            "AttachStdout": True,
            "AttachStderr": True,
        },
    }
    return (sys.executable, "-I", "-S", str(SCRIPT), json.dumps(request))


@asynccontextmanager
async def inner_socket(machine: Machine, host: str, port: int, setting: str) -> AsyncIterator[Path]:
    """Yield a Unix socket whose connections lead to an address in the network of a machine.

    Args:
        machine: open.
        host: ``localhost``, or a service of the machine.
        port: where it listens.
        setting: the key that needs it, for messages.
    """
    folder = await asyncio.to_thread(tempfile.mkdtemp, prefix="agentrl-inner-")
    tasks: set[asyncio.Task[None]] = set()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            address = "127.0.0.1" if host == "localhost" else await machine.service_address(host)
            process, _ = await inspect_machine(machine)
            inner = await asyncio.to_thread(connect_inside, process, machine.container, (address, port), setting)
            inner_reader, inner_writer = await asyncio.open_connection(sock=inner)
            try:
                await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))
            finally:
                inner_writer.close()
        except OSError:
            return  # the client sees that the connection ends
        finally:
            writer.close()
            tasks.discard(task)

    path = Path(folder) / "socket"
    server = await asyncio.start_unix_server(serve, str(path))
    try:
        os.chmod(path, 0o600)
        yield path
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(2**16):
        writer.write(data)
        await writer.drain()
    writer.write_eof()
