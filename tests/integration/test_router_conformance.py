"""Through ``sglang-router`` an engine does what it does without; `tests/conformance` says what."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from conformance.control import Control
from conformance.engine import Engine, Traits, running
from conformance.router import routed
from conformance.sampling import Sampling

from agentrl.sampler.launch import EngineProcess, launch_embedded

pytest.importorskip("sglang_router", reason="sglang-router is not installed")


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    root = tmp_path_factory.mktemp("engine")
    traits = Traits(seeds=True, refuses_unfit_weights=True, shortens_to_context=True)

    def start(folder: Path, log: Path) -> EngineProcess:
        return launch_embedded(folder, log=log, slots=64, context=512, threads=1)

    with running(start, traits, root) as engine, routed(engine, root / "router.log") as through:
        yield through


class TestSampling(Sampling):
    pass


class TestControl(Control):
    pass
