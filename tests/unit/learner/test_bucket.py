import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agentrl.distributed.base import TensorSpec
from agentrl.distributed.flat_bucket import ALIGNMENT, total_bytes, views
from agentrl.learner.export import NamedTensors, WeightExporter, joined_name, plan_buckets
from agentrl.learner.megatron.families.base import model_weights
from agentrl.learner.megatron.families.registry import read_family
from agentrl.models.engine_float8 import EngineFloat8
from agentrl.models.shipped_architectures import shipped_architectures
from tests.unit.learner.joining_engine import SIBLINGS, JoiningEngine

DTYPES = ("float32", "bfloat16", "uint8", "int64")
specs = st.lists(
    st.builds(
        TensorSpec,
        st.just("w"),
        st.sampled_from(DTYPES),
        st.lists(st.integers(0, 5), max_size=3).map(tuple),
    ),
    max_size=12,
)


@given(specs, st.integers(1, 500))
def test_buckets_hold_every_weight_once_and_in_order(specs: list[TensorSpec], limit: int) -> None:
    specs = [replace(spec, name=f"w{number}") for number, spec in enumerate(specs)]
    plans = plan_buckets(specs, limit)
    remaining_specs = list(specs)
    for plan in plans:
        assert set(plan.specs) == set(remaining_specs[: len(plan.specs)]), (
            "buckets follow each other in the order of the weights"
        )
        assert [s for s in plan.specs if total_bytes(s) % ALIGNMENT == 0] == [
            s for s in remaining_specs[: len(plan.specs)] if total_bytes(s) % ALIGNMENT == 0
        ], "and so do weights of usual sizes in a bucket"
        remaining_specs = remaining_specs[len(plan.specs) :]
    assert remaining_specs == []
    assert [plan.last for plan in plans] == [False] * (len(plans) - 1) + [True] * bool(plans)
    assert all(plan.size <= limit or len(plan.specs) == 1 for plan in plans)


@given(specs)
def test_weights_follow_each_other_without_padding_and_are_aligned(specs: list[TensorSpec]) -> None:
    for plan in plan_buckets(specs, 200):
        flat = torch.zeros(plan.size, dtype=torch.uint8)
        end = flat.data_ptr()
        for number, (_, view) in enumerate(views(plan.specs, flat)):
            if view.numel():
                assert view.data_ptr() == end
                end += view.nbytes
                alignment = ALIGNMENT if view.nbytes % ALIGNMENT == 0 else view.itemsize
                assert (view.data_ptr() - flat.data_ptr()) % alignment == 0
            view.fill_(number)
        assert end == flat.data_ptr() + plan.size
        for number, (spec, (_, view)) in enumerate(zip(plan.specs, views(plan.specs, flat), strict=True)):
            assert (view.shape, str(view.dtype)) == (spec.shape, f"torch.{spec.dtype}")
            assert view.numel() == math.prod(spec.shape)
            assert bool((view == number).all())


ATTENTION = "model.layers.{}.self_attn.{}.weight"


SAME_NAMES = {"deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3.1", "moonshotai/Kimi-K2-Instruct"}
SAME_NAMES |= {"zai-org/GLM-4.6", "zai-org/GLM-4.7"}
"""Large models whose weights have the names of DeepSeek V3's or of GLM-4.5's: in `make test-long` only."""


