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

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from agentrl.algo.advantages import ESTIMATORS
from agentrl.algo.estimate import mean_advantages
from agentrl.algo.losses import POLICY_LOSSES
from agentrl.batch.groups import RolloutGroups, group_rollouts
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.load import validate
from agentrl.config.schema import Config
from agentrl.core.types import FinishReason, Generation, MaskReason, Rollout, StopReason, Turn
from agentrl.episode.trajectory import Trajectory
from agentrl.learner.in_process import LocalLearnerGroup
from tests.batches import training_step
from tests.unit.learner.learners import VOCAB, Learners, gradients, make_model, models

LIMITS = {torch.float64: 1e-6, torch.float32: 1e-4}
"""The largest relative difference."""
CHANGES = ({}, {"kl_coef": 0.5}, {"entropy_coef": 0.5}, {"old_logprobs": "learner"})
"""Settings of ``algo`` to test with the default estimator and loss."""

SAME_AS_OTHERS = ("gae", "hierarchical_grpo", "seat_grpo", "agent_norm", "gdpo")
"""Estimators without a case: ``gae`` needs a critic, the others give advantages in the form of ``grpo`` or ``at_grpo``."""


def _cases() -> Iterator[dict[str, object]]:
    yield from CHANGES
    wide = {"clip_low": 0.9, "clip_high": 9.0}  # so that few ratios are clipped
    for name in POLICY_LOSSES:
        yield {"loss": {"name": name, "options": wide if name.startswith("gspo") else {}}}
    yield from ({"advantage": {"name": name}} for name in ESTIMATORS if name not in SAME_AS_OTHERS)


def _id(case: dict[str, object]) -> str:
    return ",".join(f"{key}={value['name'] if isinstance(value, dict) else value}" for key, value in case.items())


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
    trajectory, known_ids = Trajectory(), ()
    for read, row in script.turns:
        start = len(known_ids)
        trajectory.extend_to(known_ids + read)
        trajectory.append_sampled(row)
        known_ids += read + row.token_ids
        for cut in cuts:
            if start < cut <= len(known_ids):
                state_after = known_ids[cut] if cut < len(known_ids) else None
                other_token = next(token for token in range(2, VOCAB) if token != state_after)
                trajectory.extend_to((*known_ids[:cut], other_token, 5, 7))
    rows = trajectory.rows(script.prompt_id, script.rollout_id)
    turns = [Turn("", "", FinishReason.STOP, script.reward / len(script.turns)) for _ in script.turns]
    return Rollout(script.prompt_id, script.rollout_id, rows, script.reward, StopReason.TERMINATED, turns=turns)


def length(script: Script) -> int:
    return sum(len(read) + len(row.token_ids) for read, row in script.turns)


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
    return [
        replace(rollout, rows=[rollout.rows[index] for index in rng.permutation(len(rollout.rows))])
        for rollout in mixed
    ]


def make_config(algo: dict[str, object], aggregation: str, **batch: int) -> Config:
    ranks = batch.pop("ranks", 1)
    sizes = {"tokens_per_micro": 1024} | batch
    return validate({"algo": algo, "batch": {"aggregation": aggregation, **sizes}, "learner": {"ranks": ranks}})


def gradient(
    learner: LocalLearnerGroup, config: Config, rollouts: Sequence[Rollout], dtype: torch.dtype
) -> torch.Tensor:
    """Return the gradient of all parameters, summed over the ranks' shares, as one vector."""
    return batch_gradient(learner, packed(config, group_rollouts(rollouts)), dtype)


def packed(config: Config, groups: RolloutGroups) -> GlobalBatch:
    """Return the batch of the only optimizer step."""
    step = training_step(config, groups)
    (optimizer_step,) = step.optimizer_steps()
    return step.policy_batch(optimizer_step)


def advantages_of(config: Config, groups: RolloutGroups) -> dict[str, float]:
    return mean_advantages(training_step(config, groups).advantages)


