"""AdamW with moments in 8 bits, and sums of gradients in bfloat16."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer

from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.base import RankOptions
from agentrl.learner.fsdp.adamw_8bit import AdamW8bit, Coded, add_rounded, block_size, decode, encode, moment_bytes
from agentrl.learner.fsdp.rank import FsdpRank
from agentrl.learner.fsdp.weights import local
from tests.algo_config import make_algo
from tests.integration.rank_processes import run_ranks
from tests.integration.two_ranks import batch_of_share
from tests.unit.learner.learners import gradients, make_batch, make_model

LENGTHS = [30, 50, 20, 7, 60, 33, 12]


def optimizer_8bit(weights: list[nn.Parameter]) -> AdamW8bit:
    return AdamW8bit([{"params": weights, "weight_decay": 0.01}], lr=3e-3, betas=(0.9, 0.95), eps=1e-8)


def coded(values: torch.Tensor, seed: int = 0) -> torch.Tensor:
    """Return values, one line a block, after a round of coding."""
    into = Coded(torch.zeros(values.shape, dtype=torch.uint8), torch.zeros(len(values), 1))
    encode(values, into, torch.tensor(seed))
    return decode(into)


@given(exponent=st.integers(-30, 30), spread=st.integers(0, 12), seed=st.integers(0, 1000))
def test_codes_are_neighbours_of_their_values(exponent: int, spread: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lines = torch.randn(3, 64, generator=generator) * torch.logspace(-spread, 0, 64) * 2.0**exponent
    actual = coded(lines)
    largest = lines.abs().amax(1, keepdim=True)
    # An eighth of the power of two below, or the distance of the smallest numbers.
    allowed = torch.maximum(lines.abs() / 8, largest / 448 * 2**-9) * (1 + 1e-5)
    assert bool(((actual - lines).abs() <= allowed).all())
    assert torch.allclose(actual.abs().amax(1, keepdim=True), largest, rtol=1e-6)


def test_codes_are_right_in_the_mean() -> None:
    torch.manual_seed(0)
    values = torch.randn(1, 256) * torch.logspace(-5, 0, 256)
    blocks = values.expand(100, 256)
    mean = sum(coded(blocks, seed).mean(0, keepdim=True) for seed in range(30)) / 30
    distance = torch.maximum(values.abs() / 8, values.abs().max() / 448 * 2**-9)
    assert float(((mean - values).abs() / distance).max()) < 5 * 0.5 / 3000**0.5


@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf")])
def test_a_block_of_zeros_stays_zero_and_what_is_not_finite_stays_so(value: float) -> None:
    actual = coded(torch.full((1, 16), value))
    assert bool((actual == 0).all()) if value == 0 else not bool(actual.isfinite().any())


def test_many_small_gradients_add_up() -> None:
    torch.manual_seed(0)
    total = torch.ones(4096, dtype=torch.bfloat16)
    for seed in range(100):  # an eighth of the distance of 1 and the next number
        add_rounded(total, torch.full((4096,), 1e-3), torch.tensor(seed))
    assert float(total.float().mean()) == pytest.approx(1.1, abs=2e-3)


@pytest.mark.parametrize(
    ("shape", "block"), [((8, 512), 256), ((8, 576), 192), ((3, 8, 24), 24), ((8, 509), None), ((512,), None)]
)
def test_blocks_lie_in_rows(shape: tuple[int, ...], block: int | None) -> None:
    assert block_size(shape) == block
    weight = nn.Parameter(torch.zeros(shape))
    weight.grad = torch.ones_like(weight)
    optimizer = optimizer_8bit([weight])
    optimizer.step()
    moments = [value for name, value in optimizer.state[weight].items() if name != "step"]
    assert sum(moment.nbytes for moment in moments) == moment_bytes(shape)


def test_steps_are_those_of_adamw_but_for_rounding() -> None:
    torch.manual_seed(0)
    weights = [nn.Parameter(torch.randn(64, 256)), nn.Parameter(torch.randn(256))]
    copies = [nn.Parameter(weight.detach().clone()) for weight in weights]
    ours = optimizer_8bit(weights)
    plain = torch.optim.AdamW(copies, lr=3e-3, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.01)
    for _ in range(20):
        for weight, copy in zip(weights, copies, strict=True):
            weight.grad = torch.randn_like(weight) + 0.5
            copy.grad = weight.grad.clone()
        ours.step()
        plain.step()
    matrix_gap = (weights[0] - copies[0]).detach()
    assert float(matrix_gap.abs().mean()) < 0.05 * 20 * 3e-3
    assert abs(float(matrix_gap.mean())) < 0.002 * 20 * 3e-3
    assert torch.allclose(weights[1], copies[1], rtol=1e-5, atol=1e-6)


def test_it_learns_as_well_as_with_float32_moments() -> None:
    def final_loss(make: Callable[[list[nn.Parameter]], Optimizer], seed: int) -> float:
        torch.manual_seed(seed)
        teacher = torch.randn(16, 64) * torch.logspace(-2, 1, 64)
        model = nn.Sequential(nn.Linear(64, 128), nn.Tanh(), nn.Linear(128, 16))
        optimizer = make([*model.parameters()])
        losses = []
        for _ in range(120):
            inputs = torch.randn(64, 64)
            loss = ((model(inputs) - torch.tanh(inputs @ teacher.T / 20)) ** 2).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return statistics.mean(losses[-40:])

    def plain(weights: list[nn.Parameter]) -> Optimizer:
        return torch.optim.AdamW(weights, lr=3e-3, betas=(0.9, 0.95), weight_decay=0.01)

    ours, expected = ([final_loss(make, seed) for seed in range(2)] for make in (optimizer_8bit, plain))
    assert statistics.mean(ours) < 1.05 * statistics.mean(expected)


def test_gradients_of_micro_batches_are_added_up_in_bfloat16(learners) -> None:
    batch = make_batch(LENGTHS, micro=64)
    assert len(batch.micro[0]) > 2
    expected = gradients(learners.open(), batch, torch.float32)
    actual = gradients(learners.open("8bit"), batch, torch.bfloat16)
    for name, gradient in expected.items():
        assert torch.allclose(actual[name].float(), gradient, rtol=0.03, atol=0.01 * float(gradient.abs().max())), name


def test_a_gradient_of_parts_is_kept_until_the_step(learners) -> None:
    """Also over a batch that does not complete the step; a step that ends leaves none."""
    learner = learners.open("8bit")
    learner.train_step(make_batch(LENGTHS))
    assert not learner.rank._sums._sums
    assert all(weight.grad is None for weight in learner.rank.model.parameters())


def state_of(rank: FsdpRank) -> dict[str, torch.Tensor]:
    """Return copies of a rank's shards of weights and moments."""
    [optimizer] = rank.optimizers.values()
    named = dict(rank.model.hf.named_parameters())
    moments = {f"{name} {key}": t for name, weight in named.items() for key, t in optimizer.state[weight].items()}
    return {name: local(tensor.detach()).clone() for name, tensor in (named | moments).items()}


