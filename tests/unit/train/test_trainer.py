"""The training loop with a fake learner and recorded rollouts: what it keeps when something ends it."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.config.schema import Config
from agentrl.core.errors import EngineError
from agentrl.learner.base import LearnerGroup
from agentrl.learner.checkpoints import Checkpoints, latest_checkpoint, read_state
from agentrl.obs.metrics import MetricsLog, read_metrics
from agentrl.obs.progress import ProgressView, Stopwatch
from agentrl.runtime.interrupt import Interrupt
from agentrl.testing import FakeLearner
from agentrl.train.replay import RecordedRollouts, Replay, SampleCheck
from agentrl.train.trainer import Trainer
from tests.unit.train.test_replay import VOCABULARY, Letters, config, groups, samples_file


@dataclass(slots=True)
class Engines(Replay):
    """Recorded rollouts in place of those of engines, which may refuse weights."""

    refuse: int | None = None
    """The policy version that they do not take."""
    synced: list[int] = field(default_factory=list)

    async def sync_weights(self, learner: LearnerGroup, version: int, watch: Stopwatch) -> None:
        if version == self.refuse:
            raise EngineError("the engine is gone")
        self.synced.append(version)


def trainer(folder: Path, given: Config, learner: FakeLearner, **options: object) -> Trainer:
    """A trainer of a run in ``folder``, with three steps of recorded rollouts."""
    recorded = RecordedRollouts(samples_file(folder, groups(*"abcdef")), given.rollout.batch_size)
    check = SampleCheck(VOCABULARY, Letters(), given.sampler.temperature)  # type: ignore[arg-type]
    source = Engines(given, recorded, check, Interrupt(print), **options)  # type: ignore[arg-type]
    view = ProgressView(Console(quiet=True), given.train.steps, "plain")
    checkpoints = Checkpoints(folder / "run" / "checkpoints", keep=3)
    return Trainer(given, source, learner, checkpoints, MetricsLog(folder / "run"), view)


def saved_state(folder: Path) -> Mapping[str, object]:
    checkpoint = latest_checkpoint(folder / "run" / "checkpoints")
    assert checkpoint is not None
    return read_state(checkpoint)


def test_a_trained_step_whose_weights_no_engine_took_is_saved_with_its_metrics(tmp_path: Path) -> None:
    run = trainer(tmp_path, config("train.save_every=0"), FakeLearner(metrics={"train/loss": 3.0}), refuse=2)
    with pytest.raises(EngineError, match="gone"):
        asyncio.run(run.run())
    assert saved_state(tmp_path)["step"] == 2
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert [(row["step"], row["train/loss"]) for row in rows] == [(1, 3.0), (2, 3.0)]
