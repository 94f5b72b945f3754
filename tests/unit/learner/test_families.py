"""Families whose attention or layers differ from the plain decoder's: log-probabilities and gradients of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention
from transformers import AutoConfig, AutoModelForCausalLM

from agentrl.batch.microbatch import Truncation
from agentrl.batch.prefix_tree import prefix_tree
from agentrl.config.learner import LearnerConfig
from agentrl.learner import tree_attention
from agentrl.learner.attention import IMPLEMENTATION, packed_attention, packed_rows
from agentrl.learner.fsdp.loading import _small_windows, load_policy
from agentrl.learner.fsdp.model import PolicyModel
from agentrl.learner.tree_attention import Tree, TreeMasks, attend_tree, row_masks, tree_masks, tree_rows
from agentrl.models.load import empty_model
from tests.batches import pack_rows
from tests.unit.learner.learners import SIZES, Learners, make_rows

CPU = torch.device("cpu")
LENGTHS = (30, 7, 33)
MIXTURE = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR: dict[str, Any] = {
    "head_dim": 16, "num_experts": 4, "shared_expert_intermediate_size": 16, "linear_key_head_dim": 8,
    "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}  # fmt: skip
SPARSE: dict[str, Any] = {
    "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 1, "topk_group": 1, "q_lora_rank": 24,
    "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10,
    # Of few heads, some give all keys the score 0: which are chosen then depends on the padding, in transformers too.
    "index_topk": 5, "index_head_dim": 16, "index_n_heads": 32,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "mixtral": {"num_local_experts": 4, "sliding_window": 6},
    "gpt_oss": {
        "num_local_experts": 4, "head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"],
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 500.0, "factor": 8.0, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 32,
        },
    },
    "qwen3_next": LINEAR,
    "deepseek_v32": SPARSE | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm_moe_dsa": SPARSE | {"first_k_dense_replace": 1, "n_shared_experts": 1},
}  # fmt: skip


def make_family(folder: Path, name: str) -> Path:
    """Save a random model."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(name, **SIZES | MIXTURE | FAMILIES[name])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2).add_(parameter.ndim == 1)
    model.save_pretrained(folder)
    return folder


def scores_of(policy: PolicyModel, temperature: float) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Log-probabilities of all tokens of packed rows but the first of each, in the order of the rows; and the rows."""
    batch = pack_rows(make_rows(LENGTHS), {"r0": 1.0, "r1": 1.0, "r2": 1.0}, data_parallel_size=1, tokens_per_micro=128)
    [[micro]] = batch.micro
    at_N = ((micro.row_L >= 0) & (micro.position_ids_L > 0)).nonzero()[:, 0]
    scores_N = policy(micro, at_N.numpy(), temperature)[0]
    rows = range(len(LENGTHS))
    ids = [micro.token_ids_L[micro.row_L == row] for row in rows]
    return torch.cat([scores_N[micro.row_L[at_N] == row] for row in rows]), ids


@pytest.mark.parametrize("name", FAMILIES)
def test_a_family_has_the_log_probabilities_and_gradients_of_transformers(name: str, tmp_path: Path) -> None:
    """Rows reach beyond sliding windows, and have more keys than are selected."""
    policy = load_policy(make_family(tmp_path, name), LearnerConfig(precision="float32", logits_chunk=7), CPU, None)
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    scores_N, rows = scores_of(policy, 0.7)
    expected_N = torch.cat(
        [
            (plain(ids[None]).logits[0, :-1] / 0.7).log_softmax(-1).gather(1, ids[1:, None])[:, 0]
            for ids in rows
        ]
    )  # fmt: skip
    assert torch.allclose(scores_N, expected_N, atol=1e-4, rtol=0)
    weights_N = torch.arange(len(scores_N)).cos()
    (scores_N * weights_N).sum().backward()
    (expected_N * weights_N).sum().backward()
    expected = dict(plain.named_parameters())
    for weight_name, parameter in policy.hf.named_parameters():
        gradient = expected[weight_name].grad
        assert parameter.requires_grad == (".indexer." not in weight_name)
        if gradient is None:
            assert parameter.grad is None, weight_name
        else:
            assert torch.allclose(parameter.grad, gradient, atol=1e-3 * float(gradient.abs().max())), weight_name


def test_indexers_of_sparse_attention_stay_as_they_are(tmp_path: Path) -> None:
    learners = Learners(make_family(tmp_path / "m", "deepseek_v32"))
    learner = learners.open()
    before = {name: tensor.clone() for name, tensor in learner.rank.model.hf.named_parameters()}
    batch = pack_rows(
        make_rows(LENGTHS), {"r0": 1.0, "r1": -1.0, "r2": 1.0}, data_parallel_size=1, tokens_per_micro=128
    )
    learner.train_step(batch)
    changed = {n for n, tensor in learner.rank.model.hf.named_parameters() if not torch.equal(tensor, before[n])}
    assert changed == {name for name in before if ".indexer." not in name}
    learners.close()


def test_the_probe_of_small_windows_has_masks_of_them_on_a_gpu(tmp_path: Path) -> None:
    """On `meta`, where rows of a model with sinks are those of a GPU. Several ranks are probed in bfloat16."""
    policy = PolicyModel(empty_model(make_family(tmp_path, "gpt_oss"), IMPLEMENTATION), 7)
    policy.autocast = True
    with _small_windows(policy.hf):
        rows = policy.attention_rows(torch.arange(9)[None], torch.zeros(1, 9, dtype=torch.int32))
        windows = {module.sliding_window for module in policy.hf.modules() if hasattr(module, "sliding_window")}
    assert isinstance(rows, TreeMasks)
    assert windows == rows.masks.keys() == {None, 4}
    assert policy.windows == (6,)


def attention_with_sinks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, sinks_H: torch.Tensor, window: int) -> Any:
    """Attention ``[H, T, D]`` of one row: a softmax over the keys in the window and the sink, which has no value."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(groups, 1) for x in (k, v))
    far = torch.arange(length)[:, None] - torch.arange(length)
    scores = (q @ k.transpose(2, 3) * 0.3).masked_fill((far < 0) | (far >= window), float("-inf"))
    weights = torch.exp(scores)
    return (weights @ v / (weights.sum(-1, keepdim=True) + sinks_H.exp()[:, None, None]))[0]


