"""What must not change the gradient: how rollouts are cut into rows, ordered and packed, for every algorithm there is.

Episodes are fed to the real `Trajectory`, advantages, weights and batches come from the driver's own code, and the
gradient of all parameters from the learner's. Compared is the norm of the difference over the norm.

A cut in an episode ``p a a o b`` (``p`` and ``o`` observed, ``a`` and ``b`` sampled) is a branch with nothing sampled in
it, here ``x`` after the first ``a``::

    whole    p a a o b            cut     p a a o b      . marks what is shared: another row trains it
    trained  0 1 1 0 1            first   0 1 1 0 1
                                  second  p a x
                                          0 . 0
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.base import rollout_advantages
from agentrl.algo.registry import ALGORITHMS, make_algorithm
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.config.load import validate
from agentrl.config.schema import Config
from agentrl.core.types import FinishReason, Generation, MaskReason, Rollout, StopReason
from agentrl.episode.trajectory import Trajectory
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.train.optimizer_steps import advantages_by_step
from tests.unit.learner.learners import VOCAB, Learners, gradients, make_model

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
"""The largest relative difference."""
CHANGES = ({}, {"kl_coef": 0.5}, {"entropy_coef": 0.5}, {"old_logprobs": "learner"})
"""Settings of ``algo`` to test in addition to the defaults, if the algorithm has them."""


def _cases() -> Iterator[dict[str, object]]:
    for name in ALGORITHMS:
        known = type(validate({"algo": {"name": name}}).algo).model_fields
        yield from ({"name": name, **change} for change in CHANGES if change.keys() <= known.keys())


def _id(case: dict[str, object]) -> str:
    return ",".join(f"{key}={value}" for key, value in case.items())


@dataclass(frozen=True)
class Script:
    """What is read and said in an episode, turn by turn."""

    prompt_id: str
    rollout_id: str
    reward: float
    turns: tuple[tuple[tuple[int, ...], Generation], ...]


def make_scripts(seed: int, groups: int = 3, samples: int = 3) -> list[Script]:
    """Groups of episodes that share their first observation, as samples of one task do."""
    rng = np.random.default_rng(seed)

    def tokens() -> tuple[int, ...]:
        return tuple(rng.integers(2, VOCAB, rng.integers(2, 8)).tolist())

    def said(name: str) -> Generation:
        ids = tokens()
        logprobs = tuple(rng.uniform(-5, -4, len(ids)).tolist())
        return Generation(ids, logprobs, FinishReason.STOP, ((0, 0),), 0, name)

    scripts = []
    for group in range(groups):
        first = tokens()
        for sample in range(samples):
            name = f"{group}/{sample}"
            count = int(rng.integers(1, 4))
            turns = tuple((tokens() if turn else first, said(f"{name}/{turn}")) for turn in range(count))
            scripts.append(Script(f"p{group}", name, float(sample * (1 + group)), turns))
    return scripts


def rollout_of(script: Script, cuts: Sequence[int] = ()) -> Rollout:
    """Return the rollout of an episode; at each of the ``cuts``, a number of tokens, a separate row branches off."""
    trajectory, known = Trajectory(), ()
    for read, said in script.turns:
        start = len(known)
        trajectory.extend_to(known + read)
        trajectory.append_sampled(said)
        known += read + said.token_ids
        for cut in cuts:
            if start < cut <= len(known):
                after = known[cut] if cut < len(known) else None
                other = next(token for token in range(2, VOCAB) if token != after)
                trajectory.extend_to((*known[:cut], other, 5, 7))
    rows = trajectory.rows(script.prompt_id, script.rollout_id)
    return Rollout(script.prompt_id, script.rollout_id, rows, script.reward, StopReason.TERMINATED)


def length(script: Script) -> int:
    return sum(len(read) + len(said.token_ids) for read, said in script.turns)


def cut_anywhere(script: Script, rng: np.random.Generator) -> Rollout:
    cuts = rng.integers(1, length(script) + 1, rng.integers(1, 5))
    return rollout_of(script, sorted(set(cuts.tolist())))


def first_prompt_again(script: Script, rng: np.random.Generator) -> Rollout:
    """The episode, and rows that hold nothing but a part of what it read first."""
    size = len(script.turns[0][0])
    return rollout_of(script, sorted({1, size, int(rng.integers(1, size + 1))}))


def shuffled(rollouts: Sequence[Rollout], rng: np.random.Generator) -> list[Rollout]:
    """The rollouts in any order, groups mixed, and the rows of each in any order."""
    mixed = [rollouts[index] for index in rng.permutation(len(rollouts))]
    return [replace(each, rows=[each.rows[index] for index in rng.permutation(len(each.rows))]) for each in mixed]


def make_config(algo: dict[str, object], aggregation: str, **batch: int) -> Config:
    ranks = batch.pop("ranks", 1)
    sizes = {"tokens_per_bin": 512, "tokens_per_micro": 1024} | batch
    return validate({"algo": algo, "batch": {"aggregation": aggregation, **sizes}, "learner": {"ranks": ranks}})


def gradient(
    learner: LocalLearnerGroup, config: Config, rollouts: Sequence[Rollout], dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of all parameters, summed over the ranks' shares, as one vector."""
    groups = group_rollouts(rollouts)
    batch = packed(config, groups, rollout_advantages(make_algorithm(config.algo), groups))
    return batch_gradient(learner, batch, dtype)


