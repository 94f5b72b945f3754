"""Optimizer states in CPU memory (``learner.cpu_offload``): the same training, without their memory on the device."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.unit.learner.learners import Learners, make_batch, tensors

LENGTHS = (9, 14, 30, 22)
BATCHES = [make_batch(LENGTHS, seed=seed) for seed in range(3)]
SAVED_LR = 0.004
"""In the second of five steps of the warm-up, at 0.01 after it."""


def open_learner(learners: Learners, name: str, cpu_offload: str = "optimizer", **options):
    """Open a learner whose steps take several chunks."""
    learner = learners.open(
        name, cpu_offload=cpu_offload, optimizer={"weight_decay": 0.1, "warmup_steps": 5}, **options
    )
    learner.rank.optimizer_states._chunk_bytes = 20_000
    assert sum(8 * parameter.numel() for parameter in learner.rank.model.parameters()) > 5 * 20_000
    return learner


def states(learner) -> list[torch.Tensor]:
    """Return the optimizers' states but for counts of steps."""
    actual_states = [state for optimizer in learner.rank.optimizers.values() for state in optimizer.state.values()]
    return [t for state in actual_states for t in state.values() if isinstance(t, torch.Tensor) and t.ndim]


def device_bytes(learner) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in states(learner))


@pytest.mark.parametrize("name", ["adamw", "muon", "8bit"])
def test_training_is_bit_for_bit_the_same(learners, name):
    plain = open_learner(learners, name, "none")
    straight = [plain.train_step(batch) for batch in BATCHES[:2]]
    expected = tensors(plain)
    assert device_bytes(plain) > 0

    learner = open_learner(learners, name)
    for batch, metrics in zip(BATCHES[:2], straight, strict=True):
        assert learner.train_step(batch) == metrics
        assert len(states(learner)) > 10
        assert device_bytes(learner) == 0
        assert all(parameter.grad is None for parameter in learner.rank.model.parameters())
        learner.sleep()
        assert device_bytes(learner) == 0
        learner.wake()
        assert device_bytes(learner) == 0
    actual = tensors(learner)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


@pytest.mark.parametrize(
    ("name", "state_before", "state_after"),
    [("adamw", "optimizer", "optimizer"), ("muon", "optimizer", "none"), ("adamw", "none", "optimizer")],
)
def test_a_checkpoint_goes_on_with_and_without_offload(learners, tmp_path: Path, name, state_before, state_after):
    learner = open_learner(learners, name, state_before)
    for batch in BATCHES[:2]:
        learner.train_step(batch)
    learner.save(tmp_path / "state")
    straight = learner.train_step(BATCHES[2])  # while it is written
    learner.finish_save()
    expected = tensors(learner)

    learner = open_learner(learners, name, state_after, folder=tmp_path / "state" / "model")
    for _ in range(2):  # into no states, and into those of a later step
        learner.load(tmp_path / "state")
        assert {group["lr"] for optimizer in learner.rank.optimizers.values() for group in optimizer.param_groups} == {
            SAVED_LR
        }
        assert learner.train_step(BATCHES[2]) == straight
    actual = tensors(learner)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_checkpoint_from_before_the_first_step_forgets_states(learners, tmp_path: Path):
    learner = open_learner(learners, "adamw")
    learner.save(tmp_path / "state")
    first = learner.train_step(BATCHES[0])
    learner.load(tmp_path / "state")
    assert states(learner) == []
    assert learner.train_step(BATCHES[0]) == first


def test_a_sleeping_learner_saves(learners, tmp_path: Path):
    learner = open_learner(learners, "adamw")
    learner.train_step(BATCHES[0])
    learner.sleep()
    learner.save(tmp_path / "state")
    learner.wake()
    straight = learner.train_step(BATCHES[1])
    learner.load(tmp_path / "state")
    assert learner.train_step(BATCHES[1]) == straight
