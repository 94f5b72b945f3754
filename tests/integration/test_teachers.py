"""A teacher's engine that a run starts: it scores, its death ends the run with its log, and it ends with the run."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from pathlib import Path

import numpy as np
import psutil
import pytest
from engine_tiny import reference_logprobs, save_model

from agentrl.batch.groups import group_rollouts
from agentrl.config.load import load_config
from agentrl.core.errors import EngineError
from agentrl.core.types import MaskReason, Provenance, Rollout, Row, RowKey, StopReason
from agentrl.inference.launch.processes import EngineProcess
from agentrl.models.load import load_model
from agentrl.testing import FakeLearner
from agentrl.train.teachers import open_teachers

IDS = list(range(5, 25))
START = 8


def rollout() -> Rollout:
    """Sampled from the eighth token on."""
    mask = (np.arange(len(IDS)) >= START).astype(np.uint8)
    row = Row(
        key=RowKey("p", "r"),
        token_ids=np.array(IDS, np.int32),
        provenance=(mask * Provenance.SAMPLED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(mask, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=-mask.astype(np.float32),
        versions=mask.astype(np.int32) - 1,
        requests=mask.astype(np.int32) - 1,
        request_ids=("q",),
    )
    return Rollout("p", "r", [row], 0.0, StopReason.TERMINATED)


def test_a_started_teacher_scores_until_it_dies(tmp_path: Path) -> None:
    policy, teacher = save_model(tmp_path / "policy", seed=0, end=1), save_model(tmp_path / "teacher", seed=1)
    changes = [
        f"model.path={policy}",
        f"algo.distillation.teachers.a.path={teacher}",
        "algo.distillation.reward_coef=0",
    ]
    config = load_config(None, [*changes, "rollout.max_tokens=64", "sampler.embedded.threads=1"])
    groups = group_rollouts([rollout()])

    async def run() -> EngineProcess:
        async with AsyncExitStack() as exits:
            teachers = await open_teachers(config, policy, tmp_path / "logs", exits)
            assert teachers is not None
            [actual] = (await teachers.score(groups, FakeLearner(), 0))["a"].values()
            expected = reference_logprobs(load_model(teacher), IDS[:START], IDS[START:])
            np.testing.assert_allclose(actual[START:], expected, atol=1e-4)
            process = teachers._teachers["a"].process
            assert isinstance(process, EngineProcess)
            psutil.Process(process.child.pid).kill()
            with pytest.raises(EngineError, match="teacher-a"):
                await teachers.score(groups, FakeLearner(), 0)
        return process

    process = asyncio.run(run())
    assert not psutil.pid_exists(process.child.pid)
