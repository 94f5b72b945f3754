"""The language head: log-probabilities and entropies without kept logits."""

from __future__ import annotations

import pytest
import torch

from agentrl.learner.head import HeadOptions, _block, _statistics, _statistics_of_blocks, token_scores

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
    logprobs, entropies = token_scores(hidden, weight, offset, targets, options)
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
    logprobs, _ = token_scores(hidden, weight, None, targets, HeadOptions(1.0, False, 4, compiled=False))
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("bias", [True, False])
def test_logits_in_autocast_are_not_rounded(bias: bool) -> None:
    hidden, weight, offset, targets = given(torch.float32, bias=bias)
    weight, rough = weight * 30, torch.float32
    with torch.autocast("cpu", torch.bfloat16):
        actual_token_scores, _ = token_scores(
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
    logprobs, entropies = token_scores(hidden[:0], weight, None, targets[:0], HeadOptions(1.0, True, 4, compiled=False))
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
