"""The learner gives the loss entropies with a gradient where it has an entropy bonus."""

from __future__ import annotations

import pytest

from tests.algo_config import make_algo
from tests.unit.learner.learners import make_batch

LENGTHS = [30, 50, 20, 7, 60, 33, 12]


@pytest.mark.parametrize("logits_chunk", [7, 1024])
def test_the_bonus_alone_raises_the_entropy(learners, logits_chunk):
    learner = learners.open(algo=make_algo(entropy_coef=1.0), lr=3e-3, max_grad_norm=1.0, logits_chunk=logits_chunk)
    batch = make_batch(LENGTHS)
    for micro in batch.micro[0]:
        micro.advantages_L.zero_()
    train_steps = [learner.train_step(batch)["train/entropy"] for _ in range(12)]
    assert train_steps[-1] > train_steps[0] + 0.1


def test_without_it_and_without_advantages_nothing_moves(learners):
    learner = learners.open(algo=make_algo(), lr=3e-3, max_grad_norm=1.0)
    batch = make_batch(LENGTHS)
    for micro in batch.micro[0]:
        micro.advantages_L.zero_()
    assert [learner.train_step(batch)["train/grad_norm"] for _ in range(2)] == [0.0, 0.0]
