"""What happens when the real server's start fails, and when the process that started it is killed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from engine_tiny import save_model

from agentrl.errors import ConfigError
from agentrl.sampler.launch import launch_sglang

pytestmark = pytest.mark.sglang

PARENT = """
import pathlib, sys, time
from agentrl.sampler.launch import launch_sglang
python, folder = map(pathlib.Path, sys.argv[1:])
engine = launch_sglang(folder / "model", log=folder / "log", options={"device": "cpu"}, python=python, timeout_s=200)
print(engine.child.pid, flush=True)
time.sleep(600)
"""


def test_an_option_that_the_server_does_not_know(sglang_python: Path, tmp_path: Path) -> None:
    options = {"device": "cpu", "mem_fraction_statik": 0.5}
    with pytest.raises(ConfigError, match=r"^sampler\.sglang\.mem_fraction_statik: SGLang refuses it"):
        launch_sglang(tmp_path, log=tmp_path / "log", options=options, python=sglang_python, timeout_s=200)
    with pytest.raises(ConfigError, match=r"^sampler\.sglang\.tp_size: SGLang refuses its value .*'many'"):
        launch_sglang(
            tmp_path, log=tmp_path / "log", options={"device": "cpu", "tp_size": "many"}, python=sglang_python
        )


def test_nothing_is_left_when_the_parent_is_killed(sglang_python: Path, tmp_path: Path) -> None:
    save_model(tmp_path / "model")
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(sglang_python), str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert parent.stdout is not None
        server = psutil.Process(int(parent.stdout.readline()))
        family = [server, *server.children(recursive=True)]
        assert any("scheduler" in process.name() + " ".join(process.cmdline()) for process in family)
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 20
    while left := [one for one in family if one.is_running() and one.status() != psutil.STATUS_ZOMBIE]:
        assert time.monotonic() < deadline, left
        time.sleep(0.05)
