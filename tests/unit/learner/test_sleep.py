"""A learner that sleeps between calls does exactly what one does that never sleeps."""

import pytest
import torch

from agentrl.core.errors import LearnerError
from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch, make_model, tensors

LENGTHS = (9, 14, 30, 22)


def device_bytes(learner) -> int:
    """Bytes of weights, reference and optimizer where they are computed with."""
    with torch.no_grad():
        return sum(tensor.untyped_storage().nbytes() for tensor in learner.rank._state())


@pytest.mark.parametrize(("name", "kl"), [("adamw", 0.1), ("muon", 0.0), ("8bit", 0.0)])
def test_training_is_bit_for_bit_the_same(learners, tmp_path, name, kl):
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(2)]
    options = {"algo": make_algo(kl_coef=kl)}
    if kl:
        options["reference"] = make_model(tmp_path / "reference")

    learner = learners.open(name, **options)
    straight = [learner.train_step(batch) for batch in batches]
    expected = tensors(learner)

    learner = learners.open(name, **options)
    metrics = []
    for batch in batches:
        learner.sleep()
        learner.sleep()
        assert device_bytes(learner) == 0
        assert all(tensor.isfinite().all() for tensor in tensors(learner).values())
        learner.wake()
        learner.wake()
        metrics.append(learner.train_step(batch))
    assert metrics == straight
    actual = tensors(learner)
    assert all(torch.equal(actual[name], value) for name, value in expected.items())


def test_a_sleeping_learner_exports_its_weights_and_refuses_other_calls(learners):
    learner = learners.open()
    learner.train_step(make_batch(LENGTHS))
    awake = tensors(learner)
    learner.sleep()
    offloaded = tensors(learner)
    assert awake.keys() == offloaded.keys()
    assert all(torch.equal(awake[name], value) for name, value in offloaded.items())
    batch = make_batch(LENGTHS)
    for call in (learner.train_step, learner.logprobs, learner.load):
        with pytest.raises(LearnerError, match="sleeps"):
            call(batch)
    [bucket] = learner.buckets(1 << 30)
    with pytest.raises(LearnerError, match="not on a GPU"):
        bucket.ipc_handles()
    learner.wake()
    learner.train_step(batch)


@pytest.mark.parametrize(("name", "steps"), [("adamw", 0), ("adamw", 1), ("muon", 1)])
def test_a_sleeping_learner_saves_what_an_awake_one_does(learners, tmp_path, name, steps):
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(steps + 1)]
    learner = learners.open(name)
    for batch in batches[:-1]:
        learner.train_step(batch)
    learner.sleep()
    learner.save(tmp_path / "state")
    learner.finish_save()
    learner.wake()
    straight = learner.train_step(batches[-1])

    learner = learners.open(name)
    learner.train_step(make_batch(LENGTHS, seed=9))
    learner.load(tmp_path / "state")
    assert learner.train_step(batches[-1]) == straight


def test_without_the_memory_to_wake_in_it_sleeps_on(learners, monkeypatch):
    learner = learners.open()
    expected = tensors(learner)
    learner.sleep()
    taken = []

    def full(storage):
        taken.append(storage)
        if len(taken) == 5:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4 MiB.")
        return torch.empty(0, dtype=torch.uint8).set_(storage)

    with monkeypatch.context() as patch:
        patch.setattr("agentrl.learner.offload._bytes", full)
        with pytest.raises(LearnerError, match=r"stays offloaded.*Tried to allocate"):
            learner.wake()
    assert device_bytes(learner) == 0
    for _ in range(2):
        actual = tensors(learner)
        assert all(torch.equal(actual[name], value) for name, value in expected.items())
        learner.wake()
    learner.train_step(make_batch(LENGTHS))


def test_a_step_that_follows_a_failed_one_may_sleep_before(learners, monkeypatch):
    """What FSDP had gathered when the step failed does not stay on the device."""
    learner = learners.open()
    tensors_before = tensors(learner)

    def fail(*_):
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(torch.autograd, "backward", fail)
        with pytest.raises(RuntimeError, match="out of memory"):
            learner.train_step(make_batch(LENGTHS))
    learner.sleep()
    assert device_bytes(learner) == 0
    learner.wake()
    actual_tensors = tensors(learner)
    assert all(torch.equal(actual_tensors[name], value) for name, value in tensors_before.items())
    learner.train_step(make_batch(LENGTHS))
