"""The learner on a GPU: every loss as on a CPU, without the host waiting for it, and compiled layers as the plain ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.integration.test_two_ranks import AGGREGATIONS, ALGOS, batch_of
from tests.integration.two_ranks import compute
from tests.unit.learner.learners import make_batch, make_model

pytestmark = pytest.mark.gpu
SIZES = {"tokens_per_micro": 96}
LENGTHS = (40, 7, 64, 23, 90, 3)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("models")
    sizes = {"initializer_range": 0.1}
    return make_model(folder / "policy", **sizes), make_model(folder / "reference", "llama", **sizes)


def cases() -> dict[str, tuple[AlgoConfig, GlobalBatch]]:
    return {
        name: batch_of(algo, AGGREGATIONS[number % len(AGGREGATIONS)], 1, SIZES)
        for number, (name, algo) in enumerate(ALGOS.items())
    }


def metrics(folders: tuple[Path, Path], config: LearnerConfig) -> dict[str, Mapping[str, float]]:
    """The metrics of every case, and how often the host waited in a step, without the first, as ``waits``."""
    made = cases()
    algo = next(iter(made.values()))[0].model_copy(update={"kl_coef": 1.0})
    learner = LocalLearnerGroup(folders[0], config, algo, seed=0, reference=folders[1])
    results = {}
    try:
        for name, (run, batch) in made.items():
            compute(learner.rank, run, batch)
            waits = []
            if config.device == "cuda":
                torch.cuda.set_sync_debug_mode("warn")
            with warnings.catch_warnings(record=True) as seen:
                warnings.simplefilter("always")
                values = compute(learner.rank, run, batch)
                waits = [
                    f"{warning.filename}:{warning.lineno}" for warning in seen if "synchroniz" in str(warning.message)
                ]
            torch.cuda.set_sync_debug_mode("default")
            results[name] = dict(values) | {"waits": waits}
    finally:
        learner.close()
    return results


def test_every_loss_is_that_of_a_cpu_and_the_host_waits_at_the_end_of_a_step_only(folders):
    options = {"precision": "float32", "compile": False, "optimizer": OptimizerConfig(max_grad_norm=1e6)}
    on_gpu = metrics(folders, LearnerConfig(device="cuda", **options))
    on_cpu = metrics(folders, LearnerConfig(device="cpu", **options))
    for name, values in on_gpu.items():
        waits = values.pop("waits")
        at_the_end = ("step_metrics", "fsdp/rank.py", "fsdp/sharding.py")  # the last clips gradients
        between = [where for where in waits if not any(name in where for name in at_the_end)]
        assert not between, (name, between)
        assert len(waits) <= 8, (name, waits)
        on_cpu[name].pop("waits")
        values.pop("train/peak_gpu_gib")
        assert values.keys() == on_cpu[name].keys()
        for key, value in values.items():
            assert value == pytest.approx(on_cpu[name][key], rel=1e-4, abs=1e-5), (name, key)


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_compiled_layers_have_the_gradient_of_plain_ones(folders, recompute, precision):
    """In bfloat16, they are as far from float32 as the plain ones."""
    batch = make_batch(LENGTHS)
    actual = []
    for dtype, compiled, how in (("float32", False, "none"), (precision, False, "none"), (precision, True, recompute)):
        config = LearnerConfig(device="cuda", precision=dtype, compile=compiled, recompute=how)
        learner = LocalLearnerGroup(folders[0], config, make_algo(), seed=0)
        try:
            actual.append(whole_gradient(learner, batch))
        finally:
            learner.close()
    exact, plain, other = actual
    assert (other - exact).norm() <= max(1e-4 * exact.norm(), 1.3 * (plain - exact).norm())


def test_flash_attention_in_bfloat16_is_near_float32(folders):
    batch = make_batch(LENGTHS)
    actual = []
    for precision in ("float32", "bfloat16"):
        config = LearnerConfig(device="cuda", precision=precision, compile=False, recompute="none")
        learner = LocalLearnerGroup(folders[0], config, make_algo(), seed=0)
        try:
            actual.append(whole_gradient(learner, batch))
        finally:
            learner.close()
    assert torch.nn.functional.cosine_similarity(*actual, dim=0) > 0.99


def whole_gradient(learner: LocalLearnerGroup, batch: GlobalBatch) -> torch.Tensor:
    """The gradient of a batch as one vector, without taking the step."""
    rank = learner.rank
    gradients: list[torch.Tensor] = []
    rank._update = lambda lr_scale: gradients.extend(p.grad.detach().flatten() for p in rank.model.parameters()) or {}
    learner.train_step(batch)
    return torch.cat(gradients).float()
