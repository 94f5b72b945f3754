from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from agentrl.config.learner import LearnerConfig
from agentrl.core.errors import AgentrlError, ConfigError
from agentrl.learner.registry import make_backend
from tests.algo_config import make_algo
from tests.vision_folders import write_processor_folder


@pytest.mark.parametrize(
    ("megatron_options", "key"),
    [
        ({"lora": {}}, "learner.lora.*has no adapters"),
        ({"fp8": True}, "learner.fp8.*Transformer Engine"),
        ({"optimizer": {"name": "muon"}}, "learner.optimizer.name=muon.*emerging_optimizers"),
        ({"reshard_after_forward": True}, "learner.reshard_after_forward"),
        ({"ranks": 2, "expert_parallel": 2}, "learner.expert_parallel.*expert_model_parallel_size"),
        ({"ranks": 2, "context_parallel": 2}, "learner.context_parallel"),
    ],
)
def test_what_the_backend_lacks_is_refused_by_its_key(megatron_options: dict[str, Any], key: str) -> None:
    backend = make_backend(LearnerConfig.model_validate({"backend": "megatron", **megatron_options}))
    with pytest.raises(ConfigError, match=rf"^{key}.*leave it out, or set learner.backend=fsdp"):
        backend.check(make_algo(), [])


def test_a_critic_with_another_optimizer_is_refused() -> None:
    backend = make_backend(LearnerConfig(backend="megatron"))
    backend.check(make_algo(advantage={"name": "gae"}), [])
    with pytest.raises(ConfigError, match=r"^algo\.critic\.optimizer\.name=muon: .*megatron lacks it"):
        backend.check(make_algo(advantage={"name": "gae"}, critic={"optimizer": {"name": "muon"}}), [])


def test_layers_are_recomputed_by_one_key_only() -> None:
    megatron_options = {"backend": "megatron", "recompute": "full", "megatron": {"recompute_granularity": "full"}}
    with pytest.raises(ConfigError, match=r"^learner\.recompute=full with learner\.megatron\.recompute_granularity"):
        make_backend(LearnerConfig.model_validate(megatron_options)).check(make_algo(), [])


OPTIONS = {
    "moe_input_jitter_eps": 0.1, "moe_expert_capacity_factor": 1.0, "loss_scale": 128, "window_size": [4, 0],
    "softmax_type": "off-by-one", "layernorm_zero_centered_gamma": True, "qk_clip": True, "use_megatron_fsdp": True,
    "mtp_num_layers": 1, "enable_cuda_graph": True, "fp8": "hybrid",
    "moe_router_bias_update_rate": 0.1, "attention_dropout": 0.1, "calculate_per_token_loss": False, "num_layers": 2,
    "average_in_collective": True, "use_precision_aware_optimizer": True, "batch_p2p_comm": True, "attention_backend": "fused",
    "moe_router_topk": 1, "moe_router_dtype": "fp64", "init_method_std": 0.1, "cpu_offloading": True, "tp_comm_overlap": True,
}  # fmt: skip
"""Options with which Megatron-Core computes something else, does nothing, or ends in an error."""


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_are_not_known_to_be_right_are_refused_by_name(name: str) -> None:
    backend = make_backend(LearnerConfig(backend="megatron", megatron={name: OPTIONS[name]}))
    with pytest.raises(ConfigError, match=rf"^learner\.megatron\.{name}=.*(does not support|is not supported)"):
        backend.check(make_algo(), [])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"recompute_granularty": "full"}, "did you mean learner.megatron.recompute_granularity?"),
        ({"optimizer_cpu_offload": True}, "optimizer_cpu_offload=True: set learner.cpu_offload=optimizer"),
        ({"lr": 1.0}, "learner.megatron.lr=1.0: set learner.optimizer.lr"),
        ({"recompute_granularity": "selective"}, "='selective' is not supported; set it to full"),
        ({"moe_router_load_balancing_type": "sinkhorn"}, "='sinkhorn' is not supported; set it to none or aux_loss"),
        ({"sequence_parallel": 1}, "sequence_parallel=1 is not supported; set it to true or false"),
        ({"overlap_param_gather": True}, "overlap_param_gather=true needs learner.megatron.overlap_grad_reduce=true"),
    ],
)
def test_options_and_values_that_are_not_supported_are_refused_with_what_is(
    options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        make_backend(LearnerConfig(backend="megatron", megatron=options)).check(make_algo(), [])


def test_options_that_are_known_to_be_right_pass() -> None:
    """Those of the shipped configurations, and those of the tests of layouts."""
    options = {
        "sequence_parallel": True,
        "overlap_grad_reduce": True,
        "overlap_param_gather": True,
        "bucket_size": 1000,
    }
    options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    options |= {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01, "moe_z_loss_coeff": 0.001}
    make_backend(LearnerConfig(backend="megatron", megatron=options)).check(make_algo(), [])


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        (
            "qwen2.5-vl",
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1, "overlap_grad_reduce": True},
            "learner.megatron.overlap_grad_reduce=True: model.path=",
        ),
        (
            "qwen2.5-vl",
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "learner.megatron.virtual_pipeline_model_parallel_size=2: model.path=",
        ),
        ("qwen3-vl", {"recompute_granularity": "full"}, "set learner.recompute=full"),
        ("smolvlm", {}, "model_type='smolvlm', and of models with images only qwen2_5_vl, qwen3_vl"),
    ],
)
def test_what_is_not_supported_with_images_is_refused_by_name(
    tmp_path: Path, family: str, options: dict[str, Any], message: str
) -> None:
    folder = write_processor_folder(tmp_path, family)
    with pytest.raises(AgentrlError, match=re.escape(message)):
        make_backend(LearnerConfig(backend="megatron", ranks=2, megatron=options)).check(make_algo(), [folder])


def test_the_first_stage_has_the_layers_that_add_features_of_images(tmp_path: Path) -> None:
    folder = write_processor_folder(tmp_path, "qwen3-vl")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["deepstack_visual_indexes"] = [0, 1]
    (folder / "config.json").write_text(json.dumps(config))
    backend = make_backend(LearnerConfig(backend="megatron", ranks=2, megatron={"pipeline_model_parallel_size": 2}))
    with pytest.raises(ConfigError, match=r"first stage has 1 layers, and 2 .*num_layers_in_first_pipeline_stage=2"):
        backend.check(make_algo(), [folder])
