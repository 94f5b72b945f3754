"""LoRA adapters: gradients, merged weights."""

from __future__ import annotations

import pytest
import torch

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import ConfigError
from tests.unit.learner.learners import make_batch, tensors

pytest.importorskip("peft")
LENGTHS = [20, 12, 30]


def open_lora(learners, **lora):
    return learners.open(lora={"rank": 4, "alpha": 8, **lora})


def test_gradients_and_merged_weights_are_those_of_peft(learners, model):
    import peft
    from transformers import AutoModelForCausalLM

    learner = open_lora(learners)
    start, specs = tensors(learner), learner.rank.specs()
    plain = learners.open()
    assert [one.name for one in specs] == [one.name for one in plain.rank.specs()]
    assert all(torch.equal(value, start[name]) for name, value in tensors(plain).items()), "B begins as zeros"

    learner = open_lora(learners)
    hf = learner.rank.model.hf
    learner.train_step(make_batch(LENGTHS))
    learner.train_step(make_batch(LENGTHS, seed=1))
    merged = tensors(learner)
    options = peft.LoraConfig(r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM")
    theirs = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32), options)
    inner = theirs.base_model.model
    assert {n for n, p in hf.named_parameters() if p.requires_grad} == {
        n for n, p in inner.named_parameters() if p.requires_grad
    }
    inner.load_state_dict(hf.state_dict())

    found = {}
    learner.rank._update = lambda scale: (
        found.update({n: p.grad.clone() for n, p in hf.named_parameters() if p.grad is not None}) or {}
    )
    batch = make_batch(LENGTHS, seed=2)
    batch.kind = "sft"
    learner.train_step(batch)
    [micros] = batch.micro
    for micro in micros:
        for number in range(len(micro.keys)):
            at = micro.row_L == number
            ids = micro.token_ids_L[at].long()
            scores = inner(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            (-(scores * micro.weight_L[at][1:]).sum()).backward()
    assert found
    for name, parameter in inner.named_parameters():
        if parameter.requires_grad:
            assert torch.allclose(found[name], parameter.grad, rtol=1e-3, atol=1e-6), name
    whole = theirs.merge_and_unload().state_dict()
    changed = 0
    for name, value in merged.items():
        assert torch.allclose(value, whole[name], atol=1e-6), name
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