def resumed_rank() -> int:
    """Be one of two ranks: take three steps, the last one also after a checkpoint is loaded into a new rank."""
    folder, number = Path(sys.argv[1]), int(sys.argv[2])
    optimizer = OptimizerConfig(state="8bit", lr=1e-2, warmup_steps=0)
    config = LearnerConfig(precision="float32", device="cpu", threads=1, optimizer=optimizer)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=number, world_size=2)
    options = RankOptions(folder / "model", config, make_algo(), torch.device("cpu"), seed=0)
    first, second, third = (
        batch_of_share(make_batch(LENGTHS, seed=seed, shares=2, micro=64), number) for seed in range(3)
    )
    rank = FsdpRank(options)
    rank.train_step(first)
    rank.train_step(second)
    rank.save(folder / "checkpoint")
    rank.finish_save()
    expected_metrics, expected = rank.train_step(third), state_of(rank)
    resumed = FsdpRank(options)
    resumed.load(folder / "checkpoint")
    metrics, actual = resumed.train_step(third), state_of(resumed)
    assert metrics == expected_metrics
    assert actual.keys() == expected.keys()
    assert any("exp_avg_sq_root_scale" in name for name in actual)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in actual.items())
    dist.destroy_process_group()
    return 0


def test_two_ranks_that_resume_take_the_same_step_bit_for_bit(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    run_ranks(f"{__name__}:resumed_rank", tmp_path, 2, timeout_s=60)
