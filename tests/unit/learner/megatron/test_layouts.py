"""Megatron-Core learners of every layout compute what one rank of the FSDP learner does.

All ranks are forks of one process; see `forked`.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file

from agentrl.learner.in_process import LocalCritic, LocalLearnerGroup
from tests.unit.learner.megatron import forked
from tests.unit.learner.megatron.models import add_draft_layer, make_critic_model, make_model
from tests.unit.learner.megatron.rank_work import (
    FOUR,
    LONG,
    LONG_OF_EXPERTS,
    MODELS,
    ONE,
    TWO,
    TWO_OF_EXPERTS,
    Found,
    algo_of,
    algos_of,
    batch_rows,
    compute,
    critic_of,
    learner_config,
)

pytestmark = pytest.mark.slow

FUNCTIONS = {"one_rank": ONE, "two_ranks": TWO | TWO_OF_EXPERTS, "four_ranks": FOUR}
LAYOUTS = [(function, name) for function, names in FUNCTIONS.items() for name in names]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("megatron")
    for name, model in MODELS.items():
        make_critic_model(add_draft_layer(make_model(parent / name, model)), critic_of(parent / name))
    make_model(parent / "reference", "llama")
    return parent


@pytest.fixture(scope="module")
def long_found(folder: Path, preloaded_children: str) -> forked.Found:
    return forked.run_ranks(folder, preloaded_children, "rank_cases", long=2)


@pytest.fixture(scope="module")
def found(folder: Path, preloaded_children: str) -> forked.Found:
    functions = {"one_rank": 1, "new_head": 1, "contract": 1, "two_ranks": 2, "resumed": 2, "four_ranks": 4}
    return forked.run_ranks(folder, preloaded_children, "rank_cases", **functions)


def test_one_rank_keeps_the_contract_of_learners(found: forked.Found) -> None:
    assert found["contract"]


@pytest.fixture(scope="module")
def expected(folder: Path):
    @cache
    def of_model(name: str, algos: tuple[str, ...]) -> Found:
        learner = LocalLearnerGroup(
            folder / name, learner_config("fsdp"), algo_of("grpo"), seed=0, reference=folder / "reference"
        )
        critic = LocalCritic(critic_of(folder / name), learner_config("fsdp"), algo_of("ppo"), seed=0)
        try:
            return compute(learner.rank, critic.rank, 1, algos)
        finally:
            critic.close()
            learner.close()

    return of_model


def model_of(layout: str) -> str:
    return "experts" if layout in TWO_OF_EXPERTS | LONG_OF_EXPERTS else "tied" if layout in FOUR else "qwen3"


@pytest.mark.parametrize(("function", "layout"), LAYOUTS, ids=[name for _, name in LAYOUTS])
def test_a_layout_computes_what_one_fsdp_rank_does(found, expected, function: str, layout: str) -> None:
    assert_equal(found[function][layout], expected(model_of(layout), algos_of(layout)), layout)


@pytest.mark.long
@pytest.mark.parametrize("layout", [*LONG, *LONG_OF_EXPERTS])
def test_a_layout_that_others_contain_computes_it_too(long_found, expected, layout: str) -> None:
    assert_equal(long_found["long"][layout], expected(model_of(layout), algos_of(layout)), layout)


def assert_equal(has: Found, expected_value: Found, layout: str) -> None:
    assert has.metrics.keys() == expected_value.metrics.keys() - ({"parts"} if "overlapped" in layout else set())
    for step, metrics in ((step, expected_value.metrics[step]) for step in has.metrics):
        assert metrics["train/grad_norm"] > 1e-3
        assert has.metrics[step].keys() == metrics.keys()
        for key, value in metrics.items():
            assert has.metrics[step][key] == pytest.approx(value, rel=1e-5, abs=1e-5), (step, key)
    for kind in ("logprobs", "values"):
        rows = getattr(expected_value, kind)
        assert getattr(has, kind).keys() == rows.keys()
        for key, row in rows.items():
            np.testing.assert_allclose(getattr(has, kind)[key], row, atol=1e-4)


@pytest.mark.parametrize(("kind", "labels"), [("grpo", None), ("value", {"0": "LABEL_0"})], ids=["policy", "critic"])
def test_a_checkpoint_of_a_sleeping_learner_goes_on_in_other_layouts(
    found, folder: Path, kind: str, labels: dict[str, str] | None
) -> None:
    metrics = found["resumed"]
    expected_value = metrics.pop("TP2, SP, offloaded")[kind]
    for name, has in metrics.items():
        assert has[kind].keys() == expected_value.keys()
        for key, value in expected_value.items():
            assert has[kind][key] == pytest.approx(value, rel=1e-5, abs=1e-5), (name, key)
    model = folder / f"checkpoint of {kind}" / "model"
    begun_from = folder / "experts" if kind == "grpo" else critic_of(folder / "qwen3")
    written, begun = (load_file(model_folder / "model.safetensors") for model_folder in (model, begun_from))
    assert {key: value.shape for key, value in written.items()} == {key: value.shape for key, value in begun.items()}
    assert any((written[key] != begun[key]).any() for key in begun)
    assert json.loads((model / "config.json").read_text()).get("id2label") == labels


def test_a_critic_of_a_policy_has_a_head_of_zeros(found) -> None:
    values = found["new_head"]
    assert {key: row.shape for key, row in values.items()} == {row.key: row.mask.shape for row in batch_rows()}
    assert not any(row.any() for row in values.values())
