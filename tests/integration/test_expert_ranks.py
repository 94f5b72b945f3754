"""Ranks that divide the experts of a model learn what one rank learns."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.integration.expert_ranks import CASES, LONG, Cases, Found, batch_of, learner_config
from tests.integration.rank_processes import run_ranks
from tests.unit.learner.learners import tensors
from tests.unit.learner.megatron.models import make_model

pytestmark = pytest.mark.slow

EXPERTS = {"qwen3_moe": 4, "gpt_oss": 4, "deepseek_v3": 8}


def open_alone(folder: Path, family: str) -> LocalLearnerGroup:
    """Return a learner of one rank."""
    return LocalLearnerGroup(folder / family, learner_config(), make_algo(), seed=0)


def learn(folder: Path, family: str) -> Found:
    """Take two steps with one rank, which saves a checkpoint after the first."""
    make_model(folder / family, family, num_hidden_layers=2)
    learner = open_alone(folder, family)
    metrics = [learner.train_step(batch_of(1, 0))]
    learner.save(folder / f"one {family}")
    learner.finish_save()
    metrics.append(learner.train_step(batch_of(1, 1)))
    found = Found(metrics, tensors(learner), {}, [])
    learner.close()
    return found


def check(folder: Path, cases: Cases) -> None:
    """Compare loss, norm of the gradient, weights and experts of all cases with those of one rank."""
    alone = {family: learn(folder, family) for family in {family for _, family, _ in cases.values()}}
    torch.save(cases, folder / "cases.pt")
    run_ranks("tests.integration.expert_ranks:main", folder, 4, timeout_s=200)
    results: Mapping[str, Found] = torch.load(folder / "found.pt", weights_only=False)
    assert results.keys() == cases.keys()
    for name, (ranks, family, options) in cases.items():
        actual, expected = results[name], alone[family]
        first, second = expected.metrics
        assert first["train/grad_norm"] > 0.5, "it is clipped"
        for metrics, theirs in zip(actual.metrics, (first, second, second), strict=True):
            for key in ("train/loss", "train/grad_norm", "train/trained_tokens"):
                assert metrics[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-6), (name, key)
        assert actual.weights.keys() == expected.weights.keys()
        for key, value in expected.weights.items():
            assert torch.allclose(actual.weights[key], value, rtol=0, atol=1e-5), (name, key)
            assert torch.equal(actual.weights[key], actual.small[key]), (name, key)
        computed = EXPERTS[family] // int(str(options["expert_parallel"]))
        columns = ranks // int(str(options.get("replicas", 1))) // int(str(options["expert_parallel"]))
        assert actual.experts, name
        assert set(actual.experts) == {(computed, computed // columns)}, name


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the ranks of `CASES` have saved."""
    folder = tmp_path_factory.mktemp("experts")
    check(folder, CASES)
    return folder


@pytest.mark.parametrize("name", ["4 ranks, biases", "4 ranks, two copies"])
def test_ranks_with_different_experts_learn_what_one_rank_learns(name: str, folder: Path) -> None:
    """Their checkpoints go on with one rank; see also `check`."""
    results: Mapping[str, Found] = torch.load(folder / "found.pt", weights_only=False)
    learner = open_alone(folder, CASES[name][1])
    learner.load(folder / name)
    after = learner.train_step(batch_of(1, 1))
    assert after["train/loss"] == pytest.approx(results[name].metrics[1]["train/loss"], rel=1e-5, abs=1e-6)
    weights = tensors(learner)
    learner.close()
    assert all(torch.allclose(weights[key], value, atol=1e-5) for key, value in results[name].weights.items())


@pytest.mark.long
def test_other_layouts_learn_what_one_rank_learns(tmp_path: Path) -> None:
    check(tmp_path, LONG)


@pytest.mark.long
def test_ranks_with_8bit_moments_resume_from_checkpoints_without_a_hugging_face_folder(tmp_path: Path) -> None:
    """Bit for bit with two ranks; one rank goes on from the same files, with other roundings of the moments."""
    make_model(tmp_path / "qwen3_moe", "qwen3_moe", num_hidden_layers=2)
    run_ranks("tests.integration.expert_ranks:resume_8bit", tmp_path, 2, timeout_s=200)
    assert not list((tmp_path / "checkpoint").rglob("*.safetensors"))
    metrics, weights = torch.load(tmp_path / "found.pt", weights_only=False)
    config = learner_config(state="8bit", save_hf=False)
    learner = LocalLearnerGroup(tmp_path / "qwen3_moe", config, make_algo(), seed=0)
    before = learner.train_step(batch_of(1, 0))
    learner.load(tmp_path / "checkpoint")
    after = learner.train_step(batch_of(1, 1))
    for actual, expected in zip((before, after), metrics, strict=True):
        assert actual["train/loss"] == pytest.approx(expected["train/loss"], rel=1e-5, abs=1e-6)
        assert actual["train/grad_norm"] == pytest.approx(expected["train/grad_norm"], rel=1e-2)
    steps = torch.cat([(weight - weights[name]).flatten() for name, weight in tensors(learner).items()])
    assert float(steps.abs().mean()) < 0.1 * learner_config().optimizer.fixed_lr
    learner.close()
