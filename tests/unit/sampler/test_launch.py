import socket
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from agentrl.errors import ConfigError, EngineError, PortInUseError
from agentrl.sampler import launch
from agentrl.sampler.launch import _flags, launch_embedded, launch_sglang


def test_a_port_in_use_names_the_key(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(PortInUseError, match=rf"sampler\.port={port} .*sampler\.port to a free port"):
            launch_embedded(tmp_path, log=tmp_path / "log", port=port)


def test_an_engine_that_dies_says_why(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"(?s)exit status 1.*ModelError.*nowhere"):
        launch_embedded(tmp_path / "nowhere", log=tmp_path / "log", timeout_s=60)


def test_sglang_that_is_not_installed_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'agentrl\[sglang\]'"):
        launch_sglang(tmp_path, log=tmp_path / "log")


SGLANG = """
import argparse, http.server, pathlib, sys, time
parser = argparse.ArgumentParser()
parser.add_argument("--port", type=int)
arguments, _ = parser.parse_known_args()
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
pathlib.Path(sys.argv[0]).with_name("port").write_text(str(arguments.port))
gate = pathlib.Path(sys.argv[0]).with_name("gate")
while not gate.exists():
    time.sleep(0.01)
http.server.HTTPServer(("127.0.0.1", arguments.port), Health).serve_forever()
"""


def test_sglangs_port_is_kept_for_it_while_it_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in that binds its port only when the test has tried to take it."""
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").write_text(SGLANG)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with ThreadPoolExecutor(1) as pool:
        starting = pool.submit(launch_sglang, tmp_path, log=tmp_path / "log", timeout_s=30)
        try:
            port = wait_for_number(tmp_path / "sglang" / "port")
            with socket.socket() as thief, pytest.raises(OSError, match="in use"):
                thief.bind(("127.0.0.1", port))
        finally:
            (tmp_path / "sglang" / "gate").touch()
        engine = starting.result()
    try:
        assert engine.url == f"http://127.0.0.1:{port}"
        assert engine.alive()
    finally:
        engine.stop()


def wait_for_number(path: Path) -> int:
    deadline = time.monotonic() + 20
    while not (path.exists() and path.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def test_options_become_flags() -> None:
    options = {"mem_fraction_static": 0.5, "enable_memory_saver": True, "no": False, "none": None, "several": [1, 2]}
    assert _flags(options) == ["--mem-fraction-static", "0.5", "--enable-memory-saver", "--several", "1", "2"]
