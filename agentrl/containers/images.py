"""Images of machines: pulled, or built under a tag that is the hash of what they are made from, so that none is built twice."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import logging
import sys
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path

from docker.errors import APIError, ImageNotFound

from agentrl.config.containers import ContainersConfig
from agentrl.containers.build_process import BuildRequest, context_files
from agentrl.containers.daemon import DaemonClient, message
from agentrl.containers.docker_api import ImageDetails
from agentrl.containers.dockerfile import Dockerfile
from agentrl.containers.spec import BuildSpec
from agentrl.core.errors import ConfigError, MissingError, SandboxFailure

_log = logging.getLogger(__name__)

REPOSITORY = "agentrl-task"
"""Repository of tags of built images."""
LOG_LINES = 30
"""Lines of a failed build that the message has."""
LOCK_POLL_S = 0.2

Progress = Callable[[str], None]
"""Receives lines of a build or pull."""


class Images:
    """Images of one daemon. Callers wait for an image that is being built.

    Args:
        client: the daemon.
        config: the section ``containers``.
        state: folder of locks, which the processes of this machine share.
    """

    def __init__(self, client: DaemonClient, config: ContainersConfig, state: Path) -> None:
        self._state = state
        self._client = client
        self._config = config
        self._slots = asyncio.Semaphore(config.builds)
        self._pending: dict[str, asyncio.Task[str]] = {}

    async def ensure(self, image: str | None, build: BuildSpec | None, progress: Progress | None = None) -> str:
        """Return the id of an image, after pulling or building it if it is missing.

        Args:
            image: a name; None: that of the build.
            build: the build, without an image.
            progress: called with the daemon's messages.

        Raises:
            ConfigError: the build has no Dockerfile.
            MissingError: it cannot be pulled.
            SandboxFailure: the build failed, took too long, or the daemon is lost.
        """
        if image is None:
            assert build is not None, "MachineSpec has an image or a build"
            image = await asyncio.to_thread(build_tag, build)
            find = partial(self._find_built, image, build)
            make = partial(self._build, image, build, progress)
        else:
            find = partial(self.find, image)
            make = partial(self._pull, image, progress)
        if (image_id := await find()) is not None:
            return image_id
        if (task := self._pending.get(image)) is None:
            task = asyncio.create_task(self._make(image, find, make), name=f"image {image}")
            self._pending[image] = task
            task.add_done_callback(lambda _: self._pending.pop(image, None))
        return await asyncio.shield(task)

    async def find(self, image: str) -> str | None:
        """Return the id of an image that the daemon has; None if it has none."""
        details = await self._inspect(image)
        return None if details is None else details["Id"]

    async def _inspect(self, image: str) -> ImageDetails | None:
        try:
            return await self._client.call(lambda api: api.inspect_image(image))
        except ImageNotFound:
            return None

    async def _find_built(self, tag: str, build: BuildSpec) -> str | None:
        """Return the id of a built image; None if there is none, or the image that it was built from has been rebuilt since.

        What is built from an image has its layers. Without that image there is nothing to compare.
        """
        if (details := await self._inspect(tag)) is None:
            return None
        name = await asyncio.to_thread(_last_base, build)
        base = None if name is None else await self._inspect(name)
        if base is not None and not _is_built_from(details, base):
            _log.info("%s is built again: %s was rebuilt since", tag, name)
            return None
        return details["Id"]

    async def close(self) -> None:
        """End builds and pulls."""
        tasks = list(self._pending.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _make(
        self,
        image: str,
        find: Callable[[], Coroutine[None, None, str | None]],
        make: Callable[[], Coroutine[None, None, None]],
    ) -> str:
        async with self._slots, self._lock(image):
            if (image_id := await find()) is not None:  # another process has made it meanwhile
                return image_id
            await make()
        image_id = await self.find(image)
        if image_id is None:
            raise SandboxFailure(f"the Docker daemon at {self._client.url} has lost the image {image}")
        return image_id

    @asynccontextmanager
    async def _lock(self, image: str) -> AsyncIterator[None]:
        """Wait until no other process makes this image at this daemon."""
        name = hashlib.sha256(f"{self._client.url} {image}".encode()).hexdigest()[:24]
        self._state.mkdir(parents=True, exist_ok=True)
        with (self._state / f"image-{name}.lock").open("a") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    await asyncio.sleep(LOCK_POLL_S)
            yield

    async def _pull(self, image: str, progress: Progress | None) -> None:
        if image.startswith(("sha256:", f"{REPOSITORY}:")):
            raise MissingError(f"the Docker daemon at {self._client.url} has no image {image}, and no registry has it")
        _log.info("pulling %s to %s", image, self._client.url)
        _, separator, tag = image.rpartition(":")
        name = image if (separator and "/" not in tag) or "@" in image else f"{image}:latest"
        request: BuildRequest = {
            "daemon": self._client.url,
            "pull": name,
            "context": "",
            "dockerfile": "",
            "memory": 0,
            "options": {"tag": "", "buildargs": {}},
        }
        try:
            await self._run(request, self._config.pull_s, progress)
        except SandboxFailure as error:
            raise MissingError(
                f"the Docker daemon at {self._client.url} has no image {image}, and cannot pull it ({error}): load it with "
                "`docker load`, or set the task's image to one that it has (containers.pull_s limits the time)"
            ) from error

    async def _build(self, tag: str, build: BuildSpec, progress: Progress | None) -> None:
        _log.info("building %s from %s at %s", tag, build.context, self._client.url)
        request: BuildRequest = {
            "daemon": self._client.url,
            "pull": "",
            "context": str(build.context),
            "dockerfile": build.dockerfile,
            "memory": self._config.build_memory_mb * 2**20,
            "options": {"tag": tag, "buildargs": build.args},
        }
        limit_s = build.timeout_s if build.timeout_s is not None else self._config.build_s
        try:
            await self._run(request, limit_s, progress)
        except SandboxFailure as error:
            raise SandboxFailure(f"the image of {build.context / build.dockerfile} cannot be built: {error}") from error

    async def _run(self, request: BuildRequest, limit_s: float, progress: Progress | None) -> None:
        """Run a build or pull in a process, whose end closes the connection, with which the daemon ends its work."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "agentrl.containers.build_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
            limit=2**20,
        )
        lines: list[str] = []
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(f"{json.dumps(request)}\n".encode())
                while line := await process.stdout.readline():
                    text = line.decode(errors="replace").rstrip()
                    lines = [*lines[1 - LOG_LINES :], text]
                    if progress is not None and text:
                        progress(text)
                status = await process.wait()
        except TimeoutError as error:
            raise SandboxFailure(f"it takes more than {limit_s:g} s\n" + "\n".join(lines)) from error
        finally:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if status != 0:
            raise SandboxFailure("\n".join(lines) or f"the process of the build ended with {status}")


