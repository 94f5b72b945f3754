"""Plans and warnings before a run starts."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.cli.main import build_parser
from agentrl.cli.options import config_layers
from agentrl.config.layers import load_layers
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.errors import ConfigError, ModelError
from agentrl.models.load import count_parameters
from agentrl.train.preflight import Plan, check_rope, learning_rate_warnings, plan_run, speculation_warning


@pytest.mark.parametrize(
    ("weights", "lr", "usual"),
    [
        (600_000_000, 3e-4, "1e-06"),
        (600_000_000, 3e-5, "1e-06"),
        (600_000_000, 1e-6, None),
        (135_000_000, 3e-4, "5e-05"),
        (135_000_000, 5e-5, None),
        (2_000_000, 3e-4, None),
    ],
)
def test_a_learning_rate_for_a_small_policy_is_named_for_a_large_model(
    weights: int, lr: float, usual: str | None
) -> None:
    config = load_config(None, [f"learner.optimizer.lr={lr}"])
    warnings = learning_rate_warnings(config.learner, config.algo.critic, weights)
    assert len(warnings) == (usual is not None)
    if usual is not None:
        assert f"learner.optimizer.lr={lr:g}" in warnings[0]
        assert f"set learner.optimizer.lr={usual}" in warnings[0]


def plan(folder: Path, *settings: str) -> Plan:
    """Return the plan of a run on one row of data."""
    (folder / "rows.jsonl").write_text('{"prompt": "2?", "m": {"label": "2"}}\n')
    (folder / "score.py").write_text("def score(sample):\n    return float(sample.label == sample.final)\n")
    return plan_run(load_config(None, ["env.name=single_turn", f"data.path={folder}/rows.jsonl", *settings]))


def test_the_model_is_named_and_one_that_nobody_chose_is_warned_of(tmp_path: Path) -> None:
    reward = ["reward=exact_match", "data.label_key=m.label"]
    default = plan(tmp_path, *reward)
    assert any(re.fullmatch(r"model +multihop-warm \(/.*\), 1,869,760 weights", line) for line in default.training)
    assert "warning: model.path is not set, so the policy is multihop-warm" in default.warnings[0]
    assert "set model.path to a model for single_turn" in default.warnings[0]
    assert plan(tmp_path, *reward, "model.path=multihop-warm").warnings == []
    assert plan_run(load_config(None, ["tasks.name=multihop"])).warnings == []


def test_labels_are_judged_before_the_start(tmp_path: Path) -> None:
    model = "model.path=multihop-warm"
    (tmp_path / "eval.jsonl").write_text('{"prompt": "2?", "m": {"label": []}}\n')
    (tmp_path / "nan.jsonl").write_text('{"prompt": "2?", "m": {"label": NaN}}\n')
    for keys, message in (
        (["data.path=none.jsonl", "reward=exact_match"], r"data\.path=none\.jsonl: there is no such file"),
        (["data.label_key=m", "reward=exact_match"], r"reward\.function=exact_match: the label of rows\.jsonl:1 is \{"),
        (
            ["data.label_key=m.label", "reward=exact_match", f"data.eval_path={tmp_path}/eval.jsonl"],
            r"reward\.function=exact_match: the label of eval\.jsonl:1 is \[\]",
        ),
        (
            ["data.label_key=m.label", "reward=exact_match", f"data.eval_path={tmp_path}/nan.jsonl"],
            r"nan\.jsonl, line 1: 'm\.label' \(data\.label_key\) cannot be written as JSON: .*\(nan\)",
        ),
        (["data.label_key=m.x", "reward=exact_match"], r"'m' has the keys: label"),
    ):
        with pytest.raises(ConfigError, match=message):
            plan(tmp_path, model, *keys)
    [warning] = plan(tmp_path, model, f"reward={tmp_path}/score.py:score").warnings
    assert "reads the label, which is None: set data.label_key" in warning


@pytest.mark.parametrize("name", ["qwen2.5_7b", "deepseek_v3", "kimi_k2", "glm_z1_9b"])
def test_a_recipe_is_planned_by_the_shipped_shape(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = recipe(name)
    plan = plan_run(config)
    ranks = config.learner.ranks
    assert any(re.match(rf"memory +about [\d.]+ GiB on each of {ranks} learner ranks", line) for line in plan.lines)
    assert any(lack.startswith(f"model.path={config.model.path}: not in the cache") for lack in plan.missing_resources)


def test_a_layout_that_does_not_divide_the_shipped_shape_is_refused_without_weights() -> None:
    options = ["learner.backend=megatron", "learner.megatron={context_parallel_size: 8}", "learner.recompute=auto"]
    with pytest.raises(ConfigError, match="context_parallel_size=8 does not divide the 28 attention heads"):
        plan_run(recipe("qwen2.5_7b", *options))


def test_engines_of_a_float8_model_are_float8() -> None:
    options = ["sampler.url=null", "placement.mode=disaggregate", "sampler.sglang.tp_size=8"]
    lines = plan_run(recipe("deepseek_v3", *options)).lines
    assert f"{'precision':<13}engines: matrices of decoder layers in float8, others bfloat16" in lines


def recipe(name: str, *options: str) -> Config:
    words = ["train", "--env", "search_r1", "--config", f"models/{name}", *options]
    return load_layers(config_layers(build_parser("train").parse_args(words)))


@pytest.mark.parametrize(("lr", "usual"), [(1e-4, None), (3e-4, "1e-05")])
def test_a_learning_rate_of_adapters_is_compared_with_that_of_adapters(lr: float, usual: str | None) -> None:
    config = load_config(None, [f"learner.optimizer.lr={lr}", "learner.lora={rank: 4}"])
    warnings = learning_rate_warnings(config.learner, config.algo.critic, 600_000_000)
    assert [f"set learner.optimizer.lr={usual}" in warning for warning in warnings] == [True] * (usual is not None)


def test_weights_are_counted_from_the_headers(tmp_path: Path) -> None:
    assert count_parameters(tmp_path) == 0
    save_file({"a": torch.zeros(3, 4), "b": torch.zeros(5)}, tmp_path / "one.safetensors")
    save_file({"c": torch.zeros(())}, tmp_path / "two.safetensors")
    assert count_parameters(tmp_path) == 18
    (tmp_path / "two.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"two\.safetensors"):
        count_parameters(tmp_path)


def test_a_task_with_one_rollout_has_nothing_to_compare_it_with(tmp_path: Path) -> None:
    settings = ["reward=exact_match", "data.label_key=m.label", "rollout.n_samples_per_prompt=1"]
    with pytest.raises(ConfigError, match=r"rollout\.n_samples_per_prompt=1 with algo\.advantage\.name=grpo"):
        plan(tmp_path, *settings)
    plan(tmp_path, *settings, "algo.advantage.name=reinforce_plus_plus")
    plan(tmp_path, *settings, "algo.entropy_coef=0.1")


@pytest.mark.parametrize(
    ("rope", "limit"),
    [
        ({"rope_scaling": {"type": "longrope"}, "original_max_position_embeddings": 4096}, 4096),
        ({"rope_parameters": {"rope_type": "longrope", "original_max_position_embeddings": 512}}, 512),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, None),
        ({}, None),
    ],
)
def test_rows_are_no_longer_than_rope_allows_packed_rows_to_be(
    rope: dict[str, object], limit: int | None, tmp_path: Path
) -> None:
    """Beyond it, short rows would be computed as the longest row of their micro-batch."""
    (tmp_path / "config.json").write_text(json.dumps({"max_position_embeddings": 8192} | rope))
    check_rope(limit or 10**6, [tmp_path])
    if limit is not None:
        with pytest.raises(ConfigError, match=rf"rollout\.max_tokens={limit + 1}.*set rollout\.max_tokens={limit}, or"):
            check_rope(limit + 1, [tmp_path])


def test_patterns_of_adapters_are_compared_with_the_layers_before_the_start(tmp_path: Path) -> None:
    settings = ["reward=exact_match", "data.label_key=m.label", "model.path=multihop-warm"]
    with pytest.raises(ConfigError, match=r"learner\.lora\.target: 'nosuch' matches no linear layer"):
        plan(tmp_path, *settings, "learner.lora.target=[nosuch]")
    lines = plan(tmp_path, *settings, "learner.lora.target=['*.q_proj']").training
    assert any("LoRA adapters of rank 16" in line for line in lines)


@pytest.mark.parametrize(
    ("settings", "warned"),
    [
        (["rollout.concurrency=64"], True),
        (["rollout.concurrency=48"], False),
        (["rollout.concurrency=64", "sampler.engines=2"], False),
        (["rollout.concurrency=64", "sampler.sglang.max-running-requests=64"], False),
        (["rollout.concurrency=64", "sampler.backend=embedded"], False),
    ],
)
def test_the_requests_that_sglang_runs_with_drafts_are_warned_of(settings: list[str], *, warned: bool) -> None:
    config = load_config(None, ["sampler.backend=sglang", "sampler.sglang.speculative_algorithm=NGRAM", *settings])
    assert speculation_warning(config).endswith("set sampler.sglang.max_running_requests=64") is warned
