"""Every random state that training could draw from is, after `load`, what it was at `save`."""

from __future__ import annotations

import json
import random

import numpy as np
import torch

from tests.unit.learner.learners import make_batch


def states() -> tuple[object, ...]:
    """All global generators of this process as comparable values."""
    kind, keys, *other_fields = np.random.get_state()
    cuda = tuple(tuple(state.tolist()) for state in torch.cuda.get_rng_state_all()) if torch.cuda.is_available() else ()
    return (
        tuple(torch.get_rng_state().tolist()),
        cuda,
        kind,
        tuple(keys.tolist()),
        tuple(other_fields),
        random.getstate(),
    )


def draw(times: int) -> None:
    for _ in range(times):
        torch.rand(3), torch.randn(5)
        # An odd number of normal variates leaves one cached: part of the state too.
        np.random.standard_normal()
        random.gauss(0, 1)
        np.random.rand()


def test_load_brings_back_every_bit_of_every_state(learners, tmp_path):
    learner = learners.open()
    learner.train_step(make_batch([30, 20]))
    draw(3)
    states_before = states()
    assert states_before[4][1] == 1, "numpy holds no cached variate: the test would not see whether it comes back"
    assert states_before[5][2] is not None
    learner.save(tmp_path / "state")
    learner.finish_save()
    assert states() == states_before, (
        "saving drew random numbers: the run that goes on would differ from the resumed one"
    )
    draw(2)
    learner.train_step(make_batch([30, 20]))
    assert states() != states_before
    learner.load(tmp_path / "state")
    assert states() == states_before

    # A new process, seeded otherwise, comes to the same state.
    learner = learners.open(folder=tmp_path / "state" / "model")
    assert states() != states_before
    learner.load(tmp_path / "state")
    assert states() == states_before


def test_the_drivers_states_come_back_too():
    from agentrl.learner.random_states import random_states, restore_random, states_from_json, states_to_json

    draw(3)
    states_before, saved = states(), random_states()
    draw(2)
    assert states() != states_before
    restore_random(states_from_json(json.loads(json.dumps(states_to_json(saved)))))
    assert states() == states_before


def test_training_and_scoring_draw_no_random_numbers(learners, model):
    """A reference or a different packing must not shift what is drawn later."""
    learner = learners.open()
    states_before = states()
    learner.train_step(make_batch([30, 20]))
    learner.logprobs(make_batch([30, 20]))
    assert states() == states_before
