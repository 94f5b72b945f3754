"""Builds or pulls one image: a process, so that its end at any time ends the daemon's work too.

Its request comes as a line of JSON on standard input, what the daemon says goes to standard output.
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
from docker.errors import DockerException
from docker.utils.build import create_archive, exclude_paths

from agentrl.core.errors import ConfigError

PIPE = 1
NO_LIMIT = None
"""The process that started this one has the limit of time."""


class BuildRequest(TypedDict):
    """What to make."""

    daemon: str
    """The daemon's address."""
    pull: str
    """Name and tag of the image to pull; empty: it is built."""
    context: str
    """Folder of the build."""
    options: dict[str, object]
    """Further arguments of `docker.APIClient.build`: ``tag``, ``dockerfile``, ``buildargs``."""


class BuildError(Exception):
    """The daemon says that it failed."""


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
    except (BuildError, DockerException, OSError) as error:
        _report(str(error))
        os._exit(1)
    os._exit(0)


def _build(api: docker.APIClient, request: BuildRequest) -> None:
    context, dockerfile = request["context"], str(request["options"]["dockerfile"])
    with tempfile.TemporaryFile() as file:
        create_archive(context, files=context_files(Path(context), dockerfile), fileobj=file)
        file.seek(0)
        messages = api.build(
            fileobj=file, custom_context=True, rm=True, forcerm=True, decode=True, **request["options"]
        )
        _report_messages(messages)


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
    for entry in messages:
        if "error" in entry:
            raise BuildError(str(entry["error"]).strip())
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
