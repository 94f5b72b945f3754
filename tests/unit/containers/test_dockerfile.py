"""What Dockerfiles need of their builder."""

import base64

import pytest

from agentrl.containers.buildkit import TraceReader
from agentrl.containers.dockerfile import Dockerfile
from agentrl.core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "need"),
    [
        ("FROM a\nRUN make --mount=x\nCOPY --from=b --chown=1 a b\n", None),
        ("FROM a\n# RUN --mount=type=cache x\nRUN echo $((1<<2)) \\\n  && cat a\n", None),
        ("FROM a\nrun --mount=type=cache,target=/c \\\n  make\n", "RUN --mount"),
        ("FROM a\nRUN \\\n# why\n --network=none make\n", "RUN --network"),
        ("FROM a\nCOPY --chown=1 --chmod=755 a b\n", "COPY --chmod"),
        ("FROM a\nADD --checksum=sha256:0 http://x y\n", "ADD --checksum"),
        ("FROM a\nRUN <<EOF\nmake\nEOF\n", "RUN <<"),
        ("FROM a\nCOPY <<-'END' /file\ntext\nEND\n", "COPY <<"),
        ("# syntax=docker/dockerfile:1\nFROM a\n", None),
        ("FROM a\nRUN --mount=type=ssh \\", "RUN --mount"),
    ],
)
def test_instructions_that_buildkit_alone_has(text: str, need: str | None) -> None:
    assert Dockerfile(text).needs_buildkit == need


def test_the_frontend_is_the_daemons_own() -> None:
    for frontend in ("docker/dockerfile:1", "docker.io/docker/dockerfile:1.7-labs", "docker/dockerfile:1@sha256:ab"):
        text = f"# escape=\\\n# syntax = {frontend}\nFROM a\n# syntax=x\n"
        assert Dockerfile(text).without_frontend() == "# escape=\\\n#\nFROM a\n# syntax=x\n"
    with pytest.raises(ConfigError, match="syntax=example/frontend: only docker/dockerfile is supported"):
        Dockerfile("# syntax=example/frontend\nFROM a\n").without_frontend()


def test_images_that_a_dockerfile_begins_with() -> None:
    text = (
        'ARG TAG=1\nARG BASE="debian"\nARG NONE\nFROM --platform=linux/amd64 ${BASE}:$TAG AS build\nARG TAG=3\n'
        "FROM registry:5000/x${NONE:-/y}\nFROM scratch\nCOPY --from=build a b\nCOPY --from=0 a b\nCOPY --from=tools:2 a b\n"
        "RUN --mount=type=bind,from=mounted,target=/m ls\nFROM build\n"
    )
    assert Dockerfile(text).base_images({}) == ["debian:1", "registry:5000/x/y", "tools:2", "mounted"]
    assert Dockerfile(text).base_images({"TAG": "2", "NONE": "z"})[:2] == ["debian:2", "registry:5000/xz"]
    assert Dockerfile(text).last_base({"TAG": "2"}) == "debian:2"
    assert Dockerfile("FROM a AS b\nFROM B AS c\nFROM c\nCOPY --from=d e f\n").last_base({}) == "a"
    assert Dockerfile("FROM a AS b\nFROM scratch\nCOPY --from=b c c\n").last_base({}) is None


def field(number: int, content: bytes) -> bytes:
    return bytes([number << 3 | 2, len(content)]) + content


def test_progress_of_a_build() -> None:
    """Messages are a status with steps (1), and lines that they print (3)."""
    times = field(5, b"\x08\x96\x01\x10\x01")
    step = field(1, b"sha256:1") + field(3, b"[2/2] RUN make")
    waiting, begun = field(1, step), field(1, step + times)
    printed = field(3, field(1, b"sha256:1") + b"\x18\x01" + b"\x21" + bytes(8) + field(4, "ä\nb\n".encode()))
    internal = field(1, field(1, b"sha256:0") + field(3, b"[internal] load") + times)
    lines: list[str] = []
    reader = TraceReader(lines.append)
    for data in (internal + waiting, begun, begun + printed):
        reader.read({"aux": base64.b64encode(data).decode()})
    assert lines == ["[2/2] RUN make", "ä", "b"]
