"""A checkpoint of two ranks, written while they train, is the same on one rank and on three."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.integration.rank_processes import run_ranks
from tests.integration.saving_ranks import CONFIG
from tests.unit.learner.learners import make_batch, make_model

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints ``of_two``, ``of_three``, ``asleep`` and ``offloaded``."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model(folder / "model", "qwen3_moe", vocab_size=97, hidden_size=28)  # ranks have unequal shares
    torch.save(make_batch([30, 12, 44, 9], shares=2, micro=64), folder / "batch.pt")
    run_ranks("tests.integration.saving_ranks:main", folder, 3, timeout_s=100)
    return folder


def state(learner: LocalLearnerGroup, checkpoint: Path) -> dict[str, torch.Tensor]:
    """Load a checkpoint on one rank, and return its weights and the moments of its optimizer."""
    learner.load(checkpoint)
    rank = learner.rank
    tensors_by_name = {name: parameter.detach().clone() for name, parameter in rank.model.hf.named_parameters()}
    [optimizer] = rank.optimizers.values()
    for name, parameter in rank.model.hf.named_parameters():
        tensors_by_name |= {f"{name} {key}": value.clone() for key, value in optimizer.state[parameter].items()}
    return tensors_by_name


def test_it_loads_on_one_rank_and_on_three(folder, tmp_path):
    learner = LocalLearnerGroup(folder / "model", CONFIG, make_algo(), seed=0)
    try:
        of_two, of_three = (state(learner, folder / name) for name in ("of_two", "of_three"))
        learner.save(tmp_path / "of_one")
        learner.finish_save()
    finally:
        learner.close()
    assert of_two.keys() == of_three.keys()
    assert all(torch.equal(tensor, of_three[name]) for name, tensor in of_two.items())
    assert all(of_two[name].any() for name in of_two if name.endswith("exp_avg"))
    start = load_file(folder / "model" / "model.safetensors")
    model = Path("model", "model.safetensors")
    trained = load_file(folder / "of_two" / model)
    assert trained.keys() == start.keys()
    assert all(not torch.equal(tensor, trained[name]) for name, tensor in start.items())
    assert {
        (parent / model).read_bytes() for parent in (folder / "of_two", folder / "of_three", tmp_path / "of_one")
    } == {(folder / "of_two" / model).read_bytes()}


def test_a_sleeping_rank_saves_what_it_had(folder):
    """It took one more step."""
    awake, asleep = (load_file(folder / name / "model" / "model.safetensors") for name in ("of_two", "asleep"))
    assert awake.keys() == asleep.keys()
    assert all(not torch.equal(tensor, asleep[name]) for name, tensor in awake.items())


def test_ranks_with_offloaded_optimizer_states_train_on_bit_for_bit(folder):
    """From ``of_two``, as the ranks did that wrote ``asleep``."""
    learner = LocalLearnerGroup(folder / "model", CONFIG, make_algo(), seed=0)
    try:
        asleep, offloaded = (state(learner, folder / name) for name in ("asleep", "offloaded"))
    finally:
        learner.close()
    assert asleep.keys() == offloaded.keys()
    assert all(torch.equal(tensor, offloaded[name]) for name, tensor in asleep.items())
