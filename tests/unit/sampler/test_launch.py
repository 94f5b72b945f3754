import socket
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


def test_options_become_flags() -> None:
    options = {"mem_fraction_static": 0.5, "enable_memory_saver": True, "no": False, "none": None, "several": [1, 2]}
    assert _flags(options) == ["--mem-fraction-static", "0.5", "--enable-memory-saver", "--several", "1", "2"]
