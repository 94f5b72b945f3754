"""A step's weights reach SGLang's own loading code whole, whatever the size of a bucket and with changes alone."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from agentrl.distributed import sglang_loader
from agentrl.distributed.sglang_loader.agentrl_weight_loaders import encode_changes
from agentrl.inference.launch import cpu_sglang
from agentrl.learner.export import NamedTensors, WeightExporter
from agentrl.models.hub_tensors import sent_buffers
from agentrl.models.module_outputs import ModuleOutputs, record_module_outputs
from agentrl.models.tensor_dump import read_dump
from agentrl.train.reference_pass import first_difference
from tests.unit.learner.learners import Learners, make_batch, make_rows
from tests.unit.learner.megatron.models import make_model

pytestmark = pytest.mark.sglang

SCRIPT = Path(__file__).parent / "loading_engine.py"
LENGTHS = (23, 9, 14)
DEEPSEEK = {"moe_layer_freq": 1, "topk_method": "noaux_tc", "scoring_func": "sigmoid"}
"""Keys of the models' own configurations that SGLang reads and transformers does not write."""
GPT_OSS = {
    "head_dim": 16,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 32,
    "sliding_window": 8,
}


@dataclass(frozen=True)
class Tiny:
    """A tiny model of a family."""

    name: str
    """In `tests.unit.learner.megatron.models`."""
    options: Mapping[str, object]
    engine_class: str
    attention: str = "torch_native"
    """SGLang's attention on a CPU; empty: it has none for this model, which is loaded and not run."""
    model_type: str | None = None
    """In the engine's configuration."""


TINY = {
    "deepseek_v3": Tiny("deepseek_v3", DEEPSEEK, "DeepseekV3ForCausalLM"),
    "kimi_k2": Tiny(
        "deepseek_v3",
        DEEPSEEK | {"n_group": 1, "topk_group": 1, "n_shared_experts": 1, "routed_scaling_factor": 2.827},
        "DeepseekV3ForCausalLM",
        model_type="kimi_k2",
    ),
    "glm4.6": Tiny("glm4_moe", {}, "Glm4MoeForCausalLM"),
    "qwen3_moe": Tiny("qwen3_moe", {"mlp_only_layers": []}, "Qwen3MoeForCausalLM"),
    "gpt_oss": Tiny("gpt_oss", GPT_OSS, "GptOssForCausalLM", attention=""),
}


def bucket_sizes(weights: WeightExporter) -> list[int]:
    """Return the sizes of all weights and of pairs of them, up to one bucket for all."""
    [bucket] = weights.buckets(1 << 40)
    sizes = {tensor.nbytes for _, tensor in bucket.tensors()}
    total = sum(tensor.nbytes for _, tensor in bucket.tensors())
    return sorted({*sizes, *(min(sizes) << power for power in range(40) if min(sizes) << power < total), total})


def write_job(folder: Path, tiny: Tiny, weights: WeightExporter, rows: list[list[int]], step: Any) -> None:
    """Take a step, and write what the engine loads: all weights, the plans of their buckets, and their changes."""

    def entries(base: str | None, version: str, size: int) -> Iterator[str]:
        for number, bucket in enumerate(weights.buckets(size)):
            yield encode_changes(
                bucket.changes(base, version), base=base, held=version, number=number, last=bucket.last
            ).first

    sizes = bucket_sizes(weights)
    first = [[*entries(None, "a", sizes[0])]]
    step()
    [everything] = weights.buckets(1 << 40)
    after = {name: tensor.clone() for name, tensor in everything.tensors()}
    save_file(after, folder / "after.safetensors")
    plans = [[[spec.name for spec in bucket.specs] for bucket in weights.buckets(size)] for size in sizes]
    alone = [[name] for name in after]
    job = {
        "attention": tiny.attention,
        "rows": rows,
        "plans": {str(size): plan for size, plan in zip(sizes, plans, strict=True)} | {"alone": alone},
        "changes": [*first, [*entries("a", "b", sizes[0])]],
    }
    (folder / "job.json").write_text(json.dumps(job))


def learner_job(folder: Path, tiny: Tiny) -> list[list[list[float]]]:
    """Write the job of a model that the FSDP2 learner trains; return its log-probabilities before and after the step."""
    learners = Learners(folder / "before")
    learner = learners.open(lr=0.05)
    batch, rows = make_batch(LENGTHS, bin_=16), make_rows(LENGTHS)

    def scores() -> list[list[float]]:
        logprobs = learner.logprobs(batch)
        return [logprobs[row.key][1:].tolist() for row in rows]

    def step() -> None:
        learner.train_step(batch)
        for buffer in sent_buffers(learner.rank.model.hf).values():  # biases of routers have no gradient
            buffer.add_(torch.linspace(-0.1, 0.1, len(buffer)))

    before = scores()
    write_job(folder, tiny, learner, [row.token_ids.tolist() for row in rows], step)
    logprobs = [before, scores()]
    learners.close()
    return logprobs


