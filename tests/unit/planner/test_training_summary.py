"""Memory before a run: of which backend, and what fits a GPU with ``learner.recompute=auto``."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from agentrl.config.load import load_config
from agentrl.models.random_models import SHAPES, model_config
from agentrl.planner.training_summary import (
    FITS,
    describe_memory,
    describe_training,
    estimate_memory,
    fit_to_gpu,
    memory_limit,
)

ON_A_GPU = ["learner.device=cuda"]
GROUPS = ["sampler.router=sglang", "weights.gap_limit=off", "eval.background=true", "train.eval_every=1"]
"""What groups of engines need."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of 4B without weights; with selective recomputation it needs 107.6 GiB, nine tenths of 119.5."""
    model_folder = tmp_path_factory.mktemp("4b")
    model_config(SHAPES["4b"]).save_pretrained(model_folder)
    return model_folder


@pytest.mark.parametrize(
    ("gib", "overrides", "chosen"),
    [
        (139.8, [], (16384, "selective", "float32")),
        (230.0, [], (32768, "none", "float32")),
        (108.0, [], (12288, "selective", "float32")),
        (79.2, [], (12288, "selective", "8bit")),
        (79.2, ["batch.tokens_per_micro=8192"], (8192, "selective", "8bit")),
        (79.2, ["learner.optimizer.state=float32"], (16384, "all_but_attention", "float32")),
        (79.2, ["rollout.max_tokens=32768"], (16384, "all_but_attention", "8bit")),
        (79.2, ["rollout.max_tokens=65536"], (16384, "full", "8bit")),
        (79.2, ["placement.mode=colocate"], (10240, "selective", "8bit")),
        (79.2, ["learner.optimizer.name=muon"], (4096, "selective", "float32")),
        (79.2, ["learner.recompute=full"], (32768, "full", "float32")),
        (48.0, [], (16384, "all_but_attention", "8bit")),
    ],
)
def test_the_fastest_that_fits_is_chosen(
    folder: Path, gib: float, overrides: list[str], chosen: tuple[int, str, str]
) -> None:
    config, [line] = fit_to_gpu(load_config(None, [*ON_A_GPU, *overrides]), folder, lambda: int(gib * 2**30))
    values = config.batch.tokens_per_micro, config.learner.recompute, config.learner.optimizer.state
    assert values == chosen
    assert f"batch.tokens_per_micro={chosen[0]} learner.recompute={chosen[1]}" in line
    assert f"of the {gib} of a GPU" in line
    assert estimate_memory(config, folder)[0].total <= FITS * gib * 2**30