def batch_gradient(learner: LocalLearnerGroup, batch: GlobalBatch, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the gradients of all ranks' shares, computed one after the other by one rank."""
    rank, one_share = learner.rank, learner.rank._sequence_ratios
    of_micro = dict(zip(map(id, everything(batch).micro[0]), one_share(everything(batch)), strict=True))
    # Ranks add up what they have of a sequence; this rank computes all of it, as the sum would be.
    rank._sequence_ratios = lambda share: [of_micro[id(micro)] for micro in share.micro[0]]
    try:
        shares = [gradients(learner, replace(batch, micro=(share,)), dtype) for share in batch.micro]
    finally:
        rank._sequence_ratios = one_share
    return sum(torch.cat([value.flatten() for value in share.values()]) for share in shares)


def everything(batch: GlobalBatch) -> GlobalBatch:
    """Return the batch with all micro-batches as one share."""
    return replace(batch, micro=(tuple(micro for share in batch.micro for micro in share),))


def distance(values: torch.Tensor, expected: torch.Tensor) -> float:
    return float((values - expected).norm() / expected.norm())


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A policy that is not far from uniform, so that few ratios are clipped, and another one to be held to."""
    made = tmp_path_factory.mktemp("metamorphic")
    policy = make_model(made / "policy", initializer_range=0.1)
    return policy, make_model(made / "reference", "llama", initializer_range=0.1)


def opened(learners: Learners, folders: tuple[Path, Path], config: Config, dtype: torch.dtype) -> LocalLearnerGroup:
    reference = folders[1] if config.algo.needs_reference else None
    learner = learners.open(folder=folders[0], algo=config.algo, reference=reference, logits_chunk=16)
    for policy in models(learner):
        policy.to(dtype)
    return learner


def _long(cases: Iterable[dict[str, object]], repeated: Collection[str]) -> list[Any]:
    """Return the cases, of which those that repeat what others show are for `make test-long` only."""
    return [pytest.param(case, marks=[pytest.mark.long] if _id(case) in repeated else []) for case in cases]


REPEATED = {"loss=ppo_clip", *(f"advantage={name}" for name in ("grpo", "rloo", "maxrl", "reward"))}
"""The default loss and estimator by their names, and other estimators that give each rollout of a group one number."""
SAME_WEIGHTS = {"", "old_logprobs=learner", "loss=ppo_clip", "loss=gspo_token", "loss=dppo"}
"""Cases whose weights of tokens are those of a case with another loss."""


@pytest.mark.parametrize("algo", _long(_cases(), REPEATED), ids=_id)
def test_the_gradient_stays(algo, learners, folders):
    assert_the_gradient_stays(algo, "token_mean", torch.float64, learners, folders)


@pytest.mark.parametrize(
    "algo",
    # Weights of tokens do not depend on the estimator: with each of them in `make test-long` only.
    _long(_cases(), SAME_WEIGHTS | {_id(algo) for algo in _cases() if "advantage" in algo}),
    ids=_id,
)
def test_the_gradient_stays_where_each_rollout_counts_the_same(algo, learners, folders):
    assert_the_gradient_stays(algo, "rollout_mean", torch.float64, learners, folders)


@pytest.mark.parametrize("algo", _long(CHANGES, ("entropy_coef=0.5", "old_logprobs=learner")), ids=_id)
def test_the_gradient_stays_in_the_precision_of_training(algo, learners, folders):
    """To more digits it stays in float64, which is why that has the other cases."""
    assert_the_gradient_stays(algo, "token_mean", torch.float32, learners, folders)


@pytest.mark.long
@pytest.mark.parametrize("algo", list(_cases()), ids=_id)
def test_the_gradient_stays_for_other_episodes(algo, learners, folders):
    assert_the_gradient_stays(algo, "token_mean", torch.float64, learners, folders, seeds=(0, 1, 2), one_by_one=True)


def assert_the_gradient_stays(algo, aggregation, dtype, learners, folders, seeds=(0,), one_by_one=False):
    """Change several things at once, and also, if so requested, one after the other, which says what is wrong."""
    config = make_config(algo, aggregation)
    learner = opened(learners, folders, config, dtype)
    for seed in seeds:
        rng = np.random.default_rng([seed, 1])
        scripts = make_scripts(seed, groups=2)
        full_rollout = [rollout_of(script) for script in scripts]
        assert all(len(rollout.rows) == 1 for rollout in full_rollout)
        cut = [cut_anywhere(script, rng) for script in scripts]
        assert sum(len(rollout.rows) for rollout in cut) > 1.5 * len(scripts)
        expected = gradient(learner, config, full_rollout, dtype)
        small = make_config(algo, aggregation, tokens_per_micro=8)
        ranks = make_config(algo, aggregation, tokens_per_micro=64, ranks=2)
        prefix = [first_prompt_again(script, rng) for script in scripts]
        changes = {
            "prefix, order, packing": (small, shuffled(prefix, rng)),
            "cut, order, ranks": (ranks, shuffled(cut, rng)),
        }
        if one_by_one:
            changes |= {
                "cut": (config, cut),
                "prefix": (config, prefix),
                "order": (config, shuffled(full_rollout, rng)),
                "packing": (small, full_rollout),
                "ranks": (ranks, full_rollout),
            }
        actual = {name: gradient(learner, changed, rollouts, dtype) for name, (changed, rollouts) in changes.items()}
        far = {name: distance(value, expected) for name, value in actual.items()}
        assert max(far.values()) < LIMITS[dtype], (seed, far)


@pytest.mark.parametrize("dtype", LIMITS, ids=str)
def test_the_comparison_sees_a_token_that_is_trained_twice(dtype, learners, folders):
    config = make_config({}, "token_mean")
    learner = opened(learners, folders, config, dtype)
    scripts = make_scripts(0)
    expected = gradient(learner, config, [rollout_of(script) for script in scripts], dtype)
    cut = rollout_of(scripts[0], [length(scripts[0]) - 1])
    row, result = next(
        (row, int(result)) for row in cut.rows for result in np.flatnonzero(row.mask_reason == MaskReason.SHARED)
    )
    row.mask[result] = 1
    assert (
        distance(gradient(learner, config, [cut, *map(rollout_of, scripts[1:])], dtype), expected) > 100 * LIMITS[dtype]
    )


def test_a_rollout_of_many_rows_counts_once_in_its_group():
    scripts = make_scripts(3)
    config = make_config({}, "rollout_mean")
    full_advantages = advantages_of(config, group_rollouts(rollout_of(script) for script in scripts))
    many = [rollout_of(scripts[0], range(1, length(scripts[0]) + 1)), *map(rollout_of, scripts[1:])]
    assert len(many[0].rows) > 8
    groups = group_rollouts(many)
    assert advantages_of(config, groups) == full_advantages
    batch = packed(config, groups)
    weights = dict.fromkeys(full_advantages, 0.0)
    for micro in batch.micro[0]:
        for number, key in enumerate(micro.keys):
            weights[key.rollout_id] += float(micro.weight_L[micro.row_L == number].sum())
    weighing = [weights[name] for name, advantage in full_advantages.items() if advantage]
    assert weighing == pytest.approx([1 / len(weighing)] * len(weighing), rel=1e-5)
