"""Critics of models that read images: values of transformers with a head, gradients of the tower, checkpoints, memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import RowSignals, pack
from agentrl.config.load import validate
from agentrl.core.errors import CheckpointError, LearnerError
from agentrl.core.types import Rollout, Row, RowKey, StopReason
from agentrl.learner.in_process import LocalCritic
from agentrl.learner.memory import LearnerMemory
from agentrl.models.load import load_value_model
from agentrl.planner.training_summary import critic_estimator, memory_options
from agentrl.train.step_scores import StepScores
from agentrl.train.training_step import TrainingStep
from tests.batches import training_step
from tests.unit.learner.image_rows import IMAGES, TOWERS, episodes, folder, own_values, picture, without_sampled_pads
from tests.unit.learner.learners import make_model
from tests.unit.learner.test_critic import constant, open_critic, rank_of, spread_head, value_batch
from tests.vision_folders import FAMILIES

FAMILY = pytest.mark.parametrize("family", FAMILIES)
LORA = {"lora": {"rank": 2, "alpha": 4}}


@contextmanager
def opened(path: Path, **options: object) -> Iterator[LocalCritic]:
    critic = open_critic(path, **options)
    try:
        yield critic
    finally:
        critic.close()


def make_batch(rows: list[Row], returns: float = 1.0, **sizes: int) -> GlobalBatch:
    return value_batch(rows, constant(rows, returns), images=IMAGES, **{"tokens_per_micro": 4096} | sizes)


def weights(critic: LocalCritic) -> dict[str, torch.Tensor]:
    return {name: weight.detach().clone() for name, weight in rank_of(critic).model.hf.named_parameters()}


def is_of_tower(family: str, name: str) -> bool:
    return TOWERS[family].strip("*.") in name


@FAMILY
def test_values_are_those_of_transformers_with_the_head_however_rows_are_packed(family: str) -> None:
    rows = without_sampled_pads(family, episodes(family))
    with opened(folder(family)) as critic:
        spread_head(critic)
        head = rank_of(critic).model.head
        expected = own_values(family, rows, head.weight.detach(), head.bias.detach())
        batches = {
            "together": make_batch(rows),
            "shared prefixes": make_batch(rows, share_prefixes=True),
            "alone": make_batch(rows, tokens_per_micro=8),
            "other order": make_batch(rows[::-1]),
        }
        assert batches["shared prefixes"].micro[0][0].shares_prefixes
        for name, batch in batches.items():
            values = critic.values(batch)
            assert values.keys() == expected.keys()
            for key, row_values in values.items():
                np.testing.assert_allclose(row_values, expected[key], atol=1e-4, err_msg=name)
        spans = tuple(replace(span, digest=picture(7).digest) for span in rows[3].images)
        [other_values] = critic.values(make_batch([replace(rows[3], images=spans)])).values()
        assert np.abs(other_values - expected[rows[3].key]).max() > 1e-2, "images make no difference"


@pytest.mark.parametrize("family", ["qwen2.5-vl", "smolvlm"])
def test_the_tower_is_trained_unless_that_of_the_policy_is_frozen(family: str) -> None:
    """Patterns of ``learner.freeze`` for other weights are the policy's alone; adapters are of the policy's text part."""
    rows = episodes(family)
    changed = {}
    for case, options in {
        "trained": {},
        "frozen": {"freeze": [TOWERS[family], "*embed_tokens*"]},
        "LoRA": LORA,
    }.items():
        with opened(folder(family), **options) as critic:
            spread_head(critic)
            before = weights(critic)
            assert critic.train_step(make_batch(rows))["train/grad_norm"] > 0
            changed[case] = {name for name, weight in weights(critic).items() if not torch.equal(weight, before[name])}
    tower = {name for name in changed["trained"] if is_of_tower(family, name)}
    assert any("patch_embed" in name for name in tower)
    assert changed["frozen"] == changed["trained"] - tower
    of_text = {name for name in changed["trained"] if ".language_model." in name or ".text_model." in name}
    assert changed["LoRA"] == of_text | {"score.weight", "score.bias"}


def test_the_gradient_does_not_depend_on_packing_or_order() -> None:
    rows = episodes("qwen3-vl")
    with opened(folder("qwen3-vl")) as critic:
        spread_head(critic)
        rank = rank_of(critic)
        gradients: dict[str, torch.Tensor] = {}

        def keep(lr_scale: float) -> dict[str, float]:
            for name, weight in rank.model.hf.named_parameters():
                gradients[name] = weight.grad.clone()
            return {}

        rank._update = keep  # type: ignore[method-assign]
        critic.train_step(make_batch(rows))
        expected = dict(gradients)
        assert any(is_of_tower("qwen3-vl", name) and gradient.any() for name, gradient in expected.items())
        for batch in (
            make_batch(rows, share_prefixes=True),
            make_batch(rows, tokens_per_micro=8),
            make_batch(rows[::-1]),
        ):
            critic.train_step(batch)
            for name, gradient in expected.items():
                scale = max(float(gradient.abs().max()), 1e-3)
                torch.testing.assert_close(gradients[name] / scale, gradient / scale, atol=2e-4, rtol=0)


def test_a_step_of_ppo_moves_values_towards_rewards_that_depend_on_the_picture() -> None:
    """Rollouts of one text and two pictures: the critic learns which of them is answered right."""
    family = "qwen2.5-vl"
    row = episodes(family)[3]
    config = validate({"algo": {"advantage": {"name": "gae"}}, "batch": {"tokens_per_micro": 4096}})
    rewards = {"right": (1.0, picture(1)), "wrong": (0.0, picture(7))}
    rollouts = [
        Rollout(
            "p",
            name,
            [
                replace(
                    row,
                    key=RowKey("p", name),
                    images=tuple(replace(span, digest=image.digest) for span in row.images),
                )
            ],
            reward,
            StopReason.TERMINATED,
            images={image.digest: image},
        )
        for name, (reward, image) in rewards.items()
    ]
    with opened(folder(family), lr=3e-3) as critic:
        gaps = []
        for _ in range(12):
            step = training_step(config, rollouts)
            values = critic.values(step_values_batch(step))
            gaps.append(values[RowKey("p", "right")][-1] - values[RowKey("p", "wrong")][-1])
            [batch] = training_step(config, rollouts, StepScores(values=values)).value_batches()
            critic.train_step(batch)
    assert gaps[0] == 0
    assert gaps[-1] > 0.5, gaps


def step_values_batch(step: TrainingStep) -> GlobalBatch:
    return pack(step.groups.rows, step.settings.packing, RowSignals(images=step.groups.images))


def test_a_critic_resumes_bit_for_bit_and_sleeps(tmp_path: Path) -> None:
    batch = make_batch(episodes("qwen2.5-vl"))
    with opened(folder("qwen2.5-vl"), freeze=["*.visual.blocks.*"]) as critic:
        critic.train_step(batch)
        critic.save(tmp_path / "critic")
        critic.finish_save()
        expected = [critic.train_step(batch), critic.train_step(batch)]
        values = critic.values(batch)
        critic.sleep()
        with pytest.raises(LearnerError, match="sleeps"):
            critic.values(batch)
        critic.wake()
        assert all(np.array_equal(critic.values(batch)[key], row_values) for key, row_values in values.items())
    saved = tmp_path / "critic" / "model"
    assert load_value_model(saved).score.weight.any()
    with opened(saved, freeze=["*.visual.blocks.*"]) as critic:
        assert any(row_values.any() for row_values in critic.values(batch).values()), (
            "its folder has head and processor"
        )
    with opened(folder("qwen2.5-vl"), freeze=["*.visual.blocks.*"]) as critic:
        critic.load(tmp_path / "critic")
        assert [critic.train_step(batch), critic.train_step(batch)] == expected
        assert all(np.array_equal(critic.values(batch)[key], row_values) for key, row_values in values.items())
    with opened(folder("qwen2.5-vl")) as critic, pytest.raises(CheckpointError, match=r"visual.*\(learner\.freeze\)"):
        critic.load(tmp_path / "critic")


def test_a_critic_that_reads_no_images_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, vocab_size=400)
    message = r"reads none; set algo\.critic\.path to a vision-language model"
    with opened(tmp_path) as critic, pytest.raises(LearnerError, match=message):
        critic.values(make_batch(episodes("qwen2.5-vl")))


@pytest.mark.parametrize("family", ["qwen3-vl", "smolvlm"])
def test_memory_is_that_of_a_policy_with_one_logit_and_less_if_the_tower_is_frozen(family: str) -> None:
    def estimate(**learner: object) -> LearnerMemory:
        config = validate({"learner": {"device": "cpu", **learner}, "algo": {"advantage": {"name": "gae"}}})
        return critic_estimator(config, folder(family))(config, memory_options(config, folder(family)))

    with opened(folder(family)) as critic:
        numbers = {name: weight.numel() for name, weight in weights(critic).items()}
    trained, frozen, adapted = estimate(), estimate(freeze=[TOWERS[family], "*embed*"]), estimate(**LORA)
    assert trained.weights == frozen.weights == adapted.weights == 4 * sum(numbers.values())
    tower = sum(number for name, number in numbers.items() if is_of_tower(family, name))
    assert trained.optimizer == 8 * sum(numbers.values())
    assert trained.optimizer - frozen.optimizer == 8 * tower
    assert frozen.total < trained.total
    assert adapted.optimizer <= frozen.optimizer