def transformers_job(folder: Path, tiny: Tiny) -> None:
    """Write the job of a model that no learner trains: a step of its own optimizer."""
    model = AutoModelForCausalLM.from_pretrained(folder / "before", dtype=torch.float32)
    token_ids = torch.tensor([make_rows(LENGTHS[:1])[0].token_ids.tolist()])

    def step() -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        model(input_ids=token_ids, labels=token_ids).loss.backward()
        optimizer.step()

    weights = NamedTensors({name: parameter.data for name, parameter in model.named_parameters()})
    write_job(folder, tiny, WeightExporter(weights), token_ids.tolist(), step)


@pytest.fixture(scope="module")
def results(
    sglang_python: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[dict[str, Any], list[list[list[float]]] | None]]:
    """By model: what the engine has loaded, and the learner's log-probabilities."""
    root, logprobs = tmp_path_factory.mktemp("loaders"), dict[str, list[list[list[float]]] | None]()
    for model, tiny in TINY.items():
        folder = make_model(root / model / "before", tiny.name, **tiny.options).parent
        logprobs[model] = learner_job(folder, tiny) if tiny.attention else transformers_job(folder, tiny)
        if tiny.model_type is not None:
            config = json.loads((folder / "before" / "config.json").read_text())
            (folder / "before" / "config.json").write_text(json.dumps(config | {"model_type": tiny.model_type}))
    environment = os.environ | cpu_sglang.environment() | {"SGLANG_USE_CPU_ENGINE": "1"}
    path = [environment["PYTHONPATH"].split(os.pathsep)[0], str(Path(sglang_loader.__file__).parent)]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    subprocess.run([sglang_python, SCRIPT, root], env=environment, check=True, timeout=500)
    return {
        model: (json.loads((root / model / "result.json").read_text()) | {"folder": str(root / model)}, logprobs[model])
        for model in TINY
    }


@pytest.mark.parametrize("model", TINY)
def test_an_engine_has_the_step_after_buckets_of_every_size(model: str, results: dict[str, Any]) -> None:
    result, _ = results[model]
    assert "error" not in result, result.get("error")
    assert result["class"] == TINY[model].engine_class
    assert not result["unchanged"], "the step changes all, so that one that was not loaded is seen"
    whole = {size: plan["differing"] for size, plan in result["plans"].items() if size != "alone"}
    assert len(whole) > 12
    assert not any(whole.values()), whole


@pytest.mark.parametrize("model", TINY)
def test_weights_that_travel_alone_lack_what_the_loader_joins(model: str, results: dict[str, Any]) -> None:
    """That is seen: SGLang reports no error."""
    result, _ = results[model]
    parameters = {name.split(".", 3)[-1] for name in result["plans"]["alone"]["differing"]}
    assert parameters == ({"self_attn.fused_qkv_a_proj_with_mqa.weight"} if "deepseek" in TINY[model].name else set())


@pytest.mark.parametrize("model", [name for name, tiny in TINY.items() if tiny.attention])
def test_engine_and_learner_have_the_same_logprobs_before_and_after(model: str, results: dict[str, Any]) -> None:
    result, learner = results[model]

    def gap(engine: list[list[float]], scores: list[list[float]]) -> float:
        return max(float(np.abs(np.subtract(*pair)).max()) for pair in zip(engine, scores, strict=True))

    before, after = learner
    assert gap(before, after) > 0.1, "the step is seen"
    assert gap(result["logprobs_before"], before) < 1e-3
    for size, plan in result["plans"].items():
        if size != "alone":
            assert gap(plan["logprobs"], after) < 1e-3, size


@pytest.mark.parametrize("model", ["glm4.6", "qwen3_moe"])
def test_outputs_of_modules_that_the_engine_writes_are_those_of_transformers(
    model: str, results: dict[str, Any]
) -> None:
    folder = Path(results[model][0]["folder"])
    token_ids = json.loads((folder / "job.json").read_text())["rows"][0]
    (folder / "after").mkdir()
    shutil.copy(folder / "before" / "config.json", folder / "after")
    shutil.copy(folder / "after.safetensors", folder / "after" / "model.safetensors")

    def reference(name: str) -> ModuleOutputs:
        network = AutoModelForCausalLM.from_pretrained(folder / name, dtype=torch.float32)
        with torch.inference_mode():
            return record_module_outputs(network, lambda: network(input_ids=torch.tensor([token_ids])))

    engine, after = read_dump(folder / "dump", token_ids), reference("after")
    assert {name for name in after if name.endswith(("self_attn", "layernorm", "embed_tokens"))} <= engine.keys()
    assert first_difference(engine, after, is_float32=True) is None
    assert "differs is model.layers.0." in str(first_difference(engine, reference("before"), is_float32=True))


def test_logprobs_show_a_pair_that_was_split(results: dict[str, Any]) -> None:
    result, (_, after) = results["deepseek_v3"]
    pairs = zip(result["plans"]["alone"]["logprobs"], after, strict=True)
    assert max(float(np.abs(np.subtract(*pair)).max()) for pair in pairs) > 0.1
