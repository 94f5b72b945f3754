"""A frozen reference policy next to the trained policy."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.errors import ConfigError, LearnerError, ModelError
from tests.algo_config import make_algo
from tests.unit.learner.learners import gradients, make_batch, make_model, make_rows, models, tensors

LENGTHS = [30, 50, 20, 7, 60, 33, 12]
FEW = [20, 12, 7]
"""Lengths of the rows of steps whose size does not matter."""


@pytest.fixture(scope="module")
def other(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model with a fifth of noise on its weights: near enough that `low_var_kl` is not cut off everywhere."""
    folder = tmp_path_factory.mktemp("models") / "other"
    shutil.copytree(model, folder)
    weights = load_file(model / "model.safetensors")
    noise = torch.Generator().manual_seed(0)
    for name, value in weights.items():
        weights[name] = value + 0.2 * float(value.std(correction=0)) * torch.randn(value.shape, generator=noise)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def without_advantages(batch: GlobalBatch) -> GlobalBatch:
    for micro in batch.micro[0]:
        micro.advantages_L.zero_()
    return batch


@pytest.mark.parametrize("kind", [*(pytest.param(kind, marks=pytest.mark.long) for kind in ("k2", "k3")), "low_var_kl"])
def test_the_kl_term_alone_pulls_the_policy_back_to_the_reference(learners, other, kind):
    learner = learners.open(reference=other, algo=make_algo(kl_coef=10.0, kl_kind=kind), lr=3e-3, max_grad_norm=1.0)
    batch = without_advantages(make_batch([30, 50, 20]))
    metrics = [learner.train_step(batch) for _ in range(12)]
    kls = [row["train/kl"] for row in metrics]
    assert kls[0] > 0.2
    assert kls[-1] < 0.5 * kls[0]
    assert metrics[0]["train/loss"] == pytest.approx(10 * metrics[0]["train/kl_loss"], rel=1e-5)


def test_the_references_log_probabilities_are_those_of_its_model(learners, other):
    batch = make_batch(LENGTHS)
    learner = learners.open(reference=other, algo=make_algo(kl_coef=0.1))
    actual, own_logprobs = learner.logprobs(batch, "reference"), learner.logprobs(batch)
    expected = learners.open(folder=other).logprobs(batch)
    assert actual.keys() == expected.keys()
    assert all(np.array_equal(value, expected[key]) for key, value in actual.items())
    assert not any(np.array_equal(value, own_logprobs[key]) for key, value in actual.items())


def test_a_policy_that_is_its_reference_takes_the_step_it_takes_without(learners, model):
    batch = make_batch(LENGTHS)
    plain = learners.open()
    expected, expected_tensors = plain.train_step(batch), tensors(plain)
    with_reference = learners.open(reference=model, algo=make_algo(kl_coef=10.0))
    actual = with_reference.train_step(batch)
    assert actual.pop("train/kl") == 0
    assert actual.pop("train/kl_loss") == 0
    assert actual == expected
    assert all(torch.equal(value, expected_tensors[name]) for name, value in tensors(with_reference).items())
    assert with_reference.train_step(batch)["train/kl"] > 0


def test_without_a_coefficient_no_metric_and_no_step_changes(learners, other):
    batch = make_batch(LENGTHS)
    plain = learners.open()
    assert plain.rank.reference is None
    expected, expected_tensors = plain.train_step(batch), tensors(plain)
    with_reference = learners.open(reference=other, algo=make_algo(kl_coef=0.0, reference=str(other)))
    assert with_reference.train_step(batch) == expected
    assert all(torch.equal(value, expected_tensors[name]) for name, value in tensors(with_reference).items())


def test_the_gradient_is_that_of_two_plain_models(learners, model, other):
    from transformers import AutoModelForCausalLM

    algo = make_algo(kl_coef=0.7, kl_kind="k3")
    batch = replace(make_batch(LENGTHS), temperature=1.3)
    ours = gradients(learners.open(reference=other, algo=algo, logits_chunk=5), batch, torch.float32)
    plain, frozen = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32) for path in (model, other))
    rows = make_rows(LENGTHS)
    total = sum(int(row.mask.sum()) for row in rows)
    for micro in batch.micro[0]:
        for number, key in enumerate(micro.keys):
            row = rows[int(key.rollout_id[1:])]
            ids = torch.from_numpy(row.token_ids).long()
            at = torch.from_numpy(row.mask[1:]).bool()

            def scores(model, ids=ids, at=at):
                return (model(ids[None]).logits[0] / 1.3).log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0][at]

            new = scores(plain)
            with torch.no_grad():
                reference = scores(frozen)
            advantage = micro.advantages_L[(micro.row_L == number) & micro.mask_L][0]
            ratio = (new - torch.from_numpy(row.logprobs[1:])[at]).exp()
            policy = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage)
            apart = (reference - new).exp() - 1 - (reference - new)
            ((policy + 0.7 * apart).sum() / total).backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-3, atol=1e-5), name


def test_kl_and_gradient_do_not_depend_on_how_rows_are_packed(learners, other):
    algo = make_algo(kl_coef=1.0)
    learner = learners.open(reference=other, algo=algo)
    for policy in models(learner):
        policy.double()
    actual = [gradients(learner, make_batch(LENGTHS, micro=micro), torch.float64) for micro in (8, 512)]
    for name, value in actual[0].items():
        assert torch.allclose(value, actual[1][name], rtol=1e-9, atol=1e-11), name


