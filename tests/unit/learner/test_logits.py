"""The language head: log-probabilities and entropies without kept logits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import Barrier, local
from typing import cast

import pytest
import torch
import torch.distributed as dist

from agentrl.batch.microbatch import Truncation
from agentrl.learner import head
from agentrl.learner.head import (
    HeadOptions,
    VocabularyPart,
    _block,
    _statistics,
    _statistics_of_blocks,
    token_scores,
)

N, H, V = 11, 6, 23


def given(dtype: torch.dtype, *, bias: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(N, H, dtype=dtype), torch.randn(V, H, dtype=dtype)
    return hidden, weight, torch.randn(V, dtype=dtype) if bias else None, torch.randint(0, V, (N,))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("entropy", [True, False])
def test_scores_and_gradients_are_those_of_torchs_softmax(bias: bool, chunk: int, entropy: bool) -> None:
    hidden, weight, offset, targets = given(torch.float64, bias=bias)
    inputs = [x.requires_grad_() for x in (hidden, weight, offset) if x is not None]
    options = HeadOptions(0.7, entropy, chunk, compiled=False)
    logprobs, entropies, _ = token_scores(hidden, weight, offset, targets, options)
    distribution = torch.distributions.Categorical(logits=torch.nn.functional.linear(hidden, weight, offset) / 0.7)
    expected = [distribution.log_prob(targets)] + ([distribution.entropy()] if entropy else [])
    actual = [logprobs] + ([] if entropies is None else [entropies])
    factors = [torch.linspace(-1, 2, N, dtype=torch.float64), torch.linspace(3, -1, N, dtype=torch.float64)]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    ours = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, actual, strict=False)), inputs)
    theirs = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, expected, strict=False)), inputs)
    for mine, theirs_row in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_row, atol=1e-12, rtol=1e-12)


def test_a_frozen_head_has_no_gradient_and_hidden_states_still_do() -> None:
    hidden, weight, _, targets = given(torch.float64, bias=False)
    hidden.requires_grad_()
    logprobs, _, _ = token_scores(hidden, weight, None, targets, HeadOptions(1.0, False, 4, compiled=False))
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("bias", [True, False])
def test_logits_in_autocast_are_not_rounded(bias: bool) -> None:
    hidden, weight, offset, targets = given(torch.float32, bias=bias)
    weight, rough = weight * 30, torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        actual_token_scores, _, _ = token_scores(
            hidden, weight, offset, targets, HeadOptions(1.0, False, 4, compiled=False)
        )
    factors = (hidden.bfloat16().double(), weight.bfloat16().double())
    logits = factors[0] @ factors[1].T + (offset.bfloat16().double() if offset is not None else 0)
    exact = logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert actual_token_scores.dtype == rough
    torch.testing.assert_close(actual_token_scores.double(), exact, atol=2e-4 if not bias else 2e-2, rtol=1e-5)
    rounded = logits.bfloat16().double().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    assert (rounded - exact).abs().max() > 5e-2, "sizes at which rounding would be seen"


def test_no_tokens_have_no_scores() -> None:
    hidden, weight, _, targets = given(torch.float32, bias=False)
    hidden.requires_grad_(), weight.requires_grad_()
    logprobs, entropies, _ = token_scores(
        hidden[:0], weight, None, targets[:0], HeadOptions(1.0, True, 4, compiled=False)
    )
    assert logprobs.shape == (0,)
    assert entropies is not None
    assert entropies.shape == (0,)
    (logprobs.sum() + entropies.sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()


@pytest.mark.parametrize("entropy", [True, False])
def test_statistics_of_blocks_are_those_of_the_vocabulary(*, entropy: bool) -> None:
    torch.manual_seed(0)
    logits, targets = 9 * torch.randn(5, 3 * 128, dtype=torch.float64), torch.randint(0, 3 * 128, (5,))
    assert (_block(3 * 128), _block(151936), _block(32000), _block(151643)) == (128, 128, 256, 0)
    blocks = _statistics_of_blocks(logits / 0.7, targets, 128, entropy)
    for actual, expected in zip(blocks, _statistics(logits, targets, 0.7, entropy), strict=True):
        torch.testing.assert_close(actual, expected, atol=1e-12, rtol=1e-12)


def kept_tokens(logits_N_V: torch.Tensor, targets_N: torch.Tensor, truncation: Truncation) -> torch.Tensor:
    """Return bools ``[N, V]``: the most probable tokens until their share of all is reached, and the targets, one at a time."""
    kept_N_V = torch.zeros_like(logits_N_V, dtype=torch.bool)
    for kept_V, logits_V, target in zip(kept_N_V, logits_N_V, targets_N, strict=True):
        probabilities_V, order = logits_V.softmax(-1).sort(descending=True)
        order = order[: truncation.top_k] if truncation.top_k > 0 else order
        share = 0.0
        for token, probability in zip(order, probabilities_V, strict=False):
            if share >= truncation.top_p:
                break
            kept_V[token] = True
            share += float(probability)
        kept_V[target] = True
    return kept_N_V


TRUNCATIONS = [Truncation(5, 1.0), Truncation(-1, 0.6), Truncation(9, 0.5), Truncation(1, 1.0), Truncation(100, 1.0)]


@pytest.mark.parametrize("truncation", TRUNCATIONS)
@pytest.mark.parametrize("entropy", [True, False])
def test_a_truncated_distribution_is_renormalised_with_its_gradient(truncation: Truncation, entropy: bool) -> None:
    hidden, weight, offset, targets = given(torch.float64, bias=True)
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), offset.requires_grad_()]
    options = HeadOptions(0.7, entropy, 4, compiled=True, truncation=truncation)
    logprobs, entropies, _ = token_scores(hidden, weight, offset, targets, options)
    logits = torch.nn.functional.linear(hidden, weight, offset) / 0.7
    rest = logits.masked_fill(~kept_tokens(logits, targets, truncation), -1e9)
    distribution = torch.distributions.Categorical(logits=rest)
    expected = [distribution.log_prob(targets)] + ([distribution.entropy()] if entropy else [])
    actual = [logprobs] + ([] if entropies is None else [entropies])
    factors = [torch.linspace(-1, 2, N, dtype=torch.float64), torch.linspace(3, -1, N, dtype=torch.float64)]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    ours = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, actual, strict=False)), inputs)
    theirs = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, expected, strict=False)), inputs)
    for mine, theirs_row in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_row, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("truncation", TRUNCATIONS)
def test_a_truncation_of_logits_that_are_not_finite_is_not(truncation: Truncation) -> None:
    hidden, weight, _, targets = given(torch.float64, bias=False)
    options = HeadOptions(0.7, False, 4, compiled=False, truncation=truncation)
    logprobs, _, _ = token_scores(hidden, torch.full_like(weight, torch.nan), None, targets, options)
    assert logprobs.isnan().all()


class Threads:
    """A group of two ranks that are threads."""

    def __init__(self) -> None:
        self.barrier = Barrier(2)
        self.tensors: dict[int, torch.Tensor] = {}
        self.rank = local()

    def size(self) -> int:
        return 2

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Return the tensors of both ranks."""
        self.tensors[self.rank.number] = tensor.clone()
        self.barrier.wait(20)
        tensors = [self.tensors[rank] for rank in range(2)]
        self.barrier.wait(20)
        return tensors

    def all_gather(self, into: list[torch.Tensor], tensor: torch.Tensor, group: object) -> None:
        for target, part in zip(into, self.exchange(tensor), strict=True):
            target.copy_(part)

    def all_reduce(self, tensor: torch.Tensor, op: object = dist.ReduceOp.SUM, group: object = None) -> None:
        first, second = self.exchange(tensor)
        tensor.copy_(torch.maximum(first, second) if op == dist.ReduceOp.MAX else first + second)


@pytest.mark.parametrize("truncation", TRUNCATIONS[:3])
def test_parts_of_a_vocabulary_have_the_truncated_distribution_of_the_whole(
    truncation: Truncation, monkeypatch: pytest.MonkeyPatch
) -> None:
    hidden, weight, _, targets = given(torch.float64, bias=False)
    weight, targets, ranks = weight[:22], targets.clamp(max=21), Threads()
    whole = HeadOptions(0.7, True, 4, compiled=False, truncation=truncation)
    expected = token_scores(hidden, weight, None, targets, whole)
    monkeypatch.setattr(head.dist, "all_gather", ranks.all_gather)
    monkeypatch.setattr(head.dist, "all_reduce", ranks.all_reduce)

    def score(rank: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        ranks.rank.number = rank
        options = replace(whole, vocabulary_part=VocabularyPart(rank * 11, cast(dist.ProcessGroup, ranks)))
        with torch.no_grad():
            return token_scores(hidden, weight[11 * rank : 11 * (rank + 1)], None, targets, options)

    with ThreadPoolExecutor(2) as threads:
        for scores in threads.map(score, range(2)):
            torch.testing.assert_close(scores, expected, atol=1e-12, rtol=1e-12)
