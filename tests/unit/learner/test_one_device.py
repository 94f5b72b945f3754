"""Forward, loss and backward pass on `meta`, as on a GPU: no operation has tensors of the CPU and of the device.

Values are not known there. What depends on them is replaced: masks select all.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from agentrl.algo.batch_loss import BatchLoss
from agentrl.batch.microbatch import GlobalBatch, Truncation
from agentrl.config.algo import AlgoConfig
from agentrl.learner import images, tree_attention
from agentrl.learner.attention import IMPLEMENTATION
from agentrl.learner.fsdp.experts import use_grouped_products
from agentrl.learner.fsdp.model import PackedModel, PolicyModel, ValueModel
from agentrl.learner.fsdp.weights import allocate
from agentrl.learner.images import image_inputs
from agentrl.learner.rank import SequenceRatios, first_tokens, mask_positions, score_positions
from agentrl.learner.step_metrics import StepMetrics
from agentrl.models.load import empty_model
from tests.algo_config import make_algo
from tests.batches import pack_rows
from tests.supports import add_support
from tests.unit.learner import image_rows
from tests.unit.learner.learners import VOCAB, make_model, make_rows
from tests.unit.learner.test_families import dense_flex, make_family

META = torch.device("meta")
COPIES, INDEXING = ("aten::copy_", "aten::_to_copy"), ("aten::index", "aten::index_put_")
"""Operations that take tensors of both; indices of a tensor on the device may be on the CPU."""


class OneDevice(TorchDispatchMode):
    """Fails if an operation that does not take both has tensors with dimensions on the CPU and on `meta`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        of_one_device = (args[:1], args[2:]) if name in INDEXING and args[0].is_meta else (args, kwargs)
        tensors = [leaf for leaf in tree_leaves(of_one_device) if isinstance(leaf, torch.Tensor)]
        devices = {tensor.device.type for tensor in tensors if tensor.ndim}
        assert len(devices) < 2 or name in COPIES, f"{name} has tensors of {sorted(devices)}"
        if META.type not in devices:
            return func(*args, **(kwargs or {}))
        if name == "aten::_grouped_mm":  # that of `meta` takes bfloat16 alone
            lines, factors, ends = args[:3]
            groups = () if factors.ndim == 3 else (len(ends),)
            return lines.new_empty(*groups, len(lines), factors.shape[-1])
        mask = next((index for index in args[1] if index is not None), None) if name in INDEXING else None
        if mask is not None and mask.dtype is torch.bool:
            selected = (mask.numel(), *args[0].shape[mask.ndim :])
            return args[0] if name == "aten::index_put_" else args[0].new_empty(selected)
        return func(*args, **(kwargs or {}))


class CpuAutocast(torch.autocast):
    """There is none for `meta`."""

    def __init__(self, device_type: str, *args: Any, **options: Any) -> None:
        assert device_type == META.type
        super().__init__("cpu", *args, **options)


