"""Sandbox backends by name: registered ones, files, what is refused, and one of another package at a tool server."""

import os
import sys
from pathlib import Path

import httpx
import pytest

from agentrl.config.sandbox import SandboxConfig
from agentrl.core.child_process import ChildProcess, reserve_port
from agentrl.core.errors import ConfigError, MissingError, ToolServerError, UnknownNameError
from agentrl.core.registry import SANDBOXES, names
from agentrl.sandbox.registry import backend_class, make_backend
from agentrl.sandbox.unsafe_subprocess import UnsafeBackend

PACKAGE = '''
import asyncio, sys, time
from agentrl.core.errors import MissingError
from agentrl.core.types import ToolStatus
from agentrl.sandbox.base import Outcome, Sandbox, SandboxBackend


class Plain(Sandbox):
    alive = True

    def __init__(self, id):
        self.id = id

    async def run(self, job):
        begin = time.monotonic()
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", job.code, stdout=-1, stderr=-1)
        out, err = await process.communicate()
        status = ToolStatus.ERROR if process.returncode else ToolStatus.OK
        return Outcome(status, out.decode(), err.decode(), process.returncode, time.monotonic() - begin)

    async def write_file(self, path, content):
        raise PermissionError(path)

    async def read_file(self, path, max_bytes=2**20):
        raise FileNotFoundError(path)

    async def close(self):
        self.alive = False


class PlainBackend(SandboxBackend):
    """One Python process per job, on this machine."""

    name = "plain"
    isolated = False

    @classmethod
    def check(cls, config):
        if config.python == "python4":
            raise MissingError("sandbox.python=python4: not released")

    async def start(self):
        pass

    async def open(self, session_id):
        return Plain(session_id)

    async def close(self):
        pass


class Unfinished(SandboxBackend):
    async def start(self):
        pass
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    file = tmp_path / "plain_sandbox.py"
    file.write_text(PACKAGE)
    return file


def test_shipped_backends_are_registered_as_any_others() -> None:
    assert {"bubblewrap", "docker", "unsafe_subprocess"} <= set(names(SANDBOXES))
    assert backend_class("unsafe_subprocess") is UnsafeBackend
    assert [backend_class(name).isolated for name in ("bubblewrap", "docker", "unsafe_subprocess")] == [
        True,
        True,
        False,
    ]
    for name in names(SANDBOXES):
        assert make_backend(SandboxConfig(backend=name)).name == name


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(
        UnknownNameError, match=r"unknown sandbox backend 'bublewrap' \(sandbox\.backend\)\. Did you mean"
    ):
        make_backend(SandboxConfig(backend="bublewrap"))


def test_a_class_in_a_file(file: Path) -> None:
    config = SandboxConfig(backend=f"{file}:PlainBackend", python="python4")
    assert make_backend(config).config is config
    with pytest.raises(MissingError, match="not released"):
        backend_class(config.backend).check(config)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Plain", "is no subclass of agentrl.sandbox.base.SandboxBackend"),
        ("PACKAGE", "has no 'PACKAGE'; it has: .*PlainBackend"),
        ("Unfinished", "Unfinished does not implement close, open"),
    ],
)
def test_a_class_that_is_no_backend(file: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_backend(SandboxConfig(backend=f"{file}:{name}"))


@pytest.mark.usefixtures("forked_starts")
def test_a_backend_of_another_package_runs_the_code_of_a_tool_server(file: Path, tmp_path: Path) -> None:
    """The package lies as an installer leaves it: the module, and next to it the metadata with the entry point."""
    metadata = tmp_path / "plain_sandbox-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: plain-sandbox\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[{SANDBOXES}]\nplain = plain_sandbox:PlainBackend\n")
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    with reserve_port() as port:
        command = [sys.executable, "-m", "agentrl.cli.main", "tools", "serve", "python", "sandbox.backend=plain"]
        command.append(f"--port={port}")
        started = ChildProcess.start(
            command, log=tmp_path / "log.txt", name="server", env={"PYTHONPATH": path}, error=ToolServerError
        )
        with started as child:
            url = f"http://127.0.0.1:{port}"
            child.wait_healthy(f"{url}/health", 60)
            with httpx.Client(base_url=url, trust_env=False, timeout=20) as client:
                session = client.post("/sessions").json()["session_id"]
                body = {"call_id": "1", "tool": "python", "arguments": {"code": "print(6 * 7)"}}
                reply = client.post(f"/sessions/{session}/call", json=body).json()
            assert (reply["status"], reply["content"]) == ("ok", "42")
            assert f"python serve on {url} (plain, " in child.log_tail()
            assert "sandbox.backend=plain: NOTHING is sandboxed" in child.log_tail()


def test_images_need_a_backend_that_has_them() -> None:
    with pytest.raises(ConfigError, match=r"sandbox\.images=team/\*: sandbox\.backend=bubblewrap has no images"):
        make_backend(SandboxConfig(images=("team/*",)))
    make_backend(SandboxConfig(backend="docker", images=("team/*",)))
