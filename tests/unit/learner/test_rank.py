"""One rank in this process: gradients, optimizers, state."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from agentrl.batch.loss_weights import Aggregation, count_units
from agentrl.config.learner import OptimizerConfig
from agentrl.core.errors import CheckpointError, ModelError, OtherKeysError, ProvenanceError
from agentrl.core.types import Provenance
from agentrl.learner.rank import learning_rate
from tests.batches import pack_rows
from tests.unit.learner.learners import gradients, make_batch, make_model, make_rows, tensors

LENGTHS = [30, 50, 20, 7, 60, 33, 12]
FEW = [20, 12, 7]
"""Lengths of the rows of a step whose size does not matter."""


def test_the_gradient_does_not_depend_on_how_rows_are_packed(learners):
    """Each row alone, several micro-batches of several rows, and one micro-batch."""
    learner = learners.open()
    learner.rank.model.double()
    batches = [make_batch(LENGTHS, micro=micro) for micro in (8, 64, 512)]
    assert [len(batch.micro[0]) for batch in batches] == [7, 4, 1]
    actual = [gradients(learner, batch, torch.float64) for batch in batches]
    assert max(value.abs().max().item() for value in actual[0].values()) > 1e-2
    for packing in actual[1:]:
        for name, value in actual[0].items():
            assert torch.allclose(value, packing[name], rtol=1e-9, atol=1e-11), name


def test_the_gradient_is_that_of_a_plain_model_and_a_plain_loss(learners, model):
    from transformers import AutoModelForCausalLM

    ours = gradients(learners.open(logits_chunk=5), make_batch(LENGTHS), torch.float32)
    plain = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = make_rows(LENGTHS)
    [micros] = make_batch(LENGTHS, bin_=1024, micro=1024).micro
    total = sum(int(row.mask.sum()) for row in rows)
    for micro in micros:
        for number, key in enumerate(micro.keys):
            row = rows[int(key.rollout_id[1:])]
            ids = torch.from_numpy(row.token_ids).long()
            scores = plain(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None])[:, 0]
            at = torch.from_numpy(row.mask[1:]).bool()
            advantage = micro.advantages_L[(micro.row_L == number) & micro.mask_L][0]
            ratio = (scores - torch.from_numpy(row.logprobs[1:])).exp()[at]
            loss = -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).sum() / total
            loss.backward()
    for name, parameter in plain.named_parameters():
        assert torch.allclose(ours[name], parameter.grad, rtol=1e-3, atol=1e-6), name


@pytest.mark.parametrize(
    ("aggregation", "divided"),
    [
        ("token_mean", (3, 5)),
        ("sequence_mean", (3, 5)),
        ("rollout_mean", (7,)),
        pytest.param("constant", (3, 5), marks=pytest.mark.long),
        pytest.param("constant", (7,), marks=pytest.mark.long),
    ],
)
def test_a_step_in_parts_is_the_step_of_the_whole_batch(learners, aggregation: Aggregation, divided: tuple[int, ...]):
    """Parts know no denominators; the last batch, which may be empty, scales the whole gradient by them."""
    rows = make_rows(LENGTHS)
    advantages = {row.key.rollout_id: (-1.0) ** number * (number + 1) for number, row in enumerate(rows)}
    sizes: dict[str, Any] = {"data_parallel_size": 1, "tokens_per_micro": 64, "pad_id": 0, "aggregation": aggregation}
    whole_learner = learners.open()
    expected, weights = whole_learner.train_step(pack_rows(rows, advantages, **sizes)), tensors(whole_learner)
    learner = learners.open()
    for first, end in itertools.pairwise([0, *divided]):
        batch_part = pack_rows(rows[first:end], advantages, **sizes, units=1, completes=False)
        assert learner.train_step(batch_part) == {}
    scale = 1 / count_units(rows, aggregation)
    actual = learner.train_step(pack_rows(rows[divided[-1] :], advantages, **sizes, units=1, gradient_scale=scale))
    assert actual == pytest.approx(expected, rel=1e-5)
    assert expected["train/grad_norm"] > 0.1
    for name, weight in tensors(learner).items():
        assert torch.allclose(weight, weights[name], rtol=1e-5, atol=1e-6), name
    again = learner.train_step(pack_rows(rows, advantages, **sizes))
    assert again["train/trained_tokens"] == expected["train/trained_tokens"], "nothing of the step before is left"


def test_recomputation_and_bfloat16_change_little(learners):
    batch = make_batch(LENGTHS)
    plain = gradients(learners.open(), batch, torch.float32)
    full = gradients(learners.open(recompute="full"), batch, torch.float32)
    selective = gradients(learners.open(recompute="selective"), batch, torch.float32)
    rough = gradients(learners.open(precision="bfloat16"), batch, torch.float32)
    for name, value in plain.items():
        assert torch.allclose(value, full[name], rtol=1e-4, atol=1e-6), name
        assert torch.allclose(value, selective[name], rtol=1e-4, atol=1e-6), name
        assert torch.nn.functional.cosine_similarity(value.flatten(), rough[name].flatten(), dim=0) > 0.98, name


@pytest.mark.long
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_compilation_changes_little(learners, recompute):
    batch = make_batch(LENGTHS)
    plain = gradients(learners.open(), batch, torch.float32)
    compiled = gradients(learners.open(compile=True, recompute=recompute), batch, torch.float32)
    for name, value in plain.items():
        assert torch.allclose(value, compiled[name], rtol=1e-4, atol=1e-6), name


def test_logprobs_are_what_training_starts_from(learners):
    learner = learners.open()
    batch = make_batch(LENGTHS)
    logprobs = learner.logprobs(batch)
    rows = {row.key: row for row in make_rows(LENGTHS)}
    assert logprobs.keys() == rows.keys()
    gaps = []
    for key, row in rows.items():
        assert logprobs[key].shape == row.token_ids.shape
        assert logprobs[key][0] == 0
        gaps += [gap for gap, mask in zip(logprobs[key] - row.logprobs, row.mask, strict=True) if mask]
    metrics = learner.train_step(batch)
    assert metrics["train/sampler_gap_max"] == pytest.approx(max(abs(gap) for gap in gaps), rel=1e-4)
    assert metrics["train/trained_tokens"] == len(gaps)


@pytest.mark.parametrize("name", ["adamw", "muon", "8bit"])
def test_the_same_batch_again_lowers_its_loss(learners, name):
    learner = learners.open(name, max_grad_norm=1.0)
    tensors_before = tensors(learner)
    batch = make_batch(LENGTHS)
    losses = [learner.train_step(batch)["train/loss"] for _ in range(4)]
    assert losses[-1] < losses[0] - 0.05
    tensors_after = tensors(learner)
    assert all(not torch.equal(tensors_before[key], tensors_after[key]) for key in tensors_before)


def test_muon_takes_the_layers_matrices_alone(learners):
    muon, adamw = learners.open("muon").rank.optimizers.values()
    shapes = [tuple(p.shape) for group in muon.param_groups for p in group["params"]]
    assert len(shapes) == 14  # 7 matrices a layer
    assert all(len(shape) == 2 and 96 not in shape for shape in shapes)
    assert sum(len(group["params"]) for group in adamw.param_groups) == len(tensors(learners.current)) - 14


def test_weights_come_by_name_tied_ones_once_in_buckets(learners, model):
    from safetensors.torch import load_file

    learner = learners.open()
    limit = 6000
    saved = load_file(model / "model.safetensors")
    names, lasts = [], []
    for bucket in learner.buckets(limit):
        weights = dict(bucket.tensors())
        assert len(weights) == 1 or sum(tensor.nbytes for tensor in weights.values()) <= limit
        assert [(spec.name, spec.dtype, spec.shape) for spec in bucket.specs] == [
            (name, "float32", tuple(tensor.shape)) for name, tensor in weights.items()
        ]
        assert all(torch.equal(tensor, saved[name]) for name, tensor in weights.items())
        names += weights
        lasts.append(bucket.last)
    assert len(lasts) > 3
    assert lasts == [False] * (len(lasts) - 1) + [True]
    assert sorted(names) == sorted(saved)
    assert "lm_head.weight" not in names


def test_weights_are_cast_as_torch_casts_them(learners):
    learner = learners.open()
    expected = {name: tensor.bfloat16() for name, tensor in tensors(learner).items()}
    actual = {name: tensor.clone() for bucket in learner.buckets(6000, "bfloat16") for name, tensor in bucket.tensors()}
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


def test_a_bucket_is_written_as_safetensors(learners, tmp_path):
    from safetensors.torch import load_file

    learner = learners.open()
    actual = {}
    for number, bucket in enumerate(learner.buckets(6000)):
        bucket.save(tmp_path / f"{number}.safetensors")
        actual |= load_file(tmp_path / f"{number}.safetensors")
    expected = tensors(learner)
    assert actual.keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())


@pytest.mark.parametrize("name", ["adamw", "muon", "8bit"])
def test_a_saved_learner_goes_on_bit_for_bit(learners, tmp_path, name):
    learner = learners.open(name)
    first, second = (make_batch(FEW, seed=seed) for seed in range(2))
    learner.train_step(first)
    learner.save(tmp_path / "state")
    learner.finish_save()
    torch.rand(3)
    straight = learner.train_step(second)
    expected = tensors(learner)

    # The run goes on from the checkpoint's own model folder, as a resumed run does.
    learner = learners.open(name, folder=tmp_path / "state" / "model")
    learner.load(tmp_path / "state")
    assert learner.rank.steps == {"main": 1}
    assert learner.train_step(second) == straight
    assert all(torch.equal(value, expected[key]) for key, value in tensors(learner).items())


CHANGED = {"lr": 2e-3, "weight_decay": 0.3, "betas": (0.5, 0.6), "eps": 1e-3, "momentum": 0.7}


@pytest.mark.parametrize("name", ["adamw", "muon", "8bit"])
def test_a_loaded_optimizer_has_the_settings_of_the_configuration(learners, tmp_path, name):
    learner = learners.open(name)
    learner.train_step(make_batch(FEW))
    learner.save(tmp_path / "state")
    learner.finish_save()
    learner = learners.open(name, optimizer=CHANGED)
    state_before = [
        options(group) for optimizer in learner.rank.optimizers.values() for group in optimizer.param_groups
    ]
    learner.load(tmp_path / "state")
    state_after = [options(group) for optimizer in learner.rank.optimizers.values() for group in optimizer.param_groups]
    assert state_after == state_before
    adamw, norms, muon = state_after[-2], state_after[-1], state_after[0] if name == "muon" else {}
    assert norms == adamw | {"weight_decay": 0.0}
    assert {key: adamw[key] for key in ("weight_decay", "betas", "eps")}.items() <= CHANGED.items()
    assert {key: muon[key] for key in muon if key in ("weight_decay", "momentum")}.items() <= CHANGED.items()


def options(group):
    """What the configuration sets once; every step sets the learning rate."""
    return {key: value for key, value in group.items() if key not in ("params", "lr")}


def test_random_states_come_back(learners, tmp_path):
    import random

    import numpy as np

    learner = learners.open()
    learner.save(tmp_path / "state")
    learner.finish_save()
    drawn = (torch.rand(2).tolist(), np.random.rand(), random.random())
    learner.load(tmp_path / "state")
    assert (torch.rand(2).tolist(), np.random.rand(), random.random()) == drawn


def test_the_saved_model_is_a_whole_folder(learners, tmp_path):
    from transformers import AutoModelForCausalLM

    learner = learners.open()
    learner.train_step(make_batch(FEW))
    learner.save(tmp_path / "state")
    learner.finish_save()
    assert (tmp_path / "state" / "model" / "chat_template.jinja").read_text() == "{{ messages }}"
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "state" / "model")
    expected = tensors(learner)
    assert all(torch.equal(value, expected[name]) for name, value in loaded.named_parameters())
    assert not list(tmp_path.glob("*.partial"))


def test_a_checkpoint_that_does_not_fit_is_refused(learners, tmp_path):
    learner = learners.open()
    with pytest.raises(CheckpointError, match=r"learner\.json"):
        learner.load(tmp_path)
    learner.train_step(make_batch(FEW))
    learner.save(tmp_path / "state")
    learner.finish_save()
    (tmp_path / "state" / "optimizer" / ".metadata").unlink()
    with pytest.raises(CheckpointError, match="cannot be read"):
        learner.load(tmp_path / "state")
    learner = learners.open("muon")
    with pytest.raises(OtherKeysError, match=r"'adamw', this run has 'muon' \(learner\.optimizer\.name\)"):
        learner.load(tmp_path / "state")
    smaller = make_model(tmp_path / "small", intermediate_size=40)
    learner = learners.open(folder=smaller)
    with pytest.raises(OtherKeysError, match=r"down_proj.*model\.path"):
        learner.load(tmp_path / "state")
    (tmp_path / "state" / "learner.json").write_text('{"step": 1, "moments": []}')
    with pytest.raises(OtherKeysError, match=r"written with learner\.backend=megatron, this run has fsdp"):
        learner.load(tmp_path / "state")


def test_a_batch_with_a_token_that_was_not_sampled_is_refused_before_anything_changes(learners):
    learner = learners.open()
    tensors_before = tensors(learner)
    batch = copy.deepcopy(make_batch(LENGTHS))
    micro = batch.micro[0][-1]
    at = int(micro.mask_L.nonzero()[0])
    micro.provenance_L[at] = Provenance.OBSERVED
    with pytest.raises(ProvenanceError):
        learner.train_step(batch)
    assert all(torch.equal(value, tensors_before[name]) for name, value in tensors(learner).items())


def test_a_warning_trains_all_but_tokens_that_were_not_sampled(learners, caplog):
    expected, rows = copy.deepcopy(make_batch(LENGTHS)), make_rows(LENGTHS)
    micro = expected.micro[0][0]
    at = int(micro.mask_L.nonzero()[0])
    key, position = micro.keys[int(micro.row_L[at])], int(micro.position_ids_L[at])
    for name in ("mask", "weight", "advantages"):
        getattr(micro, f"{name}_L")[at] = 0
    learner = learners.open()
    plain = gradients(learner, expected, torch.float32)
    [bad] = [row for row in rows if row.key == key]
    bad.provenance[position], bad.logprobs[position] = Provenance.OBSERVED, float("nan")
    batch = make_batch(LENGTHS, rows=rows, provenance="warn")
    actual = gradients(learner, batch, torch.float32)
    assert all(torch.equal(value, actual[name]) for name, value in plain.items())
    assert "1 tokens are left out of the loss (train.provenance=warn). The first: token" in caplog.text
    assert batch.metrics["train/provenance_faults"] == 1
    metrics = learners.open().train_step(batch)
    assert metrics["train/trained_tokens"] == batch.metrics["batch/trained_tokens"]
    assert batch.metrics["batch/trained_tokens"] == make_batch(LENGTHS).metrics["batch/trained_tokens"] - 1


def test_a_batch_that_trains_nothing_takes_no_step(learners):
    learner = learners.open()
    learner.train_step(make_batch(FEW))
    tensors_before = tensors(learner)
    batch = make_batch([])
    assert learner.train_step(batch)["train/trained_tokens"] == 0
    assert learner.rank.steps == {"main": 1}
    assert all(torch.equal(value, tensors_before[name]) for name, value in tensors(learner).items())


def test_supervised_batches_take_cross_entropy(learners):
    learner = learners.open()
    batch = replace(make_batch(LENGTHS), kind="sft")
    metrics = learner.train_step(batch)
    assert metrics["train/loss"] == pytest.approx(metrics["train/nll"], rel=1e-5)


def test_learning_rate_warms_up_and_takes_the_batchs_factor():
    config = OptimizerConfig(lr=1.0, warmup_steps=4)
    assert [learning_rate(config, step, 0.5) for step in range(5)] == [0.125, 0.25, 0.375, 0.5, 0.5]
    assert learning_rate(OptimizerConfig(lr=1.0, warmup_steps=0), 0, 1.0) == 1.0


def test_a_missing_model_names_the_key(learners, tmp_path):
    with pytest.raises(ModelError, match=r"model\.path"):
        learners.open(folder=tmp_path / "none")


def test_a_gradient_that_is_not_finite_is_skipped_and_counted(learners):
    learner = learners.open()
    tensors_before, good = tensors(learner), make_batch(LENGTHS)
    broken = copy.deepcopy(good)
    broken.micro[0][0].advantages_L[broken.micro[0][0].mask_L] = float("inf")
    metrics = learner.train_step(broken)
    assert metrics["train/nonfinite_gradients"] == 1
    assert "train/grad_norm" not in metrics
    assert all(torch.equal(value, tensors_before[key]) for key, value in tensors(learner).items())
    assert learner.rank.steps == {"main": 0}
    metrics = learner.train_step(good)
    assert metrics["train/nonfinite_gradients"] == 0
    assert metrics["train/grad_norm"] > 0


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_norms_and_biases_do_not_decay(learners, name, tmp_path):
    """Without a gradient, a step at a learning rate of 1 takes the decay alone."""
    folder = make_model(tmp_path, "qwen2")
    learner = learners.open(name, folder=folder, optimizer={"lr": 1.0, "weight_decay": 0.5})
    tensors_before = tensors(learner)
    for parameter in learner.rank.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for optimizer in learner.rank.optimizers.values():
        optimizer.step()
    vectors = 0
    for key, value in tensors(learner).items():
        vectors += value.ndim == 1
        assert torch.equal(value, tensors_before[key] * (1 if value.ndim == 1 else 0.5)), key
    assert vectors > 6, "norms and biases"


def test_a_model_with_dropout_is_trained_without_it(learners, tmp_path):
    """Its rates stay in the saved configuration."""
    torch.manual_seed(3)
    sizes = {"vocab_size": 96, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 256}
    GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.5)).save_pretrained(tmp_path)
    learner = learners.open(folder=tmp_path)
    batch = make_batch(LENGTHS)
    first, again = (learner.logprobs(batch) for _ in range(2))
    assert all((first[key] == again[key]).all() for key in first)
    metrics = learner.train_step(batch)
    assert metrics["train/grad_norm"] > 0
    learner.save(tmp_path / "state")
    learner.finish_save()
    assert '"resid_pdrop": 0.5' in (tmp_path / "state" / "model" / "config.json").read_text()
