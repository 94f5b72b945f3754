"""The FSDP backend and the fake of integration tests against the contract of learners."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.testing import ContractError, check_learner
from tests.algo_config import make_algo
from tests.in_process_learner import InProcessLearner
from tests.unit.learner.learners import contract_rows

CONFIG = LearnerConfig(device="cpu", threads=1, precision="float32", optimizer=OptimizerConfig(lr=1e-2))


class SilentLearner(LocalLearnerGroup):
    """Reports no gradient that is not finite."""

    def train_step(self, batch):
        metrics = super().train_step(batch)
        return {name: value for name, value in metrics.items() if name != "train/nonfinite_gradients"}


class ReadyLearner(InProcessLearner):
    """Loads the model at once."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.ready()


@pytest.mark.parametrize(
    ("has_reference", "learner"),
    [
        (True, LocalLearnerGroup),
        (False, ReadyLearner),
        pytest.param(False, LocalLearnerGroup, marks=pytest.mark.long),
        pytest.param(True, ReadyLearner, marks=pytest.mark.long),
    ],
)
def test_the_contract(model: Path, tmp_path: Path, learner: type[LocalLearnerGroup], has_reference: bool) -> None:
    reference = model if has_reference else None
    check_learner(
        lambda: learner(model, CONFIG, make_algo(kl_coef=0.1 * has_reference), seed=0, reference=reference),
        contract_rows(),
        tmp_path,
    )


def test_a_violation_is_named(model: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"train/nonfinite_gradients of this step must be 1\.0, it is None"):
        check_learner(lambda: SilentLearner(model, CONFIG, make_algo(), seed=0), contract_rows(), tmp_path)
