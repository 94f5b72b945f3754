"""Batches with images on one rank and on two: log-probabilities of transformers, gradients of FSDP2, a tower that is the same
on all ranks.

All ranks are forks of one process; see `forked`.
"""

from __future__ import annotations

import json
import pickle
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from agentrl.core.types import Row, RowKey
from tests.batches import pack_rows
from tests.unit.learner.image_rows import (
    IMAGES,
    batch,
    critic_folder,
    episodes,
    folder,
    own_logprobs,
    own_values,
    without_sampled_pads,
)
from tests.unit.learner.learners import Learners, gradients
from tests.unit.learner.megatron.forked import Found, run_ranks
from tests.unit.learner.megatron.models import make_model
from tests.unit.learner.megatron.rank_work import algo_of

pytestmark = pytest.mark.slow

FAMILIES = ("qwen2.5-vl", "qwen3-vl")
LAYOUTS = {
    "DP2": "qwen2.5-vl",
    "TP2": "qwen2.5-vl",
    "PP2": "qwen2.5-vl",
    "CP2": "qwen2.5-vl",
    "TP2, SP": "qwen3-vl",
    "PP2, deepstack": "qwen3-vl",
}


@cache
def rows(family: str) -> list[Row]:
    return without_sampled_pads(family, episodes(family))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory, preloaded_children: str) -> Found:
    parent = tmp_path_factory.mktemp("megatron")
    for family in FAMILIES:
        (parent / family).symlink_to(folder(family))
        (parent / f"critic of {family}").symlink_to(critic_folder(family))
        returns = {row.key: np.ones(len(row.mask), np.float32) for row in rows(family)}
        sizes = {"tokens_per_micro": 160, "data_parallel_size": 1, "pad_id": 0, "images": IMAGES}
        values = pack_rows(rows(family), kind="value", returns=returns, values=returns, **sizes)
        (parent / f"{family}.values").write_bytes(pickle.dumps(values))
        batches = {ranks: batch(rows(family), tokens=160, ranks=ranks) for ranks in (1, 2)}
        (parent / f"{family}.batches").write_bytes(pickle.dumps(batches))
    make_model(parent / "text", "qwen3", vocab_size=400)
    return run_ranks(parent, preloaded_children, "image_cases", one_rank=1, two_ranks=2)


@pytest.fixture(scope="module")
def expected_gradients():
    learners = Learners(Path())

    @cache
    def of_family(family: str) -> dict[str, torch.Tensor]:
        learner = learners.open(folder=folder(family), reference=folder(family), algo=algo_of("grpo"))
        return gradients(learner, batch(rows(family), tokens=160), torch.float32)

    yield of_family
    learners.close()


def folder_name(name: str, family: str) -> str:
    """Return the name in the folder of a weight in transformers; folders of Qwen2.5-VL have other names."""
    if family == "qwen2.5-vl":
        return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")
    return name


@cache
def expected_scores(family: str) -> dict[RowKey, np.ndarray]:
    return own_logprobs(family, rows(family))


def assert_scores(scores, family: str) -> None:
    expected = expected_scores(family)
    assert scores.keys() == expected.keys()
    for key, row_scores in scores.items():
        np.testing.assert_allclose(row_scores, expected[key], atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_logprobs_of_policy_and_reference_are_those_of_transformers(found: Found, family: str) -> None:
    scores, references, _, _ = found["one_rank"][family]
    assert_scores(scores, family)
    assert_scores(references, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_engines_get_the_tower_which_stays_equal_if_it_is_frozen(found: Found, family: str) -> None:
    _, _, before, after = found["one_rank"][family]
    files = load_file(folder(family) / "model.safetensors")
    assert before.keys() == files.keys()
    assert all(torch.equal(before[name], files[name]) for name in files)
    tower = {name for name in before if "visual." in name}
    assert tower
    assert all(torch.equal(before[name], after[name]) for name in tower)
    assert any(not torch.equal(before[name], after[name]) for name in before.keys() - tower)


def critic_scores(family: str) -> dict[RowKey, np.ndarray]:
    files = load_file(critic_folder(family) / "model.safetensors")
    return own_values(family, rows(family), files["score.weight"], files["score.bias"])


def assert_values(values, family: str) -> None:
    expected = critic_scores(family)
    assert values.keys() == expected.keys()
    for key, row_values in values.items():
        np.testing.assert_allclose(row_values, expected[key], atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_a_critic_are_those_of_transformers_and_its_tower_may_be_frozen(found: Found, family: str) -> None:
    """A pattern for another weight is the policy's alone."""
    values, before, after = found["one_rank"][f"critic of {family}"]
    assert_values(values, family)
    assert before.keys() == load_file(critic_folder(family) / "model.safetensors").keys()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert {name for name in before if "visual." in name} == before.keys() - changed


def test_a_critic_of_two_stages_has_the_values_of_transformers(found: Found) -> None:
    assert_values(found["two_ranks"]["critic"], "qwen3-vl")


@pytest.mark.parametrize("layout", LAYOUTS)
def test_ranks_together_have_scores_of_transformers_and_gradients_of_fsdp(
    found: Found, expected_gradients, layout: str
) -> None:
    family = LAYOUTS[layout]
    scores, has = found["two_ranks"][layout]
    assert_scores(scores, family)
    expected = {folder_name(name, family): gradient for name, gradient in expected_gradients(family).items()}
    assert has.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(has[name], gradient, atol=2e-5, rtol=1e-3, msg=lambda text, name=name: name + text)
    assert any("visual." in name and gradient.abs().max() > 1e-3 for name, gradient in expected.items())


def test_a_checkpoint_has_the_tower_in_any_layout(found: Found) -> None:
    saved, loaded = found["two_ranks"]["saved"], found["two_ranks"]["loaded"]
    assert all(torch.equal(saved[name], loaded[name]) for name in saved)
    files = load_file(found.folder / "checkpoint" / "model" / "model.safetensors")
    assert all(torch.equal(saved[name], files[name]) for name in saved)
    assert "vision_config" in json.loads((found.folder / "checkpoint" / "model" / "config.json").read_text())


def test_a_text_model_refuses_images(found: Found) -> None:
    assert found["one_rank"]["refused"].endswith("reads none; set model.path to a vision-language model")
