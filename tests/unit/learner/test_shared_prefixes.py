"""Computing shared prefixes once changes neither loss, gradient, log-probabilities nor values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM, Starcoder2Config, Starcoder2ForCausalLM

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.learner import LearnerConfig
from agentrl.core.types import MaskReason, Provenance, Row, RowKey
from agentrl.learner.fsdp.loading import load_critic
from agentrl.learner.fsdp.model import _select_lines
from agentrl.learner.rank import mask_positions
from agentrl.learner.tree_attention import tree_input
from tests.batches import pack_rows
from tests.unit.learner.learners import SIZES, VOCAB, Learners, gradients, make_model

CASES = [
    *((family, torch.float32, 1e-5) for family in ("qwen3", "qwen2", "llama", "windowed", "starcoder2")),
    ("windowed", torch.float64, 1e-6),  # its norms are computed in float32
    ("starcoder2", torch.float64, 1e-9),
]
"""Architecture, dtype, and the largest relative difference of gradients."""


def make_row(rollout: str, number: int, ids: Sequence[int], trained: Sequence[int]) -> Row:
    mask = np.zeros(len(ids), np.uint8)
    mask[list(trained)] = 1
    sampled = mask.astype(bool)
    rng = np.random.default_rng([number, len(ids)])
    return Row(
        key=RowKey("p", rollout, "main", number),
        token_ids=np.array(ids, np.int32),
        provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=mask,
        mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=(-rng.uniform(3, 6, len(ids)) * mask).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        requests=np.where(sampled, 0, -1).astype(np.int32),
        request_ids=("q",),
    )


def make_rows(seed: int) -> list[Row]:
    """A group with a prompt, two rollouts of which begin with the same samples; forks; a row that is a prefix; a lone row."""
    rng = np.random.default_rng(seed)

    def tokens(count: int) -> list[int]:
        return rng.integers(2, VOCAB, count).tolist()

    prompt, same = tokens(30), tokens(9)
    fork = prompt + tokens(20)
    return [
        make_row("a", 0, [*prompt, *same, *tokens(8)], range(30, 47)),
        make_row("b", 0, [*prompt, *same, *tokens(5)], range(30, 44)),
        make_row("b", 1, [*prompt, *same], range(35, 39)),
        make_row("c", 0, [*fork, *tokens(6)], range(30, 56)),
        make_row("c", 1, [*fork, *tokens(3)], range(50, 53)),
        make_row("c", 2, [*fork[:40], *tokens(12)], range(40, 52)),
        make_row("d", 0, tokens(70), range(30, 70)),
    ]


def make_batch(rows: list[Row], *, share_prefixes: bool, tokens: int = 4096, shares: int = 1) -> GlobalBatch:
    advantages = {"a": 1.5, "b": -0.5, "c": 0.25, "d": -1.0}
    return pack_rows(
        rows, advantages, data_parallel_size=shares, tokens_per_micro=tokens, pad_id=0, share_prefixes=share_prefixes
    )


def make_windowed(folder: Path) -> Path:
    """A model whose second layer has a sliding window, shorter than the prompt."""
    torch.manual_seed(7)
    kinds = {"layer_types": ["full_attention", "sliding_attention"]}
    windowed = Qwen3Config(**SIZES, head_dim=16, use_sliding_window=True, sliding_window=20, **kinds)
    Qwen3ForCausalLM(windowed).save_pretrained(folder)
    return folder


def make_starcoder(folder: Path) -> Path:
    """A model whose norms are computed in its dtype, with sliding windows in all layers."""
    torch.manual_seed(7)
    Starcoder2ForCausalLM(Starcoder2Config(**SIZES, sliding_window=35)).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = tmp_path_factory.mktemp("models")
    return {
        **{family: make_model(made / family, family) for family in ("qwen3", "qwen2", "llama")},
        "windowed": make_windowed(made / "windowed"),
        "starcoder2": make_starcoder(made / "starcoder2"),
    }


def far(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize(("family", "dtype", "limit"), CASES, ids=str)
def test_gradient_and_logprobs_stay(family, dtype, limit, learners: Learners, folders):
    learner = learners.open(folder=folders[family], logits_chunk=16)
    learner.rank.model.to(dtype)
    rows = make_rows(1)
    plain = make_batch(rows, share_prefixes=False)
    expected, losses = gradients(learner, plain, dtype), learner.logprobs(plain)
    for tokens in (4096, 128):
        shared = make_batch(rows, share_prefixes=True, tokens=tokens)
        assert any(micro.shares_prefixes for micro in shared.micro[0])
        assert shared.metrics["batch/shared_share"] > 0.3
        actual = gradients(learner, shared, dtype)
        assert max(far(actual[name], expected[name]) for name in expected) < limit
        logprobs = learner.logprobs(shared)
        assert logprobs.keys() == losses.keys()
        assert all(np.allclose(logprobs[key], losses[key], atol=1e-5) for key in losses)


def test_losses_and_entropies_stay(learners: Learners, folders):
    learner = learners.open(folder=folders["qwen3"])
    batches = [make_batch(make_rows(2), share_prefixes=share) for share in (False, True)]
    learner.rank._update = lambda lr_scale: {}
    plain, shared = (learner.train_step(batch) for batch in batches)
    assert plain == pytest.approx(shared, rel=1e-5)
    [micros] = zip(*(batch.micro[0] for batch in batches), strict=True)
    entropies = []
    for micro in micros:
        at_N = micro.mask_L.nonzero()[:, 0]
        _, entropy_N, _ = learner.rank.model(micro, at_N.numpy(), 1.0, True)
        number_N = micro.row_L[at_N]
        entropies.append({key: entropy_N[number_N == number] for number, key in enumerate(micro.keys)})
    assert all(torch.allclose(entropies[0][key], entropies[1][key], atol=1e-5) for key in entropies[0])


def test_values_stay(learners: Learners, folders):
    learner = learners.open(folder=folders["qwen3"])
    critic = load_critic(folders["qwen3"], LearnerConfig(precision="float32", device="cpu"), torch.device("cpu"), None)
    torch.nn.init.normal_(critic.head.weight)
    learner.rank.model, learner.rank.name = critic, "critic"
    rows = make_rows(3)
    plain, shared = (learner.rank.values(make_batch(rows, share_prefixes=share)) for share in (False, True))
    assert all(np.allclose(plain[key], shared[key], atol=1e-5) for key in plain)
    assert np.abs(np.concatenate([*plain.values()])).max() > 0.1


def test_a_token_is_computed_and_scored_once(learners: Learners, folders):
    learner = learners.open(folder=folders["qwen3"])
    rows = make_rows(4)
    batch = make_batch(rows, share_prefixes=True)
    sizes: list[int] = []
    model = learner.rank.model
    model.hf.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: sizes.append(inputs[0].numel())
    )
    score = model._score
    model._score = lambda hidden, *arguments: (sizes.append(len(hidden)), score(hidden, *arguments))[1]
    learner.logprobs(batch)
    prefixes = {tuple(row.token_ids[:stop].tolist()) for row in rows for stop in range(1, len(row.token_ids) + 1)}
    assert sizes == [len(prefixes), len(prefixes) - len({prefix[0] for prefix in prefixes})]
    assert batch.metrics["batch/shared_share"] == pytest.approx(1 - len(prefixes) / batch.metrics["batch/tokens"])


def test_micro_batches_without_tokens_to_score_have_gradients_of_zero(learners: Learners, folders):
    model = learners.open(folder=folders["qwen3"]).rank.model
    [micro] = make_batch(make_rows(5), share_prefixes=True).micro[0]
    only_padding = pack_rows([], {}, data_parallel_size=1, tokens_per_micro=32, pad_id=0).micro[0][0]
    for empty in (micro, replace(only_padding, shares_prefixes=True)):
        scores_N = model(empty, np.zeros(0, np.int64), 1.0)[0]
        assert scores_N.shape == (0,)
        scores_N.sum().backward()
        used = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        assert used
        assert all(not gradient.any() for gradient in used)


def test_a_model_that_mixes_rows_takes_no_shared_prefixes(learners: Learners, folders):
    learner = learners.open(folder=folders["qwen3"])
    assert learner.shares_prefixes
    learner.rank.model.separates_rows = True
    assert not learner.shares_prefixes
    with pytest.raises(AssertionError, match="mix rows"):
        learner.logprobs(make_batch(make_rows(6), share_prefixes=True))


def test_the_gradient_of_a_branch_is_the_same_on_several_threads():
    torch.manual_seed(0)
    lines, index, weights = torch.randn(3, 64, requires_grad=True), torch.arange(2000) % 3, torch.randn(2000, 64)
    torch.set_num_threads(2)
    try:
        first, *other_results = (
            torch.autograd.grad((_select_lines(lines, index) * weights).sum(), lines)[0] for _ in range(20)
        )
    finally:
        torch.set_num_threads(1)
    assert all(torch.equal(first, other_result) for other_result in other_results)


def test_the_first_batch_of_trees_computes_rows_once_for_the_compiler(
    learners: Learners, folders, monkeypatch: pytest.MonkeyPatch
):
    """With gradients and without, and nothing of it is trained."""
    monkeypatch.setattr(torch, "compile", lambda function, **options: function)
    shared, plain = (make_batch(make_rows(1), share_prefixes=share) for share in (True, False))
    expected = learners.open(folder=folders["qwen3"]).train_step(shared)
    learner = learners.open(folder=folders["qwen3"], compile=True)
    passes: list[tuple[bool, bool]] = []
    learner.rank.model.register_forward_pre_hook(
        lambda module, inputs: passes.append((inputs[0].shares_prefixes, torch.is_grad_enabled()))
    )
    learner.logprobs(shared)
    assert learner.train_step(shared) == pytest.approx(expected, rel=1e-5)
    assert passes == [(False, False), (True, False), (False, True), (True, True)]
    passes.clear()
    for batch in (shared, plain):
        learner.train_step(batch)
    assert passes == [(True, True), (False, True)]


def test_token_ids_and_positions_of_a_tree_are_on_the_cpu_until_the_model_takes_them():
    batch = pack_rows(make_rows(0), data_parallel_size=1, tokens_per_micro=512, pad_id=0, share_prefixes=True)
    micro = next(micro for micro in batch.micro[0] if micro.shares_prefixes)
    tree = tree_input(micro, mask_positions(micro), torch.device("meta"), windows=(8,))
    assert {x.device.type for x in (tree.token_ids_L, tree.position_ids_L)} == {"cpu"}
    assert {x.device.type for x in (tree.before_M, tree.targets_M, tree.scored_N)} == {"meta"}