def packed(config: Config, groups: RolloutGroups, advantages: dict[str, float]) -> GlobalBatch:
    """Return the batch of the only optimizer step."""
    (step,) = advantages_by_step(config, groups, advantages)
    rows = [row for each in groups.rollouts_N if each.rollout_id in step for row in each.rows]
    sizes = config.batch.model_dump(include={"tokens_per_bin", "tokens_per_micro", "aggregation"})
    return pack(rows, step, ranks=config.learner.ranks, pad_id=0, **sizes)


def batch_gradient(learner: LocalLearnerGroup, batch: GlobalBatch, dtype: torch.dtype) -> torch.Tensor:
    shares = [gradients(learner, replace(batch, micro=(share,)), dtype) for share in batch.micro]
    return sum(torch.cat([value.flatten() for value in share.values()]) for share in shares)


def distance(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy that is not far from uniform, so that few ratios are clipped, and another one to be held to."""
    made = tmp_path_factory.mktemp("metamorphic")
    policy = make_model(made / "policy", initializer_range=0.1)
    return policy, make_model(made / "reference", "llama", initializer_range=0.1)


def opened(learners: Learners, folders: tuple[Path, Path], config: Config, dtype: torch.dtype) -> LocalLearnerGroup:
    reference = folders[1] if config.algo.needs_reference else None
    learner = learners.open(folder=folders[0], algo=config.algo, reference=reference, logits_chunk=16)
    for policy in learner.rank.policies.values():
        policy.to(dtype)
    return learner


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
@pytest.mark.parametrize("aggregation", ["token_mean", "rollout_mean"])
@pytest.mark.parametrize("algo", list(_cases()), ids=_id)
def test_the_gradient_stays(algo, aggregation, dtype, learners, folders):
    config = make_config(algo, aggregation)
    learner = opened(learners, folders, config, dtype)
    for seed in range(2):
        rng = np.random.default_rng([seed, 1])
        scripts = make_scripts(seed, groups=2)
        whole = [rollout_of(script) for script in scripts]
        assert all(len(each.rows) == 1 for each in whole)
        cut = [cut_anywhere(script, rng) for script in scripts]
        assert sum(len(each.rows) for each in cut) > 1.5 * len(scripts)
        wanted = gradient(learner, config, whole, dtype)
        small = make_config(algo, aggregation, tokens_per_bin=8, tokens_per_micro=8)
        ranks = make_config(algo, aggregation, tokens_per_bin=32, tokens_per_micro=64, ranks=2)
        found = {
            "cut": gradient(learner, config, cut, dtype),
            "prefix": gradient(learner, config, [first_prompt_again(script, rng) for script in scripts], dtype),
            "order": gradient(learner, config, shuffled(whole, rng), dtype),
            "packing": gradient(learner, small, whole, dtype),
            "ranks": gradient(learner, ranks, whole, dtype),
            "all": gradient(learner, ranks, shuffled(cut, rng), dtype),
        }
        far = {name: distance(value, wanted) for name, value in found.items()}
        assert max(far.values()) < LIMITS[dtype], (seed, far)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_comparison_sees_a_token_that_is_trained_twice(dtype, learners, folders):
    config = make_config({"name": "grpo"}, "token_mean")
    learner = opened(learners, folders, config, dtype)
    scripts = make_scripts(0)
    wanted = gradient(learner, config, [rollout_of(script) for script in scripts], dtype)
    cut = rollout_of(scripts[0], [length(scripts[0]) - 1])
    row, place = next(
        (row, int(place)) for row in cut.rows for place in np.flatnonzero(row.mask_reason == MaskReason.SHARED)
    )
    row.mask[place] = 1
    assert (
        distance(gradient(learner, config, [cut, *map(rollout_of, scripts[1:])], dtype), wanted) > 100 * LIMITS[dtype]
    )


def test_a_rollout_of_many_rows_counts_once_in_its_group():
    scripts = make_scripts(3)
    config = make_config({"name": "grpo"}, "rollout_mean")
    whole = rollout_advantages(make_algorithm(config.algo), group_rollouts(rollout_of(script) for script in scripts))
    many = [rollout_of(scripts[0], range(1, length(scripts[0]) + 1)), *map(rollout_of, scripts[1:])]
    assert len(many[0].rows) > 8
    groups = group_rollouts(many)
    assert rollout_advantages(make_algorithm(config.algo), groups) == whole
    batch = packed(config, groups, whole)
    weights = dict.fromkeys(whole, 0.0)
    for micro in batch.micro[0]:
        for number, key in enumerate(micro.keys):
            weights[key.rollout_id] += float(micro.weight_R_L[micro.row_R_L == number].sum())
    weighing = [weights[name] for name, advantage in whole.items() if advantage]
    assert weighing == pytest.approx([1 / len(weighing)] * len(weighing), rel=1e-5)