def test_a_resumed_learner_keeps_the_reference_and_goes_on_bit_for_bit(learners, model, other, tmp_path):
    algo = make_algo(kl_coef=0.5)
    learner = learners.open(reference=other, algo=algo)
    batches = [make_batch(FEW, seed=seed) for seed in range(2)]
    learner.train_step(batches[0])
    frozen = learner.logprobs(batches[0], "reference")
    learner.save(tmp_path / "state")
    learner.finish_save()
    assert {path.name for path in (tmp_path / "state").iterdir()} == {"model", "optimizer", "random", "learner.json"}
    straight = learner.train_step(batches[1])
    expected = tensors(learner)
    learner.load(tmp_path / "state")
    again = learner.logprobs(batches[0], "reference")
    assert all(np.array_equal(value, again[key]) for key, value in frozen.items())

    # The run goes on from the checkpoint's model, and the reference from where it came at the start.
    learner = learners.open(reference=other, algo=algo, folder=tmp_path / "state" / "model")
    learner.load(tmp_path / "state")
    assert learner.train_step(batches[1]) == straight
    assert all(torch.equal(value, expected[name]) for name, value in tensors(learner).items())


def test_a_reference_that_follows_the_policy_is_it_and_is_in_checkpoints(learners, model, tmp_path):
    algo = make_algo(kl_coef=0.5, reference_steps=1)
    learner = learners.open(reference=model, algo=algo)
    batches = [make_batch(FEW, seed=seed) for seed in range(3)]
    learner.train_step(batches[0])
    learner.update_reference()
    followed = learner.logprobs(batches[0])
    learner.train_step(batches[1])
    learner.sleep()
    learner.save(tmp_path / "state")
    learner.finish_save()
    learner.wake()
    straight = learner.train_step(batches[2])
    for key, value in learner.logprobs(batches[0], "reference").items():
        assert np.array_equal(value, followed[key])
        assert not np.array_equal(value, learner.logprobs(batches[0])[key])

    learner = learners.open(reference=model, algo=algo, folder=tmp_path / "state" / "model")
    learner.load(tmp_path / "state")
    assert all(np.array_equal(value, followed[key]) for key, value in learner.logprobs(batches[0], "reference").items())
    assert learner.train_step(batches[2]) == straight


def test_a_reference_of_another_architecture_cannot_follow(learners, tmp_path):
    learner = learners.open(
        reference=make_model(tmp_path / "llama", "llama"), algo=make_algo(kl_coef=0.5, reference_steps=1)
    )
    with pytest.raises(LearnerError, match=r"another architecture.*algo\.reference_steps=0"):
        learner.update_reference()


def test_training_leaves_the_reference_as_it_is_and_frozen(learners, other):
    learner = learners.open(reference=other, algo=make_algo(kl_coef=1.0))
    batch = make_batch(LENGTHS)
    logprobs_before = learner.logprobs(batch, "reference")
    learner.train_step(batch)
    logprobs_after = learner.logprobs(batch, "reference")
    assert all(np.array_equal(value, logprobs_after[key]) for key, value in logprobs_before.items())
    _, frozen = models(learner)
    assert not frozen.training
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in frozen.parameters())
    trained = {
        id(p)
        for optimizer in learner.rank.optimizers.values()
        for group in optimizer.param_groups
        for p in group["params"]
    }
    assert not trained & {id(parameter) for parameter in frozen.parameters()}


def test_a_loss_without_its_reference_is_refused_before_anything_changes(learners):
    learner = learners.open(algo=make_algo(kl_coef=0.1))
    tensors_before = tensors(learner)
    with pytest.raises(LearnerError, match=r"no policy 'reference', only main; set algo\.kl_coef"):
        learner.train_step(make_batch(LENGTHS))
    with pytest.raises(LearnerError, match="no policy 'teacher', only main"):
        learner.logprobs(make_batch(LENGTHS), "teacher")
    assert all(torch.equal(value, tensors_before[name]) for name, value in tensors(learner).items())


def test_supervised_batches_need_no_reference(learners):
    learner = learners.open(algo=make_algo(kl_coef=0.1))
    batch = replace(make_batch(LENGTHS), kind="sft")
    assert "train/kl" not in learner.train_step(batch)


def test_a_batch_that_trains_nothing_has_no_kl(learners, other):
    metrics = learners.open(reference=other, algo=make_algo(kl_coef=1.0)).train_step(make_batch([]))
    assert metrics["train/trained_tokens"] == metrics["train/kl"] == metrics["train/kl_loss"] == 0


def test_a_reference_that_does_not_fit_or_load_names_its_key(learners, tmp_path):
    algo = make_algo(kl_coef=0.1)
    small = make_model(tmp_path / "small", vocab_size=64)
    with pytest.raises(ConfigError, match=r"algo\.reference=\S+small: its vocabulary has 64 tokens, \S+qwen3 has 96"):
        learners.open(reference=small, algo=algo)
    (small / "model.safetensors").unlink()
    (small / "config.json").write_text((learners.model / "config.json").read_text())
    with pytest.raises(ModelError, match=r"^algo\.reference=\S+small: the model cannot be loaded"):
        learners.open(reference=small, algo=algo)
