"""The loss of a mixed batch on a GPU: the host never waits for it, and it is that of the CPU."""

from __future__ import annotations

import pytest
import torch

from agentrl.algo.base import LossInput
from agentrl.algo.batch_loss import make_objective
from agentrl.config.load import load_config

pytestmark = pytest.mark.gpu

SIZE = 257


def given(device: str) -> tuple[torch.Tensor, LossInput]:
    """Tokens of three sources in any order."""
    random = torch.Generator().manual_seed(0)
    new, old, advantages = (torch.randn(SIZE, generator=random) for _ in range(3))
    source_N = torch.randint(3, (SIZE,), generator=random)
    places = {number: (source_N == number).nonzero()[:, 0].to(device) for number in range(3)}
    weight = torch.full((SIZE,), 1 / SIZE)
    fields = [weight.to(device), advantages.to(device), (-old.abs()).to(device)]
    return (-new.abs()).to(device).requires_grad_(), LossInput(*fields, source_tokens=places)


def test_the_host_does_not_wait_for_the_losses_of_sources() -> None:
    algo = load_config(
        None, [f"sources.s{number}.algo.loss.name={name}" for number, name in enumerate(("ppo_clip", "cispo", "dppo"))]
    ).algo
    objective = make_objective(algo)
    on_gpu, on_cpu = given("cuda"), given("cpu")
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss, metrics = objective(*on_gpu)
        loss.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    expected, _ = objective(*on_cpu)
    expected.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    assert on_gpu[0].grad is not None
    assert torch.allclose(on_gpu[0].grad.cpu(), on_cpu[0].grad, rtol=1e-5, atol=1e-8)
    assert metrics.sums["clip_fraction"].item() > 0
