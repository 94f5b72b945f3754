"""The head under autocast: factors are rounded, logits are not."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from agentrl.learner.fsdp.model import PolicyModel


@pytest.mark.parametrize("bias", [True, False])
def test_logits_of_a_head_in_autocast_are_not_rounded(bias: bool) -> None:
    torch.manual_seed(0)
    head = nn.Linear(64, 200, bias=bias)
    with torch.no_grad():
        head.weight.mul_(30)
    policy = PolicyModel(SimpleNamespace(get_output_embeddings=lambda: head), logits_chunk=8)
    hidden = torch.randn(5, 64, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        found = policy._logits(hidden)
        rounded = head(hidden)
    rough = (hidden.bfloat16().double(), head.weight.bfloat16().double())
    wanted = rough[0] @ rough[1].T + (head.bias.double() if bias else 0)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=1e-4, rtol=1e-6)
    assert (rounded.double() - wanted).abs().max() > 1e-2, "sizes at which rounding would be seen"
    found.sum().backward()
    assert hidden.grad is not None
    assert head.weight.grad is not None
    torch.testing.assert_close(hidden.grad, head.weight.detach().sum(0).expand(5, -1), atol=0.5, rtol=0.02)


def test_without_autocast_the_head_is_the_models_own() -> None:
    head = nn.Linear(8, 4).double()
    policy = PolicyModel(SimpleNamespace(get_output_embeddings=lambda: head), logits_chunk=8)
    hidden = torch.randn(2, 8, dtype=torch.float64)
    assert torch.equal(policy._logits(hidden), head(hidden))
