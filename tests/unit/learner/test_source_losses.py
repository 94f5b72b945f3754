"""A batch of two sources with two algorithms: its loss and gradient are those of the sources alone."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.batch_loss import BatchLoss, make_objective
from agentrl.algo.losses.gspo import Gspo
from agentrl.batch.groups import group_rollouts
from agentrl.batch.packing import pack
from agentrl.config.load import validate
from agentrl.config.schema import Config
from agentrl.core.types import Rollout
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.train.step_scores import pack_options
from tests.batches import training_step
from tests.unit.learner.learners import Learners, make_model
from tests.unit.learner.test_metamorphic import (
    Script,
    batch_gradient,
    cut_anywhere,
    distance,
    gradient,
    make_scripts,
    opened,
    packed,
    rollout_of,
    shuffled,
)

WIDE = {"clip_low": 0.9, "clip_high": 9.0}
ALGORITHMS = {
    "a": {"advantage": {"name": "grpo"}, "loss": {"name": "gspo", "options": WIDE}},
    "b": {"advantage": {"name": "reinforce_plus_plus"}, "loss": {"name": "cispo"}},
}
"""By source."""


def config(aggregation: str, sources: dict[str, object], **batch: int) -> Config:
    ranks = batch.pop("ranks", 1)
    sizes = {"tokens_per_micro": 1024} | batch
    tree = {"batch": {"aggregation": aggregation, **sizes}, "learner": {"ranks": ranks}, "algo": {"kl_coef": 0.1}}
    return validate(tree | {"sources": {name: {"algo": algo} for name, algo in sources.items()}})


def scripts() -> list[Script]:
    """Two groups of each source, the second source with more samples."""
    scripts = []
    for name, samples in (("a", 2), ("b", 3)):
        for script in make_scripts(ord(name), groups=2, samples=samples):
            scripts.append(
                replace(script, prompt_id=f"{name}/{script.prompt_id}", rollout_id=f"{name}/{script.rollout_id}")
            )
    return scripts


def count(rollouts: list[Rollout], aggregation: str) -> int:
    """What the loss of these rollouts alone is divided by."""
    if aggregation == "rollout_mean":
        return len(rollouts)
    return sum(int(row.mask.sum()) for rollout in rollouts for row in rollout.rows)


def use(learner: LocalLearnerGroup, run_config: Config) -> None:
    """Let the learner compute another loss."""
    learner.rank.loss = BatchLoss(run_config.algo, learner.rank.device)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    made = tmp_path_factory.mktemp("sources")
    policy = make_model(made / "policy", initializer_range=0.1)
    return policy, make_model(made / "reference", "llama", initializer_range=0.1)


@pytest.mark.parametrize("aggregation", ["token_mean", "rollout_mean"])
def test_a_mixed_batch_has_the_gradient_of_its_sources(aggregation, learners, folders):
    mixed = config(aggregation, ALGORITHMS)
    learner = opened(learners, folders, mixed, torch.float64)
    assert len(learner.rank.loss.objective.policy_losses) == 2
    rng = np.random.default_rng(0)
    full_rollout = [rollout_of(script) for script in scripts()]
    expected = torch.zeros(())
    for name, algo in ALGORITHMS.items():
        alone = [rollout for rollout in full_rollout if rollout.prompt_id.startswith(name)]
        alone_config = validate(config(aggregation, {}).model_dump() | {"algo": algo | {"kl_coef": 0.1}})
        use(learner, alone_config)
        share = count(alone, aggregation) / count(full_rollout, aggregation)
        expected = expected + share * gradient(learner, alone_config, alone, torch.float64)
    use(learner, mixed)
    small, ranks = (config(aggregation, ALGORITHMS, **sizes) for sizes in ({"tokens_per_micro": 8}, {"ranks": 2}))
    actual = {
        "one batch": gradient(learner, mixed, full_rollout, torch.float64),
        "a row a micro-batch, sequences divided": gradient(
            learner, small, [cut_anywhere(script, rng) for script in scripts()], torch.float64
        ),
        "ranks": gradient(learner, ranks, shuffled(full_rollout, rng), torch.float64),
    }
    far = {name: distance(value, expected) for name, value in actual.items()}
    assert max(far.values()) < 1e-6, far


def test_each_loss_is_called_with_the_tokens_of_its_source(learners: Learners, folders: tuple[Path, Path]) -> None:
    """Where one loss is not finite, the other source's gradient still is."""
    mixed = config("token_mean", ALGORITHMS)
    learner = opened(learners, folders, mixed, torch.float64)
    losses, sizes = learner.rank.loss.objective.policy_losses, []

    class Watched(Gspo):
        def token_loss(self, logprobs_N, old_N, inputs):
            sizes.append((len(logprobs_N), len(old_N), len(inputs.advantages_N), len(inputs.sequence_N)))
            return losses[1].token_loss(logprobs_N, old_N, inputs)

    learner.rank.loss.objective.policy_losses = [losses[0], Watched()]
    groups = group_rollouts([rollout_of(script) for script in scripts()])
    batch_gradient(learner, packed(mixed, groups), torch.float64)
    of_b = sum(int(row.mask.sum()) for row in groups.rows if row.key.prompt_id.startswith("b/"))
    assert sizes == [(of_b,) * 4]


def test_a_loss_sees_the_sequences_of_its_micro_batch_alone() -> None:
    """Else each micro-batch would take as long as the batch is large."""
    small = config("token_mean", {}, tokens_per_micro=8)
    step = training_step(small, group_rollouts([rollout_of(script) for script in scripts()]))
    batch, loss, counts = step.policy_batch(step.optimizer_steps()[0]), BatchLoss(small.algo, torch.device("cpu")), []

    class Watched(Gspo):
        def token_loss(self, logprobs_N, old_N, inputs):
            counts.append(inputs.sequences)
            return super().token_loss(logprobs_N, old_N, inputs)

    loss.objective.policy_losses = [Watched()]
    for micro in batch.micro[0]:
        at_N = micro.mask_L.nonzero()[:, 0]
        logprobs_N = micro.logprobs_L[at_N]
        loss(batch, micro, at_N, (logprobs_N, None, None), reference_N=logprobs_N)
    assert counts == [len({*micro.sequences}) for micro in batch.micro[0]]
    assert sum(counts) < len(counts) * len(batch.sequence_sizes)


def test_sources_with_one_loss_are_one_call() -> None:
    same = {name: algo | {"loss": {"name": "cispo"}} for name, algo in ALGORITHMS.items()}
    assert len(make_objective(config("token_mean", same).algo).policy_losses) == 1


def test_rows_have_the_numbers_of_their_sources() -> None:
    mixed = config("token_mean", ALGORITHMS, tokens_per_micro=8)
    groups = group_rollouts([rollout_of(script) for script in scripts()])
    step = training_step(mixed, groups)
    (optimizer_step,) = step.optimizer_steps()
    batch = step.policy_batch(optimizer_step)
    for micro in batch.micro[0]:
        assert micro.sources == tuple("ab".index(key.prompt_id[0]) for key in micro.keys)
    plain = pack(step.rows(optimizer_step.counted), pack_options(config("token_mean", {}), 0), step.signals)
    assert all(micro.sources == () for micro in plain.micro[0])
