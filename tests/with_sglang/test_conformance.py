"""SGLang on a CPU does what every engine must do; `tests/conformance` says what."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from conformance.control import Control
from conformance.engine import Engine, Traits, running
from conformance.memory import Memory
from conformance.router import ThroughRouter
from conformance.sampling import Sampling
from conformance.syncs import Syncs
from conformance.weights import Weights

from agentrl.sampler.launch import EngineProcess, launch_sglang

pytestmark = pytest.mark.sglang


def start(folder: Path, log: Path, *, python: Path) -> EngineProcess:
    return launch_sglang(folder, log=log, options={"device": "cpu"}, python=python, timeout_s=200)


@pytest.fixture(scope="module")
def engine(sglang_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    traits = Traits(seeds=False, refuses_unfit_weights=False, shortens_to_context=False)
    with running(partial(start, python=sglang_python), traits, tmp_path_factory.mktemp("engine")) as engine:
        yield engine


class TestSampling(Sampling):
    pass


class TestControl(Control):
    pass


class TestWeights(Weights):
    pass


class TestMemory(Memory):
    pass


class TestSyncs(Syncs):
    pass


class TestThroughRouter(ThroughRouter):
    pass
