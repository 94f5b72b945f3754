import ctypes
import fcntl
import os
import socket
import struct
from pathlib import Path

import pytest
from gateway_episodes import make_test_renderer

from agentrl.render.renderer import ChatRenderer

ROOT = Path(__file__).parent.parent.parent
ENVIRONMENTS = Path(os.environ.get("AGENTRL_AGENTS", ROOT / ".venv-agents"))
"""Environments of programs: a folder each with ``bin``; `make test-agents` builds them."""
_NEW_NETWORK = 0x40000000
_NEW_USER = 0x10000000
_SET_FLAGS = 0x8914
_UP = 1


@pytest.fixture(scope="session")
def loopback_only() -> None:
    """Leave the network: these tests, and the programs that they start, reach nothing but the loopback device."""
    uid, gid = os.getuid(), os.getgid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_NETWORK | (_NEW_USER if uid else 0)):
        pytest.fail(f"no network namespace can be made: {os.strerror(ctypes.get_errno())}")
    if uid:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{uid} {uid} 1")
        Path("/proc/self/gid_map").write_text(f"{gid} {gid} 1")
    with socket.socket() as control:
        fcntl.ioctl(control, _SET_FLAGS, struct.pack("16sh14x", b"lo", _UP))


@pytest.fixture(scope="session")
def renderer() -> ChatRenderer:
    return make_test_renderer()


@pytest.fixture
def bin_folder(request: pytest.FixtureRequest) -> Path:
    """The folder with the programs of the environment that the parameter names."""
    folder = ENVIRONMENTS / request.param / "bin"
    if not folder.is_dir():
        pytest.skip(f"{folder} is missing: make test-agents builds it")
    request.getfixturevalue("loopback_only")
    return folder
