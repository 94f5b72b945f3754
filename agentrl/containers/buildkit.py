"""Builds by the daemon's BuildKit: a context in the request's body, without a client's session.

So secrets and keys of the client (``RUN --mount=type=secret``, ``type=ssh``) are not there, nor its logins at registries: images
that a Dockerfile begins with are pulled before.
"""

from __future__ import annotations

import base64
import gzip
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import IO

import docker

TRACE = "moby.buildkit.trace"
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
"""Wire types of protocol buffers."""


def start_build(
    api: docker.APIClient, context: IO[bytes], *, tag: str, dockerfile: str, arguments: Mapping[str, str]
) -> Iterable[Mapping[str, object]]:
    """Begin a build, and return its messages as they come.

    Args:
        api: of the daemon.
        context: a tar archive, from its beginning.
        tag: of the image.
        dockerfile: its name in the archive.
        arguments: of the build.

    Raises:
        docker.errors.APIError: the daemon refuses.
    """
    parameters = {"version": "2", "t": tag, "dockerfile": dockerfile, "buildargs": json.dumps(dict(arguments))}
    if not api.networks(names=["bridge"]):
        parameters["networkmode"] = "none"  # as the classic builder, at a daemon without one
    # BuildKit takes a body for an archive if it is compressed; of plain ones it knows some kinds only.
    with tempfile.TemporaryFile() as body:
        with gzip.open(body, "wb", compresslevel=1) as compressed:
            shutil.copyfileobj(context, compressed)
        body.seek(0)
        headers = {"Content-Type": "application/x-tar"}
        response = api._post(api._url("/build"), data=body, params=parameters, headers=headers, stream=True)
    messages: Iterable[Mapping[str, object]] = api._stream_helper(response, decode=True)
    return messages


class TraceReader:
    """Reads the progress of a build: names of its steps as they begin, and what they print.

    Args:
        report: gets the lines.
    """

    def __init__(self, report: Callable[[str], None]) -> None:
        self._report = report
        self._begun: set[bytes] = set()

    def read(self, message: Mapping[str, object]) -> None:
        """Read a message with the id `TRACE`."""
        for number, status in _fields(base64.b64decode(str(message["aux"]))):
            fields = dict(_fields(status))
            if number == 1:
                digest, name, has_begun = fields.get(1, b""), fields.get(3, b""), 5 in fields
                if has_begun and digest not in self._begun and not name.startswith(b"[internal]"):
                    self._begun.add(digest)
                    self._report(name.decode(errors="replace"))
            elif number == 3:
                for line in fields.get(4, b"").decode(errors="replace").splitlines():
                    self._report(line)


def _fields(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the fields of a protocol buffer that are strings or messages, with their numbers."""
    position = 0

    def read_varint() -> int:
        nonlocal position
        value = shift = 0
        while True:
            byte = data[position]
            position += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while position < len(data):
        key = read_varint()
        number, wire_type = key >> 3, key & 7
        if wire_type == _VARINT:
            read_varint()
        elif wire_type == _BYTES:
            size = read_varint()
            yield number, data[position : position + size]
            position += size
        elif wire_type in (_FIXED64, _FIXED32):
            position += 8 if wire_type == _FIXED64 else 4
        else:
            raise ValueError(f"a protocol buffer has no wire type {wire_type}")