def build_tag(build: BuildSpec) -> str:
    """Return the tag of a build: the hash of its files, their modes, its Dockerfile and its arguments.

    Raises:
        ConfigError: there is no Dockerfile.
    """
    digest = hashlib.sha256(json.dumps([build.dockerfile, dict(sorted(build.args.items()))]).encode())
    for name in context_files(build.context, build.dockerfile):
        path = build.context / name
        if path.is_symlink():
            kind, content = "link", str(path.readlink()).encode()
        elif path.is_file():
            kind, content = f"{path.stat().st_mode & 0o777:o}", _file_digest(path)
        else:
            kind, content = "folder", b""
        digest.update(json.dumps([name, kind]).encode() + content)
    return f"{REPOSITORY}:{digest.hexdigest()[:24]}"


def _last_base(build: BuildSpec) -> str | None:
    text = (build.context / build.dockerfile).read_text(errors="surrogateescape")
    return Dockerfile(text).last_base(build.args)


def _is_built_from(image: ImageDetails, base: ImageDetails) -> bool:
    layers, base_layers = (details["RootFS"].get("Layers", []) for details in (image, base))
    return layers[: len(base_layers)] == base_layers


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").digest()


async def prebuild(
    images: Mapping[str, Images],
    images_by_name: Mapping[str, tuple[str | None, BuildSpec | None]],
    progress: Callable[[str, str], None],
) -> dict[str, str]:
    """Make images at all daemons; a failed one does not stop the others.

    Args:
        images: those of each daemon, by its address.
        images_by_name: arguments of `Images.ensure`, by a name for messages.
        progress: gets a name and a line about it.

    Returns:
        Why images could not be made, by name.
    """
    failures: dict[str, str] = {}

    async def make(name: str, url: str) -> None:
        image, build = images_by_name[name]
        label = name if len(images) == 1 else f"{name} at {url}"
        try:
            image_id = await images[url].ensure(image, build, lambda line: progress(label, line))
            progress(label, f"is there: {image_id.removeprefix('sha256:')[:12]}")
        except (ConfigError, MissingError, SandboxFailure, APIError) as error:
            failures[label] = message(error)

    await asyncio.gather(*(make(name, url) for name in images_by_name for url in images))
    return failures
