"""Copies of weights in bfloat16, which products read, change nothing: not after steps, sleep, and checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from agentrl.config.learner import LearnerConfig
from agentrl.learner.fsdp import rank as fsdp_rank
from agentrl.learner.fsdp.compute_copies import CopiedLinear, copies_weights
from tests.unit.learner.learners import Learners, make_batch, tensors

LENGTHS = [30, 50, 20]


def train(learners: Learners, name: str, folder: Path) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """Return metrics and weights of two steps, between which the learner sleeps, and one more after a checkpoint is loaded."""
    learner = learners.open(name, precision="bfloat16")
    batches = [make_batch(LENGTHS, seed=seed, micro=64) for seed in range(3)]
    metrics = [learner.train_step(batches[0])]
    learner.sleep()
    learner.wake()
    learner.save(folder)
    learner.finish_save()
    metrics.append(learner.train_step(batches[1]))
    learner.load(folder)
    metrics.append(learner.train_step(batches[2]))
    return metrics, tensors(learner)


@pytest.mark.parametrize("name", ["adamw", "8bit"])
def test_training_is_bit_for_bit_the_same(
    learners: Learners, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    expected_metrics, expected = train(learners, name, tmp_path / "expected")
    monkeypatch.setattr(fsdp_rank, "copies_weights", lambda *arguments, **options: True)
    metrics, weights = train(learners, name, tmp_path / "actual")
    assert metrics == expected_metrics
    assert all(torch.equal(weights[key], value) for key, value in expected.items())
    rank = learners.current.rank
    linears = [module for module in rank.model.modules() if isinstance(module, CopiedLinear)]
    assert len(linears) == 2 * 7
    assert all(torch.equal(linear.weight_copy, linear.weight.bfloat16()) for linear in linears)
    assert not any("copy" in name for name, _ in rank.model.named_parameters())
    learners.current.sleep()
    assert all(linear.weight_copy.untyped_storage().nbytes() == 0 for linear in linears)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, True),
        ({"ranks": 2}, False),
        ({"bfloat16": False}, False),
        ({"compiled": False}, False),
        ({"recompute": "full"}, False),
        ({"recompute": "all_but_attention"}, False),
        ({"config": LearnerConfig(fp8=True)}, False),
        ({"config": LearnerConfig(lora={})}, False),
    ],
)
def test_which_learners_have_copies(options: dict[str, object], *, expected: bool) -> None:
    defaults = {"config": LearnerConfig(), "recompute": "selective", "ranks": 1, "bfloat16": True, "compiled": True}
    assert copies_weights(**defaults | options) is expected