@pytest.fixture(autouse=True)
def on_meta(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute what `meta` lacks otherwise: autocast, compiled attention, and the vision tower, which reads sizes of images."""
    monkeypatch.setattr(torch, "autocast", CpuAutocast)
    enabled, dtype = torch.is_autocast_enabled, torch.get_autocast_dtype
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device: enabled("cpu"))
    monkeypatch.setattr(torch, "get_autocast_dtype", lambda device: dtype("cpu"))
    monkeypatch.setattr(tree_attention, "_compiled_flex", lambda: dense_flex)
    monkeypatch.setattr(images, "compute_image_features", features_on_meta)


def features_on_meta(hf: Any, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """The features of the pictures in inputs, with a gradient to the tower."""
    assert all(data.is_meta for data in inputs.values())
    count = inputs["pixel_values"].shape[0] // hf.config.vision_config.spatial_merge_size**2
    weight = next(hf.visual.parameters())
    return [torch.zeros(count, hf.config.get_text_config().hidden_size, device=META) + weight.sum()]


def make_policy(folder: Path, model: type[PackedModel] = PolicyModel) -> PackedModel:
    """A model without values: `meta` has none."""
    policy = model(empty_model(folder, IMPLEMENTATION, values=model is ValueModel), 16)
    policy.images = image_inputs(policy.hf, folder, "model.path")
    use_grouped_products(policy.hf)
    allocate(policy, META)
    return policy


def compute(model: PackedModel, batch: GlobalBatch, algo: AlgoConfig) -> None:
    """Compute what an optimizer step does before the update, of a tree also its first tokens as rows."""
    loss, metrics = BatchLoss(algo, META), StepMetrics(META)
    for micro in batch.micro[0]:
        at_N = mask_positions(micro)
        scores = model(
            micro, at_N.numpy(), batch.temperature, batch.kind == "rl", batch.truncation, loss.centering(batch)
        )
        if batch.kind == "rl":
            SequenceRatios(batch, META).add(*loss.log_ratio(micro, at_N, scores[0]))
        reference_N = scores[0].detach() if loss.needs_reference(batch) else None
        total, loss_metrics = loss(batch, micro, at_N, scores, reference_N=reference_N)
        total.backward()
        metrics.add(total, len(at_N), loss_metrics)
        if micro.shares_prefixes:
            rows = first_tokens(micro, 8)
            model(rows, score_positions(rows).numpy(), 1.0)


def text_batch(*, supports: bool = False, **options: Any) -> GlobalBatch:
    """Rows of which all begin with the same tokens."""
    rows = make_rows((20, 12, 15))
    ids = [np.concatenate([rows[0].token_ids[:6], row.token_ids[6:]]) for row in rows]
    rows = [replace(row, token_ids=token_ids) for row, token_ids in zip(rows, ids, strict=True)]
    rows = [add_support(row, VOCAB, number) for number, row in enumerate(rows)] if supports else rows
    advantages = {row.key.rollout_id: (-1.0) ** number for number, row in enumerate(rows)}
    sizes = {"pad_id": 0, "data_parallel_size": 1, "tokens_per_micro": 128}
    return pack_rows(rows, advantages, **sizes, replays_support=supports, **options)


OBJECTIVES: dict[str, dict[str, Any]] = {
    "learner's log-probabilities": {"old_logprobs": "learner", "correction": {"rollout_rs": ["token_k1"]}},
    "reference and entropy": {"kl_coef": 0.1, "kl_in": "loss", "entropy_coef": 0.1},
    "sequences": {"loss": {"name": "gspo"}},
}


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_objectives_are_computed_on_one_device(objective: str, tmp_path: Path) -> None:
    with OneDevice():
        compute(make_policy(make_model(tmp_path)), text_batch(), make_algo(**OBJECTIVES[objective]))


@pytest.mark.parametrize("shares", [False, True], ids=["rows", "tree"])
def test_distributions_are_computed_on_one_device(shares: bool, tmp_path: Path) -> None:
    policy = make_policy(make_model(tmp_path))
    with OneDevice():
        compute(policy, replace(text_batch(share_prefixes=shares), truncation=Truncation(5, 0.9)), make_algo())
        compute(policy, text_batch(supports=True, share_prefixes=shares), make_algo())


@pytest.mark.parametrize("family", ["gpt_oss", "qwen3_next"])
def test_families_are_computed_on_one_device(family: str, tmp_path: Path) -> None:
    """A tree with windows, sinks and experts; and rows that have a bin each."""
    policy = make_policy(make_family(tmp_path, family))
    policy.separates_rows = family == "qwen3_next"
    with OneDevice():
        compute(policy, text_batch(share_prefixes=not policy.separates_rows), make_algo())


def test_pictures_are_computed_on_one_device() -> None:
    """In a tree, and of a critic; and a micro-batch without pictures, of which another has some."""
    rows = image_rows.episodes("qwen2.5-vl")
    policy = make_policy(image_rows.folder("qwen2.5-vl"))
    critic = make_policy(image_rows.critic_folder("qwen2.5-vl"), ValueModel)
    without = image_rows.batch(rows[4:])
    [[micro]] = without.micro
    with OneDevice():
        compute(policy, image_rows.batch(rows, share_prefixes=True), make_algo())
        compute(policy, replace(without, micro=((replace(micro, needs_vision=True),),)), make_algo())
        compute(critic, replace(image_rows.batch(rows), kind="sft"), make_algo())


def test_tensors_of_both_devices_are_seen() -> None:
    with OneDevice(), pytest.raises(AssertionError, match="aten::add has tensors of"):
        torch.ones(2) + torch.ones(2, device=META)
