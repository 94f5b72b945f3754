"""A machine: a container in which an agent works, or in which its work is graded."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import posixpath
import shutil
import signal
import sys
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, Self

from docker.errors import APIError, NotFound

from agentrl.containers import archives, exec_process
from agentrl.containers.daemon import DaemonClient, message
from agentrl.containers.docker_api import DockerApi
from agentrl.containers.leases import MACHINE_LABEL, SERVICE_LABEL, leased_containers
from agentrl.containers.spec import Healthcheck, MachineSpec
from agentrl.core.errors import SandboxFailure

if TYPE_CHECKING:
    from agentrl.containers.exec_process import ExecOptions, Request

COPY_BYTES = 2**26
"""Limit of `Machine.download`."""
SCRIPT = Path(exec_process.__file__)
_ONE_STREAM = 'exec /bin/sh -c "$1" 2>&1'


@dataclass(frozen=True, slots=True)
class Command:
    """A command for a machine.

    Example: ``Command("pytest -q", cwd="/app", wall_s=60)``.
    """

    command: str | tuple[str, ...]
    """Text for ``/bin/sh -c``, or program and arguments. Standard output and error are in the order in which they are printed for
    text alone: the daemon has a stream for each, and the shell sends both to one."""
    user: str | None = None
    """User, as ``NAME`` or ``UID[:GID]``; None: that of the machine."""
    cwd: str | None = None
    """Folder; None: that of the machine."""
    env: Mapping[str, str] = field(default_factory=dict)
    """Variables in addition to those of the machine."""
    wall_s: float = 60.0
    """Wall time, seconds. Then the command is killed with all that it has started, in the background too."""
    output_bytes: int = 2**20
    """Bytes of output that are recorded; of more the first and the last half."""
    call_id: str | None = None
    """A second command with the same id on this machine is not run: it gets the result of the first, once that has ended."""
    ends_with_caller: bool = False
    """Whether it is killed when this process ends, by whatever cause; otherwise it runs on, up to ``wall_s``."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """How a command ended.

    Example: ``CommandResult(exit_code=0, output="3 passed\\n", seconds=0.8)``.
    """

    exit_code: int | None
    """Exit status; None if the command was killed. 126 if it could not be started: no such program, user or folder, or as many
    processes as the machine may have."""
    output: str
    """Standard output and error."""
    is_cut: bool = False
    """Whether a part of the output is left out; a line in it says how much."""
    timed_out: bool = False
    """Whether it was killed at the end of ``wall_s``."""
    seconds: float = 0.0
    """Wall time."""
    flooded: bool = False
    """Whether it was killed for endless output."""
    restarted: bool = False
    """Whether the kernel had to kill all of the machine's processes to end it: files stay, background processes do not."""


class MachineEndedError(SandboxFailure):
    """A machine that has ended: by the policy's doing (``disk``, ``memory``), or not (``exited``, ``removed``).

    Args:
        text: the message.
        reason: one of these words. ``disk``: more was written than ``disk_mb``. ``memory``: the first process was killed for lack
            of memory. ``exited``: the daemon or an administrator ended it. ``removed``: it is gone.
    """

    def __init__(self, text: str, reason: str) -> None:
        super().__init__(text, reason)
        self.reason = reason

    @property
    def is_by_policy(self) -> bool:
        """Whether commands in the machine have ended it, and not its infrastructure."""
        return self.reason in ("disk", "memory")

    def __str__(self) -> str:
        """Return the message."""
        return str(self.args[0])


class Lifecycle(Protocol):
    """What opens machines, and is called back by them."""

    async def on_start(self, machine: Machine) -> None:
        """Prepare a machine whose container was started: its network."""

    async def on_close(self, machine: Machine) -> None:
        """Remove a machine."""

    async def on_snapshot(self, machine: Machine) -> dict[str, str]:
        """Return the labels of an image of a machine, which keep it as long as the machines of its owner are open."""


