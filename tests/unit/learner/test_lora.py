"""LoRA adapters: gradients, merged weights, the reference, checkpoints."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.config.learner import LearnerConfig
from agentrl.config.load import validate
from agentrl.config.recorded import check_fixed, recorded_keys
from agentrl.core.errors import CheckpointError, ConfigError
from agentrl.learner.fsdp.weights import is_adapter
from agentrl.models.export import export_model
from tests.algo_config import make_algo
from tests.requires import requires
from tests.unit.learner.learners import make_batch, models, tensors

pytestmark = requires("peft")
LENGTHS = [20, 12, 30]
ROUNDING = 1e-5
"""Relative difference of products with merged weights and with adapters."""


def open_lora(learners, **lora):
    return learners.open(lora={"rank": 4, "alpha": 8, **lora})


def test_gradients_and_merged_weights_are_those_of_peft(learners, model):
    import peft
    from transformers import AutoModelForCausalLM

    learner = open_lora(learners)
    start, specs = tensors(learner), learner.rank.specs()
    plain = learners.open()
    assert [spec.name for spec in specs] == [spec.name for spec in plain.rank.specs()]
    assert all(torch.equal(value, start[name]) for name, value in tensors(plain).items()), "B begins as zeros"

    learner = open_lora(learners)
    hf = learner.rank.model.hf
    learner.train_step(make_batch(LENGTHS))
    learner.train_step(make_batch(LENGTHS, seed=1))
    merged, adapters = tensors(learner), dict(learner.adapters())
    assert {tensor.dtype for _, tensor in learner.adapters("bfloat16")} == {torch.bfloat16}
    learner.sleep()
    assert all(torch.equal(tensor, adapters[name]) for name, tensor in learner.adapters())
    learner.wake()
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), options)
    inner = theirs.base_model.model
    assert {n for n, p in hf.named_parameters() if p.requires_grad} == {
        n for n, p in inner.named_parameters() if p.requires_grad
    }
    inner.load_state_dict(hf.state_dict())
    named = peft.get_peft_model_state_dict(theirs)
    assert adapters.keys() == named.keys()
    assert all(torch.equal(tensor, named[name]) for name, tensor in adapters.items())

    actual = {}
    learner.rank._update = lambda scale: (
        actual.update({n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}) or {}
    )
    batch = replace(make_batch(LENGTHS, seed=2), kind="sft")
    learner.train_step(batch)
    [micros] = batch.micro
    for micro in micros:
        for number in range(len(micro.keys)):
            at = micro.row_L == number
            ids = micro.token_ids_L[at].long()
            scores = inner(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            (-(scores * micro.weight_L[at][1:]).sum()).backward()
    assert actual
    for name, parameter in inner.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(actual[name], parameter.grad, rtol=1e-3, atol=1e-6), name
    full_weights = theirs.merge_and_unload().state_dict()
    changed = 0
    for name, value in merged.items():
        assert torch.allclose(value, full_weights[name], atol=1e-6), name
        changed += not torch.equal(value, start[name])
    assert changed == 14


def test_a_target_that_matches_no_linear_layer_is_named(learners):
    with pytest.raises(ConfigError, match=r"learner\.lora\.target: 'lm_head' matches no linear layer .*q_proj"):
        open_lora(learners, target=["lm_head"])
    learner = open_lora(learners, target=["*.q_proj"])
    assert sum(p.requires_grad for p in learner.rank.model.hf.parameters()) == 4


def test_a_checkpoint_has_adapters_and_merged_weights_and_continues(learners, tmp_path):
    from safetensors.torch import load_file

    learner = open_lora(learners)
    learner.train_step(make_batch(LENGTHS))
    merged = tensors(learner)
    learner.save(tmp_path / "one")
    learner.sleep()
    assert all(torch.allclose(value, merged[name]) for name, value in tensors(learner).items())
    learner.wake()
    learner.train_step(make_batch(LENGTHS, seed=3))
    expected = tensors(learner)
    saved = load_file(next((tmp_path / "one" / "model").glob("*.safetensors")))
    assert all(torch.equal(saved[name], value) for name, value in merged.items())
    learner = open_lora(learners)
    learner.load(tmp_path / "one")
    learner.train_step(make_batch(LENGTHS, seed=3))
    assert all(torch.equal(value, expected[name]) for name, value in tensors(learner).items())


@pytest.mark.parametrize("other", [{"freeze": ["*norm*"]}, {"fp8": True}])
def test_keys_that_adapters_exclude_are_refused(other):
    with pytest.raises(ValueError, match=f"{next(iter(other))} with lora"):
        LearnerConfig(lora={}, **other)


@pytest.fixture
def held(learners, model, tmp_path):
    """Opens a learner with a KL term, whose reference is the base model or a copy of it, and adapters that are not zero."""
    copied = shutil.copytree(model, tmp_path / "copy")

    def open_held(*, loaded: bool = False):
        learner = learners.open(
            reference=copied if loaded else model, algo=make_algo(kl_coef=0.5), lora={"rank": 4, "alpha": 8}
        )
        assert len({id(one) for one in models(learner)}) == 1 + loaded
        learner.train_step(make_batch(LENGTHS))
        return learner

    return open_held


def assert_close(actual, expected, rtol=0.0):
    assert actual.keys() == expected.keys()
    for key in expected:
        np.testing.assert_allclose(actual[key], expected[key], rtol=rtol, atol=1e-6)


def test_the_base_model_is_the_reference_without_a_copy(held):
    batches = [make_batch(LENGTHS, seed=seed) for seed in range(4)]

    def play(learner):
        scores = [learner.logprobs(batches[0], "reference")]
        metrics = [learner.train_step(batches[1])]
        learner.update_reference()
        followed = learner.logprobs(batches[0])
        metrics += [learner.train_step(batch) for batch in batches[2:]]
        learner.sleep()
        learner.wake()
        scores += [learner.logprobs(batches[0], "reference"), learner.logprobs(batches[0])]
        assert_close(scores[1], followed, ROUNDING)
        assert not np.allclose(*(next(iter(score.values())) for score in scores[1:]))
        return scores, metrics

    expected, metrics = play(held(loaded=True))
    learner = held()
    assert all(
        parameter.requires_grad == is_adapter(name) for name, parameter in learner.rank.model.hf.named_parameters()
    )
    actual, ours = play(learner)
    assert_close(actual[0], expected[0])
    for first, second in zip(actual[1:], expected[1:], strict=True):
        assert_close(first, second, ROUNDING)
    for first, second in zip(ours, metrics, strict=True):
        assert first == pytest.approx(second, abs=1e-6, rel=ROUNDING)


def test_adapters_of_an_earlier_step_that_are_the_reference_are_in_checkpoints(held, learners, model, tmp_path):
    learner, batch = held(), make_batch(LENGTHS, seed=5)
    learner.save(tmp_path / "base")
    learner.update_reference()
    expected = learner.logprobs(batch)
    learner.train_step(batch)
    learner.save(tmp_path / "later")
    learner.finish_save()
    assert not (tmp_path / "base" / "reference").exists()
    straight = learner.train_step(batch)
    learner = held()
    learner.load(tmp_path / "later")
    assert_close(learner.logprobs(batch, "reference"), expected)
    assert learner.train_step(batch) == straight


def test_a_checkpoint_of_adapters_alone_is_exported_with_its_base_model_and_continues(learners, tmp_path, model):
    """Without a Hugging Face folder (``learner.save_hf=false``) a checkpoint has no weights of the base model."""
    steps = {}
    for save_hf in (True, False):
        learner = learners.open(lora={"rank": 4, "alpha": 8}, save_hf=save_hf)
        learner.train_step(make_batch(LENGTHS))
        checkpoint = tmp_path / f"{save_hf}"
        learner.save(checkpoint)
        learner.finish_save()
        export_model(checkpoint / "model", tmp_path / f"exported {save_hf}", "float32")
        learner = learners.open(lora={"rank": 4, "alpha": 8}, save_hf=save_hf)
        learner.load(checkpoint)
        steps[save_hf] = learner.train_step(make_batch(LENGTHS, seed=1))
    whole, exported = (load_file(tmp_path / f"exported {kind}" / "model.safetensors") for kind in (True, False))
    assert whole.keys() == exported.keys()
    assert all(torch.equal(weight, exported[name]) for name, weight in whole.items())
    assert any(not torch.equal(weight, whole[name]) for name, weight in load_file(model / "model.safetensors").items())
    assert steps[True] == steps[False]
    assert {path.name for path in (tmp_path / "False").iterdir()} == {
        "adapters", "learner.json", "model", "optimizer", "policies", "random",
    }  # fmt: skip
    assert not [*(tmp_path / "False" / "model").glob("*.safetensors")]


def test_a_checkpoint_of_other_adapters_is_refused(learners, tmp_path):
    learner = open_lora(learners)
    learner.save(tmp_path / "one")
    learner.finish_save()
    for options, message in (
        ({"alpha": 16}, r"another lora: rank 4, alpha 8, this run has rank 4, alpha 16 \(learner\.lora\)"),
        ({"rank": 2}, r"another lora: .* this run has rank 2, alpha 8 \(learner\.lora\)"),
        ({"target": ["*.q_proj"]}, r"another shapes: .*down_proj.* \(learner\.lora\.target\)"),
    ):
        learner = open_lora(learners, **options)
        with pytest.raises(CheckpointError, match=message):
            learner.load(tmp_path / "one")


def test_a_resume_with_another_scale_is_refused_before_anything_starts():
    state_before, state_after = (validate({"learner": {"lora": {"alpha": alpha}}}) for alpha in (32, 64))
    with pytest.raises(ConfigError, match=r"^learner\.lora\.alpha=64: the run in r has 32"):
        check_fixed(recorded_keys(state_before), recorded_keys(state_after), Path("r"))