@pytest.mark.parametrize(
    ("gpus", "engines", "share", "chosen"),
    [(1, 1, 0.4, (14336, "8bit")), (1, 2, 0.2, (14336, "8bit")), (2, 1, 0.4, (16384, "float32"))],
)
def test_engines_on_the_only_gpu_keep_their_shares(
    folder: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, engines: int, share: float, chosen: tuple[int, str]
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    sampler = ["sampler.backend=sglang", "sampler.sglang.device=cuda", f"sampler.engines={engines}"]
    overrides = [*ON_A_GPU, *sampler, f"sampler.sglang.mem_fraction_static={share}"]
    config, [line] = fit_to_gpu(load_config(None, overrides), folder, lambda: int(139.8 * 2**30))
    assert (config.batch.tokens_per_micro, config.learner.optimizer.state) == chosen
    words = {1: "an engine", 2: "2 engines"}[engines]
    assert line.endswith(f"beside {words} with sampler.sglang.mem_fraction_static={share}") == (gpus == 1)
    assert estimate_memory(config, folder)[0].total <= (FITS - 0.4 * (gpus == 1)) * 139.8 * 2**30


@pytest.mark.parametrize(
    ("others", "share", "words"),
    [
        (
            "reward={function: judge, judge: {model: j, engines: 2, sglang: {mem_fraction_static: 0.1}}}",
            0.5,
            "3 .*0.3, 0.1",
        ),
        ("algo.distillation.teachers={t: {path: x}, u: {url: 'http://127.0.0.1:1'}}", 0.6, "2 .*0.3"),
        ("env.roles={guide: {frozen: initial}, critic: {frozen: initial}}", 0.6, "2 .*0.3"),
        ("self_play={engines: 2, mix: {past: 1}}", 0.9, "3 .*0.3"),
        ("sampler.groups={eval: {serves: evaluation, sglang: {mem_fraction_static: 0.2}}}", 0.5, "2 .*0.3, 0.2"),
        (
            "sampler.groups={p: {serves: prefill}, d: {serves: decode, engines: 2, sglang: {mem_fraction_static: 0.1}}}",
            0.5,
            "3 .*0.3, 0.1",
        ),
    ],
)
def test_all_engines_on_the_only_gpu_keep_their_shares(
    monkeypatch: pytest.MonkeyPatch, others: str, share: float, words: str
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    sampler = ["sampler.backend=sglang", "sampler.sglang={device: cuda, mem_fraction_static: 0.3}"]
    limit, beside = memory_limit(load_config(None, [*ON_A_GPU, *sampler, *GROUPS, others]), 1000)
    assert limit == pytest.approx((FITS - share) * 1000)
    assert re.fullmatch(f" beside {words}", beside)


@pytest.mark.parametrize(("overrides", "warns"), [([], True), (["learner.cpu_offload=optimizer"], False)])
def test_what_does_not_fit_in_any_way_is_said(folder: Path, overrides: list[str], warns: bool) -> None:
    config, lines = fit_to_gpu(load_config(None, [*ON_A_GPU, *overrides]), folder, lambda: 36 << 30)
    assert [line.startswith("warning: ") and "learner.cpu_offload=optimizer" in line for line in lines[1:]] == [
        True
    ] * warns
    assert config.batch.tokens_per_micro == (4096 if warns else 8192)


@pytest.mark.parametrize(
    ("overrides", "gpu"),
    [
        (
            [
                "learner.device=cuda",
                "learner.recompute=none",
                "batch.tokens_per_micro=16384",
                "learner.optimizer.state=float32",
            ],
            1,
        ),
        (ON_A_GPU, None),
        (["learner.device=cpu"], 1),
    ],
)
def test_what_is_set_and_what_is_not_on_a_known_gpu_stays(
    tmp_path: Path, overrides: list[str], gpu: int | None
) -> None:
    config = load_config(None, overrides)
    assert fit_to_gpu(config, tmp_path, lambda: gpu) == (config, [])


def test_ranks_of_a_context_have_their_part_of_the_activations(folder: Path) -> None:
    of_two, of_context = (
        estimate_memory(load_config(None, [*ON_A_GPU, "learner.ranks=2", f"learner.context_parallel={size}"]), folder)[
            0
        ]
        for size in (1, 2)
    )
    assert of_context.activations == pytest.approx(of_two.activations / 2, rel=0.01)
    assert of_context.weights == of_two.weights


def test_the_estimate_is_that_of_the_backend(folder: Path) -> None:
    fsdp = estimate_memory(load_config(None, ON_A_GPU), folder)[0]
    two = ["learner.backend=megatron", "learner.ranks=2", "learner.megatron.tensor_model_parallel_size=2"]
    memory, device = estimate_memory(load_config(None, [*ON_A_GPU, *two]), folder)
    assert device == "cuda"
    assert memory.weights == pytest.approx(fsdp.weights / 4, rel=1e-3), "bfloat16, and half of all matrices"
    [line] = describe_memory(load_config(None, [*ON_A_GPU, *two]), folder)
    assert f"about {memory.total / 2**30:.1f} GiB on each of 2 learner ranks (cuda)" in line


@pytest.mark.parametrize("backend", ["fsdp", "megatron"])
def test_a_critic_rests_on_the_gpus_of_the_policy_or_has_its_own(folder: Path, backend: str) -> None:
    words = [*ON_A_GPU, f"learner.backend={backend}", "algo.advantage.name=gae", "learner.recompute=full"]
    apart, shared = (load_config(None, [*words, f"placement.mode={mode}"]) for mode in ("disaggregate", "colocate"))
    alone, together = (estimate_memory(config, folder, folder)[0] for config in (apart, shared))
    assert alone == estimate_memory(apart, folder)[0]
    gradients = alone.gradients if backend == "megatron" else 0
    resting = alone.weights + alone.optimizer + gradients
    assert together == replace(alone, critic=together.critic)
    # The language head of this model has the weight of the embedding, so that both have as many weights.
    assert together.critic == pytest.approx(resting, rel=1e-3)
    [line, of_critic] = describe_memory(apart, folder, folder)
    assert line == describe_memory(apart, folder)[0]
    assert of_critic.endswith("GiB on each of 1 ranks of the critic")
    assert len(describe_memory(shared, folder, folder)) == 1


def test_memory_of_another_packages_backend_is_not_estimated(folder: Path) -> None:
    assert describe_memory(load_config(None, [*ON_A_GPU, "learner.backend=theirs"]), folder) == []


@pytest.mark.parametrize(
    ("overrides", "compiled"),
    [
        ([], "decoder layers"),
        (["learner.compile=false"], "attention of shared prefixes (batch.share_prefixes)"),
        (["learner.compile=false", "batch.share_prefixes=false"], None),
    ],
)
def test_what_is_compiled_is_said(folder: Path, overrides: list[str], compiled: str | None) -> None:
    lines = describe_training(load_config(None, [*ON_A_GPU, *overrides]), folder, None)
    said = [line for line in lines if line.startswith("compiles")]
    assert len(said) == (compiled is not None)
    assert all(compiled in line for line in said)