@pytest.mark.parametrize(
    "model",
    [pytest.param(name, marks=[pytest.mark.long] if name in SAME_NAMES else []) for name in shipped_architectures()],
)
def test_an_engine_that_joins_weights_gets_all_of_them_from_buckets_of_every_size(model: str) -> None:
    family, hf = read_family(shipped_architectures()[model], "model.path")
    weights = model_weights(hf)
    for layer in range(hf.num_hidden_layers)[:: max(1, hf.num_hidden_layers // 6)]:
        weights += family.layer(hf, layer)
        experts = range(hf.n_routed_experts) if family.expert and hasattr(hf, "n_routed_experts") else range(0)
        weights += [weight for expert in experts for weight in family.expert(hf, layer, expert)]
    shapes = {tensor.name: tensor.shape for weight in weights for tensor in weight.tensors()}
    specs = [TensorSpec(name, "bfloat16", shape) for name, shape in shapes.items()]
    for mib in (1, 30, 64, 200, 512, 1000, 1024, 4096):
        engine, plans = JoiningEngine(shapes), plan_buckets(specs, mib << 20)
        for plan in plans:
            engine.load_weights([spec.name for spec in plan.specs])
            assert plan.size <= mib << 20 or len({joined_name(spec.name) for spec in plan.specs}) == 1
        assert engine.names == shapes.keys(), f"{model}, weights.bucket_mib={mib}"


@pytest.mark.parametrize("last", ["weight", "weight_scale_inv", "bias"])
@pytest.mark.parametrize("module", SIBLINGS)
def test_weights_that_an_engine_joins_are_in_one_bucket(module: str, last: str) -> None:
    names = [f"model.layers.{layer}.self_attn.{name}.{last}" for layer in (0, 1) for name in ("o_proj", module, "n")]
    names += [f"model.layers.{layer}.self_attn.{SIBLINGS[module]}.{last}" for layer in (1, 0)]
    plans = plan_buckets([TensorSpec(name, "float32", (1,)) for name in names], 4)
    buckets = [{spec.name for spec in plan.specs} for plan in plans]
    assert len(buckets) == len(names) - 2
    assert [len(bucket) for bucket in buckets].count(2) == 2
    assert all(len({name.split(".")[2] for name in bucket}) == 1 for bucket in buckets)


@pytest.mark.parametrize("scale", ["weight_scale_inv", "weight_scale", "input_scale"])
def test_a_float8_weight_travels_with_its_scale(scale: str) -> None:
    """The loader of DeepSeek V3.2 multiplies the indexer's weights when it has both, and keeps no half for the next call."""
    modules = [
        f"model.layers.0.self_attn.{name}" for name in ("indexer.wk", "kv_b_proj", "q_a_proj", "kv_a_proj_with_mqa")
    ]
    names = [f"{module}.{last}" for last in ("weight", scale) for module in modules]
    plans = plan_buckets([TensorSpec(name, "float32", (1,)) for name in names], 4)
    assert [{spec.name for spec in plan.specs} for plan in plans] == [
        {f"{module}.{last}" for module in unit for last in ("weight", scale)}
        for unit in (modules[:1], modules[1:2], modules[2:])
    ]


def test_both_halves_are_sent_if_one_has_changed() -> None:
    """What has not changed is sent with no numbers, so that an engine's loader has both halves in one call."""
    names = [ATTENTION.format(0, name) for name in ("q_a_proj", "kv_a_proj_with_mqa", "o_proj")]
    weights = {name: torch.zeros(3, 4) for name in names}
    learner = WeightExporter(NamedTensors(weights))

    def changes(base: str | None, version: str) -> list[tuple[str, int]]:
        [bucket] = learner.buckets(1 << 20)
        return [(part.name, part.changed) for part in bucket.changes(base, version).parts]

    assert changes(None, "a") == [(name, 12) for name in names]
    weights[names[1]][2, 1] = 7.0
    assert changes("a", "b") == [(names[0], 0), (names[1], 1)]
    weights[names[2]][0, 0] = 1.0
    assert changes("b", "c") == [(names[2], 1)]


class OwnDtypes(NamedTensors):
    """A folder of bfloat16 weights with float32 norms."""

    float32_weights = frozenset({"model.norm.weight"})


class Float8Tensors(NamedTensors):
    """Weights that engines have in float8, in blocks of 2 x 4."""

    float8 = EngineFloat8((2, 4), False, ("layers.1.mlp",))  # type: ignore[assignment]


def test_float8_weights_travel_with_their_scales_in_buckets_of_every_size() -> None:
    random = torch.Generator().manual_seed(0)
    modules = [ATTENTION.format(0, name).removesuffix(".weight") for name in ("q_a_proj", "kv_a_proj_with_mqa")] + [
        f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in (0, 1) for expert in (0, 1)
    ]
    weights = {f"{module}.weight": torch.randn(5, 9, generator=random) for module in modules}
    weights |= {"model.norm.weight": torch.ones(9), "model.layers.0.mlp.gate.e_score_correction_bias": torch.ones(2)}
    source = Float8Tensors(weights)
    [whole] = WeightExporter(source).buckets(1 << 20, "float8_e4m3fn")
    expected = {name: tensor.clone() for name, tensor in whole.tensors()}
    float8 = {name for name, tensor in expected.items() if tensor.dtype is torch.float8_e4m3fn}
    assert float8 == {f"{module}.weight" for module in modules if ".1.mlp" not in module}
    assert expected.keys() == weights.keys() | {f"{name}_scale_inv" for name in float8}
    for name, weight in weights.items():
        if name in float8:
            into, scales = torch.empty(5, 9, dtype=torch.float8_e4m3fn), torch.empty(3, 3)
            source.float8.quantize(weight.bfloat16(), into, scales)
            assert torch.equal(expected[name].view(torch.uint8), into.view(torch.uint8))
            assert torch.equal(expected[f"{name}_scale_inv"], scales)
        else:
            is_bias = name.endswith("bias")
            assert torch.equal(expected[name], weight if is_bias else weight.bfloat16())
    for size in range(1, total_bytes(*whole.specs), 7):
        parts = list(WeightExporter(source).buckets(size, "float8_e4m3fn"))
        names = [{spec.name for spec in bucket.specs} for bucket in parts]
        for bucket_names in names:
            assert bucket_names == {
                name for name in expected if any(joined_name(name) == joined_name(other) for other in bucket_names)
            }
        assert sum(map(len, names)) == len(expected)


def test_both_halves_are_sent_if_a_scale_has_changed() -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    weights = {name: torch.ones(2, 4), "model.layers.0.mlp.down_proj.weight": torch.ones(2, 4)}
    learner = WeightExporter(Float8Tensors(weights))

    def changes(base: str | None, version: str) -> list[tuple[str, int]]:
        [bucket] = learner.buckets(1 << 20, "float8_e4m3fn")
        return sorted((part.name, part.changed) for part in bucket.changes(base, version).parts)

    assert len(changes(None, "a")) == 4
    weights[name] *= 2
    assert changes("a", "b") == [(name, 0), (f"{name}_scale_inv", 1)]


def test_adapters_are_not_sent_in_float8() -> None:
    adapters = {"main": NamedTensors({"base_model.model.layers.0.up_proj.lora_A.weight": torch.ones(2, 4)})}
    [(_, tensor)] = WeightExporter(NamedTensors({}), adapters).adapters("float8_e4m3fn")
    assert tensor.dtype is torch.bfloat16


def test_weights_with_a_dtype_of_their_own_are_not_cast() -> None:
    """A bias of 8 in bfloat16 has steps of 1/16, which choose other experts."""
    names = ("model.norm.weight", "model.layers.0.mlp.gate.e_score_correction_bias", "model.layers.0.mixer.A_log")
    weights = {name: torch.full((4,), 8.001) for name in (*names, "model.embed_tokens.weight")}
    [bucket] = WeightExporter(OwnDtypes(weights)).buckets(1 << 20, "bfloat16")
    for name, tensor in bucket.tensors():
        assert tensor.dtype is (torch.float32 if name in names else torch.bfloat16)
        assert torch.equal(tensor, weights[name].to(tensor.dtype))