def dense_flex(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    block_mask: Any,
    scale: float | None,
    return_lse: bool = False,
    **options: Any,
) -> Any:
    """Compute flex attention with all scores: torch's own has no gradient on CPUs."""
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    ids, zero = torch.arange(q.shape[2], device=q.device), torch.tensor(0, device=q.device)
    sees = block_mask.mask_mod(zero, zero, ids[:, None], ids)
    scores = (q @ k.transpose(2, 3) * (scale or q.shape[-1] ** -0.5)).masked_fill(~sees, float("-inf"))
    attended = scores.softmax(-1) @ v
    return (attended, scores.logsumexp(-1)) if return_lse else attended


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile", "ignore:.*return_lse")
@pytest.mark.parametrize("path", ["packed", "rows of flex", "tree", "flex"])
def test_sinks_take_part_in_the_softmax_on_every_path(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows, of which the second begins as the first; outputs and gradients, also of the sinks."""
    torch.manual_seed(0)
    first, second = np.arange(90), np.concatenate([np.arange(40), np.arange(200, 245)])
    tree, lengths = prefix_tree([first, second]), [len(first), len(second)]
    states = [torch.randn(1, heads, 256, 8, requires_grad=True) for heads in (4, 2, 2)]
    sinks_H = torch.randn(4, requires_grad=True)
    inputs = [*states, sinks_H]
    monkeypatch.setattr(tree_attention, "_compiled_flex", lambda: dense_flex)
    rows = torch.from_numpy(tree.index_N).split(lengths)
    expected = [attention_with_sinks(*(x[:, :, row] for x in states), sinks_H, 30) for row in rows]
    if path in ("packed", "rows of flex"):
        positions = torch.cat([torch.arange(length) for length in lengths])
        row_L = torch.repeat_interleave(torch.arange(2), torch.tensor(lengths))
        packed = packed_rows(positions[None], row_L[None], CPU) if path == "packed" else row_masks(positions, CPU, [30])
        options: dict[str, Any] = {"packed": packed, "sliding_window": 30}
        gathered = [x[:, :, torch.cat(rows)] for x in states]
        attended, _ = packed_attention(torch.nn.Module(), *gathered, None, scaling=0.3, s_aux=sinks_H, **options)
        actual = attended[0].split(lengths)
    else:
        masks: Tree = tree_masks(tree, 256, CPU, [30]) if path == "flex" else tree_rows(tree, lengths, 256)
        attended = attend_tree(*states, masks, 0.3, 30, sinks_H)[0]
        actual = tuple(attended[row] for row in rows)
    if path == "flex":
        monkeypatch.setattr(tree_attention, "_compiled_flex", lambda: flex_attention)
        detached = [x.detach() for x in inputs]
        by_flex = attend_tree(*detached[:3], masks, 0.3, 30, detached[3])[0]
        assert torch.allclose(by_flex, attended, atol=1e-5)
    for output, row in zip(actual, expected, strict=True):
        assert torch.allclose(output.transpose(0, 1), row, atol=1e-5)
    ours, theirs = (
        torch.autograd.grad(sum((number + 1) * row.square().sum() for number, row in enumerate(outputs)), inputs)
        for outputs in (actual, expected)
    )
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.allclose(mine, other, atol=1e-4)


def test_a_learner_scores_and_trains_the_distribution_that_sampling_left(tmp_path: Path) -> None:
    """Log-probabilities after renormalisation are nowhere lower."""
    learners = Learners(make_family(tmp_path / "m", "mixtral"))
    learner = learners.open()
    rows, options = make_rows(LENGTHS), {"data_parallel_size": 1, "tokens_per_micro": 128}
    advantages = {"r0": 1.0, "r1": -1.0, "r2": 1.0}
    whole, cut = (
        learner.logprobs(pack_rows(rows, advantages, truncation=truncation, **options))
        for truncation in (None, Truncation(top_k=20, top_p=0.9))
    )
    assert all((cut[key] >= whole[key] - 1e-6).all() and (cut[key] > whole[key]).any() for key in whole)
    assert (
        learner.train_step(pack_rows(rows, advantages, truncation=Truncation(20, 0.9), **options))["train/grad_norm"]
        > 0
    )
    learners.close()
