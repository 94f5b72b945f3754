"""SGLang on a CPU does what every engine must do; `tests/conformance` says what. And it ends with who started it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from conformance.control import Control
from conformance.endpoint import CHAT_TEMPLATE, Endpoint
from conformance.engine import Engine, Traits, running
from conformance.memory import Memory
from conformance.router import ThroughRouter
from conformance.sampling import Sampling
from conformance.scoring import Scoring
from conformance.syncs import Syncs
from conformance.weights import Weights
from deadlines import wait_for_exit
from packaging.version import Version

pytestmark = pytest.mark.sglang

PARENT = """
import pathlib, sys
from agentrl.distributed.sglang_loader import LOADERS
from agentrl.inference.launch.processes import launch_sglang
python, folder, log = map(pathlib.Path, sys.argv[1:])
options = {"device": "cpu", "custom_weight_loader": [*LOADERS]}
engine = launch_sglang(folder, log=log, options=options, python=python, timeout_s=200)
print(engine.url, engine.child.pid, flush=True)
sys.stdin.read()
engine.stop()
"""


class Started:
    """A server that a process of its own has started, for the last test to kill: starting takes half a minute."""

    def __init__(self, folder: Path, log: Path, *, python: Path) -> None:
        command = [sys.executable, "-c", PARENT, *map(str, (python, folder, log))]
        # Set for other programs, it would make log-probabilities those of another temperature.
        env = {**os.environ, "SGLANG_RETURN_ORIGINAL_LOGPROB": "true"}
        self.parent = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
        assert self.parent.stdout is not None
        words = self.parent.stdout.readline().split()
        assert len(words) == 2, "its parent's errors are above"
        self.url, self.pid = words[0], int(words[1])

    def check(self) -> None:
        assert self.parent.poll() is not None or psutil.pid_exists(self.pid)

    def stop(self) -> None:
        self.parent.communicate()


@pytest.fixture(scope="module")
def started() -> list[Started]:
    return []


@pytest.fixture(scope="module")
def engine(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory, started: list[Started]) -> Iterator[Engine]:
    code = "import importlib.metadata as m; print(m.version('sglang'))"
    release = Version(subprocess.run([sglang_python, "-c", code], capture_output=True, text=True, check=True).stdout)
    brackets = release >= Version("0.5.23")
    traits = Traits(
        seeds=False,
        refuses_unfit_weights=False,
        check="checksum" if brackets else "version",
        changes_beside_held=brackets,
    )

    def start(folder: Path, log: Path) -> Started:
        (folder / "chat_template.jinja").write_text(CHAT_TEMPLATE)
        started.append(Started(folder, log, python=sglang_python))
        return started[0]

    with running(start, traits, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


class TestSampling(Sampling):
    pass


class TestScoring(Scoring):
    pass


class TestControl(Control):
    pass


class TestWeights(Weights):
    pass


class TestMemory(Memory):
    pass


class TestSyncs(Syncs):
    pass


class TestEndpoint(Endpoint):
    pass


class TestThroughRouter(ThroughRouter):
    pass


def test_nothing_is_left_when_the_parent_is_killed(engine: Engine, started: list[Started]) -> None:
    """The last one here: it ends the server of the others."""
    [one] = started
    server = psutil.Process(one.pid)
    family = [server, *server.children(recursive=True)]
    assert any("scheduler" in process.name() + " ".join(process.cmdline()) for process in family)
    one.parent.kill()
    one.parent.wait()
    for process in family:
        wait_for_exit(process.pid, 20)