class Machine:
    """A container that is open; made by `Machines.open`.

    Args:
        client: its daemon.
        container: its container's id.
        machine_id: names it and everything that belongs to it, at the daemon and in ``state``.
        spec: what it was made from.
        state: folder for results of commands.
        lifecycle: prepares its network after a start, and releases what belongs to it.
    """

    def __init__(
        self,
        client: DaemonClient,
        container: str,
        machine_id: str,
        spec: MachineSpec,
        state: Path,
        lifecycle: Lifecycle,
    ) -> None:
        self.id = machine_id
        self.container = container
        self.spec = spec
        self.client = client
        self._folder = state / machine_id
        self._lifecycle = lifecycle
        self._is_closed = False
        self.is_adopted = False
        """Whether it was there before `Machines.open` was called, with the files and processes of an earlier process."""
        self.ended_by = ""
        """Why a limit has ended it, such as ``disk``; empty otherwise."""

    async def run(self, command: Command) -> CommandResult:
        """Run a command to its end. If the caller is cancelled it is killed, unless it has a ``call_id``.

        Raises:
            MachineEndedError: the machine has ended.
            SandboxFailure: the daemon is lost.
        """
        call = uuid.uuid4().hex if command.call_id is None else command.call_id
        folder = self._folder / hashlib.sha256(call.encode()).hexdigest()[:32]
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if not (folder / "result.json").exists():
                await self._execute(self._request(command, folder), keeps=command.call_id is not None)
            return await self._result(folder)
        finally:
            if command.call_id is None:
                shutil.rmtree(folder, ignore_errors=True)

    def _request(self, command: Command, folder: Path) -> Request:
        marker = uuid.uuid4().hex
        text = command.command
        words = ["/bin/sh", "-c", _ONE_STREAM, "sh", text] if isinstance(text, str) else list(text)
        variables = {**command.env, exec_process.MARKER: marker}
        options: ExecOptions = {
            "Cmd": words,
            "Env": [f"{name}={value}" for name, value in variables.items()],
            "User": command.user or "",
            "WorkingDir": command.cwd or "",
            "AttachStdout": True,
            "AttachStderr": True,
        }
        return {
            "daemon": self.client.url,
            "version": self.client.version,
            "container": self.container,
            "folder": str(folder),
            "marker": marker,
            "exec": options,
            "wall_s": command.wall_s,
            "output_bytes": command.output_bytes,
            "caller": os.getpid() if command.ends_with_caller else 0,
        }

    async def _execute(self, request: Request, *, keeps: bool) -> None:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-I", "-S", str(SCRIPT)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        try:
            _, errors = await process.communicate(json.dumps(request).encode())
        except asyncio.CancelledError:
            if not keeps:
                with suppress(ProcessLookupError):
                    os.kill(process.pid, signal.SIGTERM)
                await process.wait()
            raise
        if process.returncode != 0:
            lines = errors.decode(errors="replace").strip().splitlines() or ["it printed nothing"]
            raise SandboxFailure(f"the process of a command ended with {process.returncode}: {lines[-1]}")

    async def _result(self, folder: Path) -> CommandResult:
        if not (folder / "result.json").exists():
            failure = json.loads((folder / "failure").read_text())
            await self.check()
            raise SandboxFailure(f"machine {self.id}: {failure}")
        result = CommandResult(**json.loads((folder / "result.json").read_text()))
        if result.exit_code is None or result.exit_code in (126, 137):
            await self.check()
        if result.restarted:
            await self._lifecycle.on_start(self)
        return result

    async def check(self) -> None:
        """Check that the machine still runs.

        Raises:
            MachineEndedError: it does not.
        """
        try:
            state = (await self.client.call(lambda api: api.inspect_container(self.container)))["State"]
        except NotFound as error:
            raise MachineEndedError(f"machine {self.id} was removed", "removed") from error
        if state["Running"]:
            return
        if self.ended_by == "disk":
            raise MachineEndedError(f"machine {self.id} has ended: it wrote more than {self.spec.disk_mb} MiB", "disk")
        text = f"exit status {state['ExitCode']} {state['Error']}".strip()
        reason = "memory" if state["OOMKilled"] else "exited"
        raise MachineEndedError(f"machine {self.id} has ended: {text}", reason)

    async def upload(
        self,
        files: Path | Mapping[str, bytes],
        path: str,
        *,
        owner: str = "0",
        mode: int | None = None,
    ) -> None:
        """Write a file or a folder of this machine, or contents by relative path, to ``path``; also of a stopped machine.

        A symbolic link at ``path`` itself is replaced. Folders above it are made if they are missing.

        Args:
            files: what to write; with a mapping ``path`` becomes a folder.
            path: an absolute path.
            owner: user, as ``NAME`` or ``UID[:GID]``.
            mode: of files; None: as they are here, or 0644.

        Raises:
            SandboxFailure: the daemon refuses.
        """
        ids = await self._ids(owner)
        target = _absolute(path)
        ancestor = posixpath.dirname(target)
        while True:
            name = posixpath.relpath(target, ancestor)
            archive = await asyncio.to_thread(archives.pack, files, name, ids, mode)
            try:
                await self._put(ancestor, archive)
                return
            except NotFound as error:
                if ancestor == "/":
                    raise MachineEndedError(f"machine {self.id} was removed", "removed") from error
                ancestor = posixpath.dirname(ancestor)

    async def upload_tar(self, tar: bytes, path: str) -> None:
        """Extract an archive, such as that of a `Download`, in the folder ``path``, which must be there.

        Raises:
            SandboxFailure: the daemon refuses, or there is no such folder.
        """
        try:
            await self._put(path, tar)
        except NotFound as error:
            raise SandboxFailure(f"machine {self.id} has no folder {path}") from error

    async def _put(self, path: str, archive: bytes) -> None:
        try:
            await self.client.call(lambda api: api.put_archive(self.container, path, archive))
        except NotFound:
            raise
        except APIError as error:
            raise SandboxFailure(f"files cannot be written to {path} of machine {self.id}: {message(error)}") from error

    async def download(self, path: str, max_bytes: int = COPY_BYTES) -> archives.Download:
        """Return a file or a folder of the machine; also of a stopped machine.

        The archive's first member is called like the last piece of ``path``.

        Raises:
            DownloadError: there is no such file, or it has more than ``max_bytes``.
        """
        target = _absolute(path)

        def get(api: DockerApi) -> archives.Download:
            chunks, _ = api.get_archive(self.container, target)
            try:
                return archives.check(chunks, max_bytes)
            finally:
                chunks.close()

        try:
            return await self.client.call(get)
        except NotFound as error:
            raise archives.DownloadError(f"machine {self.id} has no {path}") from error
        except APIError as error:
            raise SandboxFailure(f"{path} of machine {self.id} cannot be read: {message(error)}") from error

    async def _ids(self, owner: str) -> tuple[int, int]:
        """Return user and group id of ``owner``, by the machine's own ``/etc/passwd`` if it is a name."""
        user, _, group = owner.partition(":")
        if user.isdecimal():
            return int(user), int(group or user)
        passwd = (await self.download("/etc/passwd", 2**20)).files().get("passwd", b"")
        for line in passwd.decode(errors="replace").splitlines():
            fields = line.split(":")
            if len(fields) > 3 and fields[0] == user:
                return int(fields[2]), int(group or fields[3])
        raise SandboxFailure(f"machine {self.id} has no user {user!r}")

    async def snapshot(self) -> str:
        """Return the id of an image with the machine's files as they are now; the machine pauses meanwhile.

        Machines that are opened from it start with these files, and with no process of the machine. Content of volumes that the
        image declares is not in it. It lasts until the owner's machines are closed.
        """
        labels = await self._lifecycle.on_snapshot(self)
        image = await self.client.call(lambda api: api.commit(self.container, conf={"Labels": labels}))
        return str(image["Id"])

    async def service(self, name: str) -> Machine:
        """Return a service of this machine, to run commands in it and to copy its files; it is closed with the machine.

        Raises:
            SandboxFailure: there is no such service.
        """
        container = await self._service_container(name)
        # Its network is the machine's: nothing of agentrl listens in the service.
        spec = self.spec.model_copy(update={"network": "no-network", "allowed_hosts": ()})
        return Machine(self.client, container, f"service-{name}", spec, self._folder, self._lifecycle)

    async def service_address(self, name: str) -> str:
        """Return the address of a service in the machine's network.

        Raises:
            SandboxFailure: there is no such service.
        """
        container = await self._service_container(name)
        details = await self.client.call(lambda api: api.inspect_container(container))
        if details["HostConfig"]["NetworkMode"].startswith("container:"):
            return "127.0.0.1"
        return details["NetworkSettings"]["Networks"][f"agentrl-{self.id}"]["IPAddress"]

    async def _service_container(self, name: str) -> str:
        selected = (f"{MACHINE_LABEL}={self.id}", f"{SERVICE_LABEL}={name}")
        containers = await self.client.call(lambda api: leased_containers(api, *selected))
        if not containers:
            raise SandboxFailure(f"machine {self.id} has no service {name}")
        return containers[0]["Id"]

    async def wait_healthy(self, check: Healthcheck) -> None:
        """Wait until a health check passes.

        Raises:
            SandboxFailure: it failed as often as it may.
        """
        loop = asyncio.get_running_loop()
        start, failed = loop.time(), 0
        while True:
            result = await self.run(Command(check.command, wall_s=check.timeout_s, output_bytes=2048))
            if result.exit_code == 0:
                return
            is_starting = loop.time() - start < check.start_period_s
            failed += not is_starting
            if failed >= check.retries:
                how = "took too long" if result.timed_out else f"ended with {result.exit_code}"
                raise SandboxFailure(
                    f"machine {self.id} is not healthy: {check.command!r} {how}: {result.output[-500:]}"
                )
            await asyncio.sleep(check.start_interval_s if is_starting else check.interval_s)

    async def kill_all(self) -> None:
        """Kill all of the machine's processes, by the kernel, and start the first one again; files stay.

        The first one is the image's entry point, which is a file of the machine like any other. Use `stop` where nothing may run.
        """
        await self.stop()
        await self.client.call(lambda api: api.start(self.container))
        await self._lifecycle.on_start(self)

    async def stop(self) -> None:
        """Kill all of the machine's processes, by the kernel; files can still be read and written."""

        def kill(api: DockerApi) -> None:
            with suppress(APIError):  # it does not run
                api.kill(self.container)
            api.wait(self.container)

        await self.client.call(kill)

    async def close(self) -> None:
        """Remove the machine with all that belongs to it. A second call does nothing."""
        if not self._is_closed:
            self._is_closed = True
            await self._lifecycle.on_close(self)
            await asyncio.to_thread(shutil.rmtree, self._folder, ignore_errors=True)

    async def __aenter__(self) -> Self:
        """Return the machine."""
        return self

    async def __aexit__(self, *exception: object) -> None:
        """Close the machine."""
        await self.close()


def _absolute(path: str) -> str:
    absolute = posixpath.normpath(path)
    if not absolute.startswith("/") or absolute == "/":
        raise ValueError(f"{path!r} is no absolute path below /")
    return absolute
