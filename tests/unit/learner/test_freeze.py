"""Frozen weights: ``learner.freeze``."""

from __future__ import annotations

import pytest
import torch

from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.models.freezing import count_trained, frozen_names
from tests.unit.learner.learners import gradients, make_batch, make_model, tensors

LENGTHS = [20, 12, 30]
FREEZE = ["*.embed_tokens.*", "*.layers.0.*", "*norm*"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_frozen_weights_stay_and_the_others_train_as_if_nothing_were_frozen(learners, name):
    full_gradients = gradients(learners.open(name), make_batch(LENGTHS), torch.float32)
    learner = learners.open(name, freeze=FREEZE)
    tensors_before, frozen = tensors(learner), frozen_names(full_gradients, FREEZE)
    optimizers = learner.rank.optimizers.values()
    assert 0 < len(frozen) < len(full_gradients)
    # Only matrices of the second layer are left: none is AdamW's if Muon takes them.
    assert len(optimizers) == 1
    actual = {}

    def keep(lr_scale: float) -> dict[str, float]:
        actual.update({key: p.grad for key, p in learner.rank.model.hf.named_parameters()})
        return {}

    update, learner.rank._update = learner.rank._update, keep
    learner.train_step(make_batch(LENGTHS))
    assert {key for key, grad in actual.items() if grad is None} == frozen
    learner.rank._update = update
    learner.train_step(make_batch(LENGTHS))
    tensors_after = tensors(learner)
    assert tensors_after.keys() == tensors_before.keys() == full_gradients.keys(), "weight sync sends all weights"
    assert {key for key in tensors_before if torch.equal(tensors_before[key], tensors_after[key])} == frozen
    assert sum(len(optimizer.state) for optimizer in optimizers) == len(full_gradients) - len(frozen)


def test_gradients_past_frozen_layers_are_those_of_the_whole_model(learners):
    full_gradients = gradients(learners.open(), make_batch(LENGTHS), torch.float32)
    learner = learners.open(freeze=["*.layers.1.*"])
    actual = {}
    learner.rank._update = lambda lr_scale: (
        actual.update({k: p.grad.clone() for k, p in learner.rank.model.hf.named_parameters() if p.grad is not None})
        or {}
    )
    learner.train_step(make_batch(LENGTHS))
    assert actual
    for key, grad in actual.items():
        assert torch.allclose(grad, full_gradients[key], rtol=1e-5, atol=1e-7), key


def test_a_checkpoint_continues_and_names_another_choice_of_frozen_weights(learners, tmp_path):
    learner = learners.open(freeze=FREEZE)
    learner.train_step(make_batch(LENGTHS))
    learner.save(tmp_path / "one")
    learner.train_step(make_batch(LENGTHS, seed=3))
    expected = tensors(learner)
    learner = learners.open(freeze=FREEZE)
    learner.load(tmp_path / "one")
    learner.train_step(make_batch(LENGTHS, seed=3))
    for key, value in tensors(learner).items():
        assert torch.equal(value, expected[key]), key
    with pytest.raises(CheckpointError, match=r"layers\.0\..* is frozen, in this run trained \(learner\.freeze\)"):
        learners.open(freeze=["*.embed_tokens.*", "*norm*"]).load(tmp_path / "one")


def test_a_pattern_that_matches_nothing_and_one_that_matches_everything_are_named(learners, model):
    with pytest.raises(ConfigError, match=r"learner\.freeze: 'visual\.\*' matches no weight .*model\."):
        learners.open(freeze=["visual.*"])
    with pytest.raises(ConfigError, match=r"learner\.freeze=\['\*'\] freezes all"):
        count_trained(model, ["*"])


def test_trained_weights_are_counted(tmp_path):
    trained, total = count_trained(make_model(tmp_path / "m"), ["*.embed_tokens.*"])
    assert total - trained == 96 * 32
