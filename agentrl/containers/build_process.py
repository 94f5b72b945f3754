"""Builds or pulls one image: a process, so that its end at any time ends the daemon's work too.

Its request comes as a line of JSON on standard input, the daemon's messages go to standard output.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TypedDict

import docker
from docker.errors import DockerException, ImageNotFound
from docker.utils.build import create_archive, exclude_paths

from agentrl.containers.buildkit import TRACE, TraceReader, start_build
from agentrl.containers.daemon import is_podman
from agentrl.containers.dockerfile import Dockerfile
from agentrl.core.errors import ConfigError

PIPE = 1
NO_LIMIT = None
"""The process that started this one has the limit of time."""


class BuildOptions(TypedDict):
    """Arguments of both builders."""

    tag: str
    buildargs: dict[str, str]


class BuildRequest(TypedDict):
    """What to make."""

    daemon: str
    """The daemon's address."""
    pull: str
    """Name and tag of the image to pull; empty: it is built."""
    context: str
    """Folder of the build."""
    dockerfile: str
    """Its name in the folder."""
    memory: int
    """Limit of a step of the classic builder, bytes; BuildKit has none."""
    options: BuildOptions


class BuildError(Exception):
    """The daemon reports that it failed."""


def main() -> None:
    """Make the image of the request on standard input."""
    request: BuildRequest = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_parent, daemon=True).start()
    api = docker.APIClient(base_url=request["daemon"], version="auto", timeout=NO_LIMIT)
    try:
        if request["pull"]:
            _report_messages(api.pull(request["pull"], stream=True, decode=True))
        else:
            _build(api, request)
    except (BuildError, ConfigError, DockerException, OSError) as error:
        _report(str(error))
        os._exit(1)
    os._exit(0)


def _build(api: docker.APIClient, request: BuildRequest) -> None:
    context, name, options = request["context"], request["dockerfile"], request["options"]
    dockerfile = Dockerfile((Path(context) / name).read_text(errors="surrogateescape"))
    # Podman's one builder has the instructions of BuildKit.
    need = None if is_podman(api.version(api_version=False)) else dockerfile.needs_buildkit
    with tempfile.TemporaryFile() as file:
        if need is None:
            create_archive(context, files=context_files(Path(context), name), fileobj=file)
            file.seek(0)
            limits = {"memory": request["memory"], "memswap": request["memory"]}
            messages = api.build(
                fileobj=file,
                custom_context=True,
                rm=True,
                forcerm=True,
                decode=True,
                dockerfile=name,
                container_limits=limits,
                **options,
            )
            _report_messages(messages)
            return
        text = dockerfile.without_frontend()
        files = [path for path in context_files(Path(context), name) if path != name]
        create_archive(context, files=files, fileobj=file, extra_files=[(name, text)])
        file.seek(0)
        for image in dockerfile.base_images(options["buildargs"]):
            _pull_missing(api, image)
        _report(f"{need}: built by BuildKit")
        try:
            _report_messages(
                start_build(api, file, tag=options["tag"], dockerfile=name, arguments=options["buildargs"])
            )
        except BuildError as error:
            raise BuildError(f"{error}{_buildkit_advice(str(error))}") from error


def _pull_missing(api: docker.APIClient, image: str) -> None:
    try:
        api.inspect_image(image)
    except ImageNotFound:
        _report_messages(api.pull(image, stream=True, decode=True))


def _buildkit_advice(error: str) -> str:
    elsewhere = "build the image with `docker buildx build`, and name it in place of the Dockerfile"
    if "parse error" in error:
        return f"\nThe daemon's version of BuildKit does not have this instruction: update Docker, or {elsewhere}"
    if "no active session" in error or "no sessions" in error or "secret" in error:
        return f"\nBuilds have no secrets, keys or logins of this machine: {elsewhere}"
    return ""


def context_files(context: Path, dockerfile: str) -> Sequence[str]:
    """Return the relative paths of a build's files and folders, in order, without what its ``.dockerignore`` names.

    Raises:
        ConfigError: there is no Dockerfile.
    """
    if not (context / dockerfile).is_file():
        raise ConfigError(f"{context / dockerfile}: there is no such file to build an image from")
    ignored = context / ".dockerignore"
    patterns = []
    if ignored.is_file():
        lines = (line.strip() for line in ignored.read_text().splitlines())
        patterns = [line for line in lines if line and not line.startswith("#")]
    return sorted(name for name in exclude_paths(str(context), patterns, dockerfile=dockerfile) if name)


def _report_messages(messages: Iterable[Mapping[str, object]]) -> None:
    trace = TraceReader(_report)
    for entry in messages:
        if "error" in entry:
            raise BuildError(str(entry["error"]).strip())
        if entry.get("id") == TRACE:
            trace.read(entry)
            continue
        text = str(entry.get("stream") or "")
        if "status" in entry and "progressDetail" not in entry:
            text = f"{entry['status']} {entry.get('id', '')}"
        if text.strip():
            _report(text.strip())


def _report(text: str) -> None:
    """Write a line to the pipe that the process reads that started this one."""
    os.write(PIPE, f"{text}\n".encode())


def _end_with_parent() -> None:
    """End with the process that started this one, which holds standard input open."""
    sys.stdin.read()
    os._exit(1)


if __name__ == "__main__":
    main()
