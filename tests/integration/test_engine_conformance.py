"""The embedded engine does what every engine must do; `tests/conformance` says what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.control import Control
from conformance.engine import Engine, Traits, running
from conformance.memory import Memory
from conformance.router import ThroughRouter
from conformance.sampling import Sampling
from conformance.scoring import Scoring
from conformance.syncs import Syncs
from conformance.weights import Weights

from agentrl.config.sampler import EmbeddedConfig
from agentrl.inference.launch.processes import EngineProcess, launch_embedded

pytestmark = pytest.mark.slow


def start(folder: Path, log: Path) -> EngineProcess:
    return launch_embedded(folder, EmbeddedConfig(slots=64, context=512, threads=1), log=log)


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    traits = Traits(seeds=True, refuses_unfit_weights=True)
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


@pytest.mark.long  # in `make test` SGLang passes these
class TestThroughRouter(ThroughRouter):
    pass
