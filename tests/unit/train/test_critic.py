"""PPO in the training loop: a real policy and critic in this process, on recorded rollouts."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.algo.estimate import RowAdvantages
from agentrl.algo.registry import algorithm_faults
from agentrl.batch.groups import group_rollouts
from agentrl.config.load import load_config
from agentrl.config.schema import Config
from agentrl.core.types import Rollout, RowKey, StopReason
from agentrl.learner.checkpoints import CRITIC, Checkpoints
from agentrl.learner.in_process import LocalCritic, LocalLearnerGroup
from agentrl.train.rollout_source import TaskPosition
from agentrl.train.step_metrics import value_metrics
from agentrl.train.step_scores import StepScores
from agentrl.train.trainer import Trainer
from tests.batches import step_settings, training_step
from tests.unit.learner.learners import make_model, make_rows, tensors
from tests.unit.train.test_trainer import steps, trainer

PPO = (
    "algo.advantage.name=gae",
    "algo.critic.optimizer.lr=0.01",
    "rollout.batch_size=2",
    "rollout.n_samples_per_prompt=2",
    "learner.device=cpu",
    "learner.threads=1",
    "train.save_every=0",
    "train.eval_first=false",
)


def config(*settings: str) -> Config:
    return load_config(None, [*PPO, *settings])


def rollouts(count: int = 12) -> list[Rollout]:
    """Groups of two, whose rewards differ in most of them."""
    rollouts = []
    for number, row in enumerate(make_rows([10 + 3 * number for number in range(count)])):
        key = RowKey(f"p{number // 2:02}", f"r{number}")
        rollouts.append(
            Rollout(key.prompt_id, key.rollout_id, [replace(row, key=key)], number % 3 / 2, StopReason.TERMINATED)
        )
    return rollouts


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("models") / "policy", initializer_range=0.1)


@contextmanager
def opened(folder: Path, run_config: Config, model: Path, checkpoint: Path | None = None) -> Iterator[Trainer]:
    """A trainer of three recorded steps, going on from a checkpoint if one is given."""
    learner = LocalLearnerGroup(
        model if checkpoint is None else checkpoint / "model", run_config.learner, run_config.algo, seed=0
    )
    start = model if checkpoint is None else checkpoint / CRITIC / "model"
    critic = LocalCritic(start, run_config.learner, run_config.algo, seed=0)
    try:
        folder.mkdir(exist_ok=True)
        run = trainer(folder, run_config, learner, rollouts=rollouts())  # type: ignore[arg-type]
        run.steps.critic = critic
        if checkpoint is not None:
            learner.load(checkpoint)
            critic.load(checkpoint / CRITIC)
        yield run
    finally:
        critic.close()
        learner.close()


def test_warm_up_trains_the_critic_alone(model: Path, tmp_path: Path) -> None:
    run_config = config("algo.critic.warmup_steps=2")
    with opened(tmp_path, run_config, model) as run:
        assert isinstance(run.steps.learner, LocalLearnerGroup)
        assert isinstance(run.steps.critic, LocalCritic)
        tensors_before = tensors(run.steps.learner)
        critics = [bytes(value.numpy().tobytes()) for value in values_of(run)]

        async def two_steps() -> None:
            await run._step()
            await run._step()

        asyncio.run(two_steps())
        tensors_after = tensors(run.steps.learner)
        assert all(torch.equal(tensors_after[name], value) for name, value in tensors_before.items())
        assert [value.numpy().tobytes() for value in values_of(run)] != critics
        asyncio.run(run._step())
        assert not all(torch.equal(value, tensors_before[name]) for name, value in tensors(run.steps.learner).items())
    first, second, third = steps(tmp_path)
    for row in (first, second):
        assert "train/loss" not in row
        assert "train/skipped" not in row
        assert row["train/value_loss"] > 0
        assert row["train/value_lr"] == 0.01
    assert "train/value_explained_variance" in first
    assert {"train/loss", "train/grad_norm", "train/value_grad_norm", "train/value_clip_fraction"} <= third.keys()


def values_of(run: Trainer) -> list[torch.Tensor]:
    critic = run.steps.critic
    assert isinstance(critic, LocalCritic)
    return [parameter.detach().clone() for parameter in critic.rank.model.hf.parameters()]


def test_a_run_that_goes_on_equals_one_that_was_not_ended(model: Path, tmp_path: Path) -> None:
    run_config = config("train.steps_per_rollout=2")

    async def step_and_save(run: Trainer) -> None:
        await run._step()
        await run._save()
        await run._finish_save()

    with opened(tmp_path / "straight", run_config, model) as run:
        asyncio.run(step_and_save(run))
        asyncio.run(run._step())
        assert isinstance(run.steps.learner, LocalLearnerGroup)
        expected, critics = tensors(run.steps.learner), values_of(run)
    checkpoint = tmp_path / "straight" / "run" / "checkpoints" / "step_000001"
    with opened(tmp_path / "again", run_config, model, checkpoint) as run:
        run.step, run.position = 1, TaskPosition(2)
        asyncio.run(run._step())
        assert isinstance(run.steps.learner, LocalLearnerGroup)
        again = tensors(run.steps.learner)
        assert all(torch.equal(again[name], value) for name, value in expected.items())
        assert all(map(torch.equal, values_of(run), critics))
    names = ["train/loss", "train/value_loss", "train/value_explained_variance"]
    straight, state_after = steps(tmp_path / "straight")[1], steps(tmp_path / "again")[0]
    assert [state_after[name] for name in names] == [straight[name] for name in names]


def test_returns_and_batches_are_of_all_rollouts() -> None:
    """Also of those without an advantage; the reward arrives at the last sampled token."""
    run_config = config("train.steps_per_rollout=2", "algo.advantage.options={lam: 1.0, normalise: false}")
    assert step_settings(run_config).needs_scores
    groups = group_rollouts(rollouts(4))
    values = {row.key: np.full(len(row.mask), 0.5, np.float32) for row in groups.rows}
    scores = StepScores(values=values)
    advantages: RowAdvantages = training_step(run_config, groups, scores).advantages
    returns = training_step(run_config, groups, scores).returns
    for rollout in groups.rollouts_N:
        [row] = rollout.rows
        is_sampled = row.mask.astype(bool)
        assert advantages[row.key][is_sampled] == pytest.approx(rollout.reward - 0.5)
        assert returns[row.key][is_sampled] == pytest.approx(rollout.reward)
    batches = training_step(run_config, groups, scores).value_batches()
    assert [{key.rollout_id for micro in batch.micro[0] for key in micro.keys} for batch in batches] == [
        {"r0", "r1"},
        {"r2", "r3"},
    ]
    actual_value_metrics = value_metrics(
        [{"train/loss": 2.0, "train/trained_tokens": 9.0}, {"train/loss": 4.0}], groups, scores.values, returns
    )
    assert actual_value_metrics == {
        "train/value_loss": 3.0,
        "train/value_explained_variance": pytest.approx(0, abs=1e-6),
    }
    exact = value_metrics([], groups, returns, returns)
    assert exact == {"train/value_explained_variance": 1.0}


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (["algo.critic.warmup_steps=2"], r"algo\.critic\.warmup_steps is set, and algo\.advantage\.name=grpo"),
        (["algo.critic.optimizer.lr=1e-4"], r"algo\.critic\.optimizer\.lr is set.*algo\.advantage\.name=gae"),
        (
            ["algo.advantage.name=gae", "algo.critic.warmup_steps=5", "train.steps=5"],
            r"warmup_steps=5 with train\.steps=5",
        ),
    ],
)
def test_settings_that_would_be_ignored_are_refused(settings: list[str], words: str) -> None:
    [fault] = algorithm_faults(load_config(None, settings))
    assert re.search(words, fault)


def test_a_failing_critic_leaves_no_checkpoint(tmp_path: Path) -> None:
    class Saved:
        def save(self, folder: Path) -> None:
            (folder / "model").mkdir(parents=True)

        def finish_save(self) -> None:
            pass

    class Full(Saved):
        def save(self, folder: Path) -> None:
            raise OSError("no space")

    checkpoints = Checkpoints(tmp_path, keep=2)
    with pytest.raises(OSError, match="no space"):
        checkpoints.save(1, Saved(), {}, Full())  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []
