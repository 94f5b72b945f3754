"""Muon on CPUs: the steps of `torch.optim.Muon`, but for its rounding to bfloat16."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from agentrl.config.learner import OptimizerConfig
from agentrl.learner.fsdp.cpu_muon import CpuMuon, orthogonal
from agentrl.learner.fsdp.optimizer import make_optimizers

COEFFICIENTS = (3.4445, -4.775, 2.0315)
OPTIONS = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1, "adjust_lr_fn": "match_rms_adamw"}


@pytest.mark.parametrize("shape", [(24, 24), (40, 16), (16, 40)])
def test_steps_are_those_of_torch(shape: tuple[int, int]) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator)) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    start = weights[0].detach().clone()
    optimizers = [torch.optim.Muon([weights[0]], **OPTIONS), CpuMuon([weights[1]], **OPTIONS)]  # type: ignore[arg-type]
    for _ in range(4):
        gradient = torch.randn(shape, generator=generator)
        for weight, optimizer in zip(weights, optimizers, strict=True):
            weight.grad = gradient.clone()
            optimizer.step()
    torch_step, step = (weight.detach() - start for weight in weights)
    assert (step - torch_step).norm() < 0.03 * torch_step.norm(), "bfloat16 has 8 bits"
    (torch_state, state) = (optimizer.state_dict() for optimizer in optimizers)
    torch.testing.assert_close(state["state"], torch_state["state"])
    assert state["param_groups"] == torch_state["param_groups"]


def test_directions_have_singular_values_near_1() -> None:
    matrix = torch.randn(16, 40, generator=torch.Generator().manual_seed(0))
    direction = orthogonal(matrix, COEFFICIENTS, 5, 1e-7)
    values = torch.linalg.svdvals(direction)
    assert 0.5 < values.min() < values.max() < 1.3
    left, _, right = torch.linalg.svd(matrix, full_matrices=False)
    assert torch.nn.functional.cosine_similarity(direction.flatten(), (left @ right).flatten(), dim=0) > 0.98


def test_learners_on_a_cpu_use_it() -> None:
    model = nn.ModuleDict({"embedding": nn.Embedding(8, 4), "layer": nn.Linear(4, 4), "head": nn.Linear(4, 8)})
    muon, adamw = make_optimizers(model, model["head"], OptimizerConfig(name="muon", lr=1e-3))
    assert isinstance(muon, CpuMuon)
    assert not isinstance(adamw, CpuMuon)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_biases_of_experts_are_vectors(name: Literal["adamw", "muon"]) -> None:
    model = nn.ModuleDict({"layer": nn.Linear(4, 4), "head": nn.Linear(4, 8, bias=False)})
    model["layer"].register_parameter("gate_up_proj_bias", nn.Parameter(torch.zeros(3, 8)))
    optimizers = make_optimizers(model, model["head"], OptimizerConfig(name=name, lr=1e-3, weight_decay=0.1))
    groups = [(type(optimizer), group) for optimizer in optimizers for group in optimizer.param_groups]
    (without_decay,) = [(kind, group["params"]) for kind, group in groups if group["weight_decay"] == 0]
    assert without_decay[0] is torch.optim.AdamW
    assert [tuple(weight.shape) for weight in without_decay[1]] == [(4,), (3, 8)]
    matrices = [tuple(w.shape) for kind, group in groups if issubclass(kind, CpuMuon) for w in group["params"]]
    assert matrices == ([(4, 4)] if name == "muon" else [])
