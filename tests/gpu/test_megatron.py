"""Megatron-Core models of every family on a GPU against transformers, in float32 and in bfloat16 with flash attention."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from agentrl.config.learner import Recompute
from agentrl.learner.device import collectives
from agentrl.models.load import load_model
from tests.unit.learner.megatron.models import LENGTHS, MODELS, make_model, rows

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
RECOMPUTE: tuple[Recompute, ...] = ("none", "selective", "full")
FLASH = {"qk_nope_head_dim": 24, "v_head_dim": 16}
"""Sizes of heads that flash attention takes."""


@pytest.fixture(scope="module", autouse=True)
def group(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    from megatron.core import parallel_state

    from agentrl.learner.megatron.layout import Layout

    torch.cuda.set_device(GPU)
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group(collectives("cuda"), store=store, rank=0, world_size=1)
    Layout().start(0)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MODELS)
def test_logits_are_those_of_transformers(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    from agentrl.learner.megatron.model import build_model, packed_tokens
    from agentrl.learner.megatron.weights import ModelWeights, load_weights

    folder = make_model(tmp_path / name, name, **FLASH if "kv_lora_rank" in MODELS[name] else {})
    built = build_model(folder, {}, device=GPU, dtype=dtype)
    load_weights(ModelWeights(built), folder)
    token_ids_L, positions_L, row_L = rows()
    packed = packed_tokens(built, positions_L, row_L, GPU)
    [chunk] = built.chunks
    inputs = token_ids_L[None].to(GPU), positions_L[None].to(GPU)
    logits = chunk(*inputs, None, packed_seq_params=packed)[0]
    logits.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in chunk.parameters() if parameter.grad is not None)
    hf = load_model(folder, attn_implementation="eager").to(GPU, torch.float32)
    with torch.no_grad():
        expected = torch.cat([hf(ids[None].to(GPU)).logits[0] for ids in token_ids_L.split(LENGTHS)])
    error = (logits.detach().float() - expected).abs()
    if dtype is torch.float32:
        assert error.max() < 1e-4
    else:
        # A rounded router may choose another expert, which changes all logits of the token.
        assert error.amax(-1).quantile(0.7) < 0.25


def test_grouped_experts_are_those_of_a_loop() -> None:
    """In bfloat16, with an expert that has no token: products, gradients of tokens and of weights."""
    import torch.nn.functional as F
    from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from agentrl.learner.megatron.experts import GroupedExperts

    config = TransformerConfig(
        num_layers=1,
        hidden_size=256,
        num_attention_heads=4,
        num_moe_experts=8,
        moe_ffn_hidden_size=96,
        gated_linear_unit=True,
        activation_func=F.silu,
        params_dtype=torch.bfloat16,
        bf16=True,
        add_bias_linear=False,
        bias_activation_fusion=True,
    )
    generator = torch.Generator(GPU).manual_seed(0)
    experts = GroupedExperts(8, config, get_default_pg_collection())
    for weight in experts.parameters():
        weight.data.normal_(0, 0.05, generator=generator)
    counts = [40, 1, 0, 300, 7, 64, 129, 33]
    rows = torch.randn(sum(counts), 256, device=GPU, generator=generator)
    weights = torch.rand(sum(counts), device=GPU, generator=generator)
    gradient = torch.randn(sum(counts), 256, device=GPU, generator=generator)
    inputs = rows.bfloat16().requires_grad_()
    result, _ = experts(inputs, torch.tensor(counts, device=GPU), weights)
    result.backward(gradient.bfloat16())
    both, down = (
        linear.weight.detach().float().requires_grad_() for linear in (experts.linear_fc1, experts.linear_fc2)
    )
    exact = inputs.detach().float().requires_grad_()
    parts = []
    for expert, (expert_rows, scale) in enumerate(zip(exact.split(counts), weights.split(counts), strict=True)):
        gate, up = (expert_rows @ both[expert].t()).chunk(2, dim=-1)
        parts.append(F.silu(gate) * up * scale[:, None] @ down[expert].t())
    expected = torch.cat(parts)
    expected.backward(gradient.bfloat16().float())
    fc1, fc2 = experts.linear_fc1.weight.grad, experts.linear_fc2.weight.grad
    for actual, expected_value in ((result, expected), (inputs.grad, exact.grad), (fc1, both.grad), (fc2, down.grad)):
        assert (actual.float() - expected_value).norm() < 0.01 * expected_value.norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["qwen3", "glm4", "deepseek_v3", "qwen3_moe"])
def test_compiled_and_recomputed_layers_have_the_gradient_of_plain_ones(
    tmp_path: Path, name: str, dtype: torch.dtype
) -> None:
    """In bfloat16, they are as far from float32 as the plain ones."""
    folder = make_model(tmp_path / name, name, **FLASH if "kv_lora_rank" in MODELS[name] else {})
    exact, plain = (loss_and_gradient(folder, each, False, "none") for each in (torch.float32, dtype))
    for compiled in (False, True):
        for recompute in RECOMPUTE:
            loss, gradient = loss_and_gradient(folder, dtype, compiled, recompute)
            if dtype is torch.float32:
                assert loss == pytest.approx(exact[0], rel=1e-5)
                assert gradient.norm().item() == pytest.approx(exact[1].norm().item(), rel=1e-5)
            distance = (gradient - exact[1]).norm()
            assert distance <= max(1e-4 * exact[1].norm(), 1.3 * (plain[1] - exact[1]).norm()), (compiled, recompute)


def loss_and_gradient(
    folder: Path, dtype: torch.dtype, compiled: bool, recompute: Recompute
) -> tuple[float, torch.Tensor]:
    """The mean square of the logits, and its gradient as one vector."""
    from agentrl.learner.megatron.layers import prepare_decoder
    from agentrl.learner.megatron.model import build_model, packed_tokens
    from agentrl.learner.megatron.weights import ModelWeights, load_weights

    built = build_model(folder, {}, device=GPU, dtype=dtype)
    load_weights(ModelWeights(built), folder)
    [chunk] = built.chunks
    prepare_decoder(chunk.decoder.layers, compiled=compiled, recompute=recompute)
    token_ids_L, positions_L, row_L = rows()
    packed = packed_tokens(built, positions_L, row_L, GPU)
    logits = chunk(token_ids_L[None].to(GPU), positions_L[None].to(GPU), None, packed_seq_params=packed)
    loss = logits.float().square().mean()
    loss.backward()
    gradients = [parameter.grad for parameter in chunk.parameters() if parameter.grad is not None]
    return loss.item(), torch.cat([gradient.float().flatten() for gradient in gradients])
