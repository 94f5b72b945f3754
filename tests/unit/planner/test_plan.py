"""Plans: layouts that the configuration's checks accept, in the order that is stated, and engines that fit with them."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from agentrl.cli.main import main
from agentrl.config.judges import judge_configs, judge_sampler
from agentrl.config.layers import Layer, load_layers, merge_layers
from agentrl.config.sampler import SamplerConfig
from agentrl.core.errors import ConfigError
from agentrl.distributed.flat_bucket import total_bytes
from agentrl.learner.registry import make_backend
from agentrl.models.engine_float8 import EngineFloat8
from agentrl.models.shipped_architectures import find_architecture, meta_model
from agentrl.models.weight_files import WeightFiles
from agentrl.planner.engine import GIB, PROCESS_BYTES, ROWS, EngineWeights, Gpus, cache_bytes, plan_engines
from agentrl.planner.layouts import Models, Request, layouts
from agentrl.planner.plan import BASE, Option, Plan, make_plan, report
from agentrl.planner.training_summary import FITS, trained_model
from tests.unit.learner.learners import make_model

TOKENS = {"batch": {"tokens_per_micro": 16384}, "rollout": {"max_tokens": 8192}}


def plan(model: str, gpus: int = 8, gpu: str = "h100", **sections: Any) -> Plan:
    tree = {"model": {"path": model}, **TOKENS, **sections}
    return make_plan([Layer("test", tree)], Gpus.parse(gpus, gpu))


def only(actual_plan: Plan, mode: str, backend: str) -> Option:
    [option] = [each for each in actual_plan.options if (each.mode, each.backend) == (mode, backend)]
    return option


@pytest.mark.parametrize(
    ("model", "gpus", "gpu"),
    [("Qwen/Qwen3-8B", 8, "h100"), ("Qwen/Qwen3-30B-A3B", 16, "h200"), ("Qwen/Qwen3-0.6B", 1, "24")],
)
def test_what_is_proposed_fits_and_is_a_valid_configuration(model: str, gpus: int, gpu: str) -> None:
    actual = plan(model, gpus, gpu)
    modes = {"colocate", "disaggregate"} if gpus > 1 else {"colocate", "separate"}
    assert {option.mode for option in actual.options} == modes
    for option in actual.options:
        assert option.candidate is not None
        assert option.engines is not None
        assert option.settings is not None
        if (gpu, option.mode) == ("24", "separate"):
            assert "learner and engine together need" in option.faults[0], (
                "16 rows of 8,192 tokens have 14 GiB of cache"
            )
            continue
        assert not option.faults
        assert max(option.candidate.memory.total, option.at_sync, option.together) <= FITS * actual.gpus.bytes
        config = load_layers(
            [BASE, Layer("test", {"model": {"path": model}, **TOKENS}), Layer("plan", option.settings)]
        )
        assert config.learner.backend == option.backend
        used = option.learner_gpus + (
            0 if option.mode in ("colocate", "separate") else option.engines.engines * option.engines.tensor
        )
        assert used == gpus
        make_backend(config.learner).check(config.algo, [actual.folder])


def test_the_smallest_product_of_parallel_sizes_that_fits_is_proposed() -> None:
    layers = (BASE, Layer("test", {"model": {"path": "Qwen/Qwen3-8B"}, **TOKENS}))
    folder = find_architecture("Qwen/Qwen3-8B")
    models = Models(trained_model(load_layers(layers).learner, folder))
    request = Request(layers, merge_layers(layers), folder, models, 8)
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size")
    order = [[layout.settings["megatron"].get(name, 1) for name in names] for layout in layouts(request, "megatron")]
    products = [tensor * stages * context for tensor, stages, context in order]
    assert products == sorted(products)
    divisors = {(tensor, stages) for tensor in (1, 2, 4, 8) for stages in (1, 2, 4, 8) if tensor * stages <= 8}
    assert {(tensor, stages) for tensor, stages, _ in order} == divisors
    assert set(products) == {1, 2, 4, 8}
    required_totals = [layout.memory.total for layout in layouts(request, "fsdp")]
    assert max(required_totals) == required_totals[0], "nothing is computed or gathered again"
    assert min(required_totals) == required_totals[-1]


def test_given_keys_are_kept() -> None:
    learner = {"backend": "fsdp", "ranks": 4, "recompute": "full", "reshard_after_forward": True}
    actual = plan(
        "Qwen/Qwen3-8B", learner=learner, placement={"mode": "disaggregate"}, sampler={"sglang": {"tp_size": 2}}
    )
    [option] = actual.options
    assert option.settings["learner"] == learner
    assert not any(line.startswith("  set") for line in report(actual, option.settings)), "nothing is left to set"
    assert (option.engines.engines, option.engines.tensor) == (2, 2)
    actual = plan("Qwen/Qwen3-8B", learner={"backend": "megatron", "megatron": {"tensor_model_parallel_size": 4}})
    for option in actual.options:
        assert option.settings["learner"]["megatron"]["tensor_model_parallel_size"] == 4
        assert option.settings["learner"]["megatron"]["sequence_parallel"] is True


def test_what_does_not_fit_is_said_with_the_ranks_that_do() -> None:
    actual = plan("Qwen/Qwen3-14B", 2, "h100", placement={"mode": "disaggregate"})
    for option in actual.options:
        assert option.learner_gpus == 1
        assert re.search(r"needs [\d.]+ GiB; learner\.ranks=[24] has a layout that fits", option.faults[0])
    assert "does not fit" in "\n".join(report(actual, {}))


def test_more_gpus_never_need_more_memory_a_gpu() -> None:
    settings = {"learner": {"recompute": "full", "backend": "fsdp", "reshard_after_forward": True}}
    totals = [only(plan("Qwen/Qwen3-8B", gpus, "h200", **settings), "colocate", "fsdp") for gpus in (2, 4, 16)]
    sizes = [option.candidate.memory.total for option in totals]
    assert sizes == sorted(sizes, reverse=True)


def test_learner_and_engine_are_on_one_gpu_at_the_same_time_if_it_holds_both() -> None:
    """By hand: SmolLM2-135M has 30 layers with 3 heads of 64 for keys and values, so a token has 23,040 bytes of KV cache."""
    rollout = {"max_tokens": 768, "concurrency": 256, "batch_size": 32, "n_samples_per_prompt": 8}
    actual = plan("HuggingFaceTB/SmolLM2-135M-Instruct", 1, rollout=rollout)
    option = only(actual, "separate", "fsdp")
    assert not option.faults
    assert option.candidate is not None
    assert option.engines is not None
    assert option.settings is not None
    weights, cache = 2 * actual.numbers, 256 * 768 * 2 * 30 * 2 * 3 * 64
    assert option.engines.fraction == 0.1, "five hundredths are too few"
    assert 0.05 < (weights + cache) / actual.gpus.bytes < 0.1
    assert option.engines.rows(768) >= 256
    beside = int(0.1 * actual.gpus.bytes) + PROCESS_BYTES + weights
    assert option.together == option.candidate.memory.total + beside
    assert option.settings["placement"] == {"mode": "separate"}
    assert option.settings["weights"] == {"transport": "ipc"}
    assert option.settings["batch"] == {"tokens_per_micro": 16384}
    assert option.at_sync == 0
    assert actual.options[0].mode == "separate", "no step waits for memory"
    lines = "\n".join(report(actual, {}))
    assert re.search(rf"together +[\d.]+ GiB at all times, {beside / GIB:.1f} of them the engine's", lines)
    static = {"sglang": {"mem_fraction_static": 0.3}}
    kept = plan("HuggingFaceTB/SmolLM2-135M-Instruct", 1, rollout=rollout, sampler=static)
    assert only(kept, "separate", "fsdp").engines.fraction == 0.3


def test_a_gpu_that_does_not_hold_learner_and_engine_together_is_refused_by_number() -> None:
    actual = plan("Qwen/Qwen3-4B", 1, "h100", learner={"backend": "fsdp", "recompute": "none"})
    [fault] = only(actual, "separate", "fsdp").faults
    total, learner, engine, limit = map(float, re.findall(r"\d+\.\d", fault))
    assert total == pytest.approx(learner + engine, abs=0.11)
    assert total > limit == round(FITS * actual.gpus.bytes / GIB, 1)


def test_a_gpu_is_used_in_turn_with_a_critic_or_beside_other_gpus() -> None:
    ppo = plan("Qwen/Qwen3-0.6B", 1, algo={"advantage": {"name": "gae"}})
    assert {option.mode for option in ppo.options} == {"colocate"}
    group = {"serves": "evaluation", "engines": 1, "sglang": {"tp_size": 1}}
    evaluated = plan("Qwen/Qwen3-0.6B", 2, eval={"background": True}, sampler={"groups": {"eval": group}})
    assert {option.mode for option in evaluated.options} == {"colocate"}
    for mode, settings in (("disaggregate", {}), ("separate", {"algo": {"advantage": {"name": "gae"}}})):
        with pytest.raises(ConfigError, match=rf"placement\.mode={mode} with one GPU for learner and engines"):
            plan("Qwen/Qwen3-0.6B", 1, placement={"mode": mode}, **settings)


def test_a_row_longer_than_a_micro_batch_counts() -> None:
    short, long = (
        only(plan("Qwen/Qwen3-0.6B", 1, "h200", rollout={"max_tokens": tokens}), "colocate", "fsdp")
        for tokens in (1024, 32768)
    )
    assert long.candidate.memory.activations > short.candidate.memory.activations


def test_a_critic_is_counted_on_shared_gpus_and_has_as_many_otherwise() -> None:
    settings: dict[str, Any] = {"learner": {"backend": "megatron", "recompute": "full"}}
    plain, ppo = (plan("Qwen/Qwen3-0.6B", 6, **settings, algo={"advantage": {"name": n}}) for n in ("grpo", "gae"))
    shared, alone = (only(each, "colocate", "megatron").candidate for each in (ppo, plain))
    assert shared is not None
    assert alone is not None
    assert shared.memory.total == alone.memory.total + shared.memory.critic
    apart = only(ppo, "disaggregate", "megatron")
    assert apart.candidate is not None
    assert apart.engines is not None
    assert (apart.learner_gpus, apart.engines.engines * apart.engines.tensor) == (2, 2)
    assert 0 < apart.candidate.critic < apart.candidate.memory.total, "it has no logits"
    assert any(line.startswith("  critic ") for line in report(ppo, settings))
    with pytest.raises(ConfigError, match=r"learner\.ranks=3 and as many for the critic with --gpus 6: no GPU is left"):
        plan(
            "Qwen/Qwen3-0.6B",
            6,
            algo={"advantage": {"name": "gae"}},
            placement={"mode": "disaggregate"},
            learner={"ranks": 3},
        )


def with_judge(**options: Any) -> Plan:
    judge = {"model": "Qwen/Qwen3-32B", "max_new_tokens": 512, **options}
    sections = {} if "gpus" not in options else {"placement": {"mode": "disaggregate"}}
    return plan("Qwen/Qwen3-8B", reward={"function": "judge", "judge": judge}, **sections)


def test_engines_of_a_judge_on_the_policys_gpus() -> None:
    actual = with_judge()
    for option in actual.options:
        [judge] = option.judges
        assert judge.is_shared
        assert judge.engines.engines == 1
        assert judge.engines.tensor > 1, "32 billion weights are for more than one H100"
        assert judge.engines.rows(judge.row_tokens) >= ROWS
        assert judge.row_tokens == 8192 + 512
        assert not option.faults
    option = only(actual, "colocate", "fsdp")
    lines = "\n".join(report(actual, {}))
    assert re.search(
        r"judge +Qwen/Qwen3-32B: 1 with tp_size=\d, in turn with the policy's engines, GiB a GPU: weights", lines
    )
    assert f"reward.judge.sglang.tp_size={option.judges[0].engines.tensor}" in lines
    assert "for weights that engines have released" in lines
    [fault] = only(with_judge(engines=8), "colocate", "fsdp").faults
    assert re.match(r"reward\.judge\.engines=8 of \d GPUs each do not fit on the 8 of the policy's engines", fault)


def test_engines_of_a_judge_on_gpus_of_their_own() -> None:
    option = only(with_judge(gpus="own"), "disaggregate", "fsdp")
    assert option.engines is not None
    [judge] = option.judges
    assert not judge.is_shared
    assert option.learner_gpus + option.engines.engines * option.engines.tensor + judge.gpus <= 8
    assert not option.faults
    with pytest.raises(ConfigError, match=r"judges have \d+ GPUs of --gpus 8, and none is left"):
        with_judge(gpus="own", engines=8)


def test_engines_of_a_small_judge_do_not_get_the_gpus_of_an_engine_of_the_policy() -> None:
    judge = {"model": "Qwen/Qwen3-0.6B", "max_new_tokens": 512}
    run = {"rollout": {"max_tokens": 32768}, "learner": {"backend": "megatron"}, "placement": {"mode": "colocate"}}
    for sources in ({}, {"sources": {"a": {}, "b": {}}}):
        reward = {"reward": {"function": "judge", "judge": judge}}
        layer = Layer("test", {"model": {"path": "Qwen/Qwen3-32B"}, **run, **reward, **sources})
        [option] = make_plan([layer], Gpus.parse(8, "h200")).options
        assert option.engines is not None
        assert option.engines.tensor > 1
        config = load_layers([BASE, layer, Layer("plan", option.settings or {})])
        [judge_config] = judge_configs(config).values()
        assert judge_config.max_new_tokens == 512
        assert judge_sampler(config, judge_config).tensor_ranks == option.judges[0].engines.tensor == 1
    for size in ({"tp": 2}, {"tensor-parallel-size": 2}):
        option = only(with_judge(sglang=size), "colocate", "fsdp")
        assert "reward" not in (option.settings or {})
        assert option.judges[0].engines.tensor == 2


def test_a_running_engine_is_not_planned() -> None:
    [fsdp, megatron] = plan("Qwen/Qwen3-0.6B", sampler={"url": "http://127.0.0.1:1"}).options
    for option in (fsdp, megatron):
        assert (option.mode, option.engines, option.at_sync, option.learner_gpus) == ("separate", None, 0, 8)


def test_a_model_that_megatron_lacks_is_planned_for_fsdp(tmp_path: Any) -> None:
    AutoConfig.for_model(
        "gemma", hidden_size=64, intermediate_size=64, num_hidden_layers=1, max_position_embeddings=16384
    ).save_pretrained(tmp_path)
    actual = plan(str(tmp_path), 1)
    assert not only(actual, "colocate", "fsdp").faults
    assert "model_type='gemma'" in only(actual, "colocate", "megatron").faults[0]


def test_what_megatron_lacks_is_planned_for_fsdp() -> None:
    actual = plan("Qwen/Qwen3-8B", learner={"reshard_after_forward": True}, placement={"mode": "colocate"})
    assert not only(actual, "colocate", "fsdp").faults
    assert "learner.reshard_after_forward" in only(actual, "colocate", "megatron").faults[0]
    with pytest.raises(ConfigError, match=r"learner\.reshard_after_forward"):
        plan("Qwen/Qwen3-8B", learner={"reshard_after_forward": True, "backend": "megatron"})


def test_kv_cache_by_hand() -> None:
    dense = AutoConfig.from_pretrained(find_architecture("Qwen/Qwen3-8B"))
    assert cache_bytes(dense, 1) == 2 * 36 * 2 * 8 * 128
    assert cache_bytes(dense, 4) == 2 * 36 * 2 * 2 * 128
    assert cache_bytes(dense, 16) == cache_bytes(dense, 8), "heads are repeated"
    latent = AutoConfig.from_pretrained(find_architecture("deepseek-ai/DeepSeek-V3"))
    assert cache_bytes(latent, 8) == cache_bytes(latent, 1) == 2 * 61 * (512 + 64)


def test_engines_by_hand() -> None:
    hf = AutoConfig.from_pretrained(find_architecture("Qwen/Qwen3-8B"))
    sampler = SamplerConfig(backend="sglang")
    actual = list(
        plan_engines(
            hf, EngineWeights(8_190_735_360), sampler, mode="disaggregate", gpus=8, gpu_bytes=40 * GIB, row_tokens=8192
        )
    )
    assert [(rollout.engines, rollout.tensor) for rollout in actual] == [(8, 1), (4, 2), (2, 4), (1, 8)]
    assert actual[0].weights == 2 * 8_190_735_360
    assert actual[0].cache == int(0.85 * 40 * GIB) - actual[0].weights
    assert actual[0].cache_tokens == actual[0].cache // (2 * 36 * 2 * 8 * 128)
    assert all(rollout.rows(8192) >= ROWS for rollout in actual)
    small = list(
        plan_engines(
            hf, EngineWeights(8_190_735_360), sampler, mode="colocate", gpus=2, gpu_bytes=8 * GIB, row_tokens=8192
        )
    )
    assert [(rollout.tensor, rollout.cache_tokens) for rollout in small] == [(2, 0)]


def test_float8_engines_by_hand(tmp_path: Path) -> None:
    """A cache in float8 holds twice the tokens."""
    matrices = 36 * (4096 * (32 + 8 + 8) * 128 + 32 * 128 * 4096 + 3 * 4096 * 12288)
    numbers, scales = 8_190_735_360, matrices // 128**2
    float8 = {"sampler": {"sglang": {"kv_cache_dtype": "fp8_e4m3", "tp_size": 1}}, "weights": {"dtype": "float8"}}
    engines = only(
        plan("Qwen/Qwen3-8B", learner={"backend": "fsdp"}, placement={"mode": "colocate"}, **float8), "colocate", "fsdp"
    ).engines
    assert engines is not None
    assert engines.weights == 2 * (numbers - matrices) + matrices + 4 * scales
    assert engines.cache_tokens == engines.cache // (36 * 2 * 8 * 128)
    with pytest.raises(ConfigError, match=r"kv_cache_dtype=fp4_e2m1: its memory is not known; set auto"):
        plan("Qwen/Qwen3-8B", sampler={"sglang": {"kv_cache_dtype": "fp4_e2m1"}})
    folder, form = make_model(tmp_path, "qwen3_moe"), EngineFloat8((16, 16), False, ())
    model = meta_model(folder)
    sent_specs = [
        sent for spec in WeightFiles(folder, "").specs() for sent in form.sent_specs(replace(spec, dtype="bfloat16"))
    ]
    assert EngineWeights.count(model, form).bytes(2) == total_bytes(*sent_specs), "what is sent, experts included"


@pytest.mark.parametrize(
    ("count", "kind", "message"),
    [(0, "h100", "--gpus 0"), (12, "h100", "multiple of 8"), (8, "v9", "--gpu v9"), (8, "-3", "--gpu -3")],
)
def test_gpus_that_are_none_are_refused(count: int, kind: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Gpus.parse(count, kind)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"learner": {"ranks": 9}}, r"learner\.ranks=9 with --gpus 8"),
        ({"learner": {"ranks": 8}, "placement": {"mode": "disaggregate"}}, "no GPU is left for an engine"),
        ({"learner": {"backend": "other"}}, r"learner\.backend=other"),
        ({"sampler": {"sglang": {"pp_size": 2}}}, "leave out pp_size"),
        ({"sampler": {"sglang": {"tp_size": 16}}}, "nnodes=1: a machine has 8 GPUs"),
        ({"sampler": {"sglang": {"quantization": "fp8"}}}, "quantization=fp8"),
        ({"learner": {"backend": "megatron", "megatron": {"tensor_model_parallel_size": 3}}}, "set it to"),
    ],
)
def test_what_cannot_be_planned_names_the_key(sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        plan("Qwen/Qwen3-8B", **sections)


def test_the_command_prints_parts_and_keys_to_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "plan",
        "--model",
        "Qwen/Qwen3-8B",
        "--gpus",
        "8",
        "--gpu",
        "h100",
        "learner.ranks=8",
        "placement.mode=colocate",
    ]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "Qwen/Qwen3-8B: 8.19 billion weights" in out
    assert "fsdp, colocate, learner.ranks=8: fits" in out
    assert "megatron, colocate, learner.ranks=8: fits" in out
    for phrase in (
        "weights 3.8",
        "gradients 3.8",
        "optimizer 7.6",
        "KV cache",
        "weight sync",
        "sampler.sglang.tp_size=1",
    ):
        assert phrase in out
    keys = [line for line in out.splitlines() if line.startswith("  set")]
    assert not any("learner.ranks" in line or "placement.mode" in line for line in keys), "they are given"
    assert main(["plan", "--model", "no/such-model"]) == 2


def test_groups_have_gpus_of_their_own() -> None:
    """Their engines keep their size where the plan gives the others another."""
    background = {"background": True}
    group = {"serves": "evaluation", "engines": 2, "sglang": {"tp_size": 1}}
    planned = plan("Qwen/Qwen3-8B", eval=background, sampler={"groups": {"eval": group}})
    option = only(planned, "colocate", "fsdp")
    assert option.learner_gpus == 6
    assert not option.faults
    assert option.settings is not None
    keys = {"tp_size": 1, "mem_fraction_static": 0.85}
    assert option.settings["sampler"]["groups"] == {"eval": {"sglang": keys}}
    lines = "\n".join(report(planned, {}))
    assert re.search(
        r"group +eval \(evaluation\): 2 with tp_size=1, on GPUs of their own, GiB a GPU: weights 15\.\d", lines
    )
    with pytest.raises(ConfigError, match=r"the engines of groups have 8 GPUs of --gpus 8, and none is left"):
        plan("Qwen/Qwen3-8B", eval=background, sampler={"groups": {"eval": group | {"engines": 8}}})


def test_prefill_and_decode_are_planned_apart() -> None:
    groups = {
        "prompts": {"serves": "prefill", "engines": 1, "sglang": {"tp_size": 2}},
        "answers": {"serves": "decode", "engines": 2, "sglang": {"tp_size": 1}},
    }
    planned = plan("Qwen/Qwen3-8B", sampler={"groups": groups, "router": "sglang"}, weights={"gap_limit": "off"})
    assert {(option.mode, option.learner_gpus) for option in planned.options} == {("disaggregate", 4)}
    option = only(planned, "disaggregate", "fsdp")
    assert not option.faults
    lines = "\n".join(report(planned, {}))
    assert "prompts (prefill): 1 with tp_size=2" in lines
    assert "answers (decode): 2 with tp_size=1" in lines
    assert "placement.mode=disaggregate" in lines
