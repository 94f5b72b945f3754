"""SGLang on a GPU does what every engine must do; `tests/conformance` says what. Log-probabilities are bfloat16's."""

from __future__ import annotations

import pytest
from conformance.control import Control
from conformance.engine import Engine
from conformance.memory import Memory
from conformance.sampling import Sampling
from conformance.scoring import Scoring
from conformance.syncs import Syncs
from conformance.weights import Weights

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def engine(tiny_engine: Engine) -> Engine:
    return tiny_engine


class TestSampling(Sampling):
    pass


class TestScoring(Scoring):
    pass


class TestControl(Control):
    pass


class TestWeights(Weights):
    pass


class TestSyncs(Syncs):
    pass


class TestMemory(Memory):
    pass
