"""The critic's learner: its head, values, gradients, learning and checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForTokenClassification

from agentrl.batch.groups import group_rollouts
from agentrl.batch.microbatch import GlobalBatch
from agentrl.batch.packing import pack
from agentrl.config.learner import LearnerConfig
from agentrl.config.load import validate
from agentrl.core.errors import CheckpointError, LearnerError
from agentrl.core.types import Rollout, Row, RowKey
from agentrl.learner.fsdp.rank import FsdpRank
from agentrl.learner.in_process import LocalCritic, LocalLearnerGroup
from agentrl.train.step_scores import StepScores, pack_options
from tests.algo_config import make_algo
from tests.batches import pack_rows, training_step
from tests.unit.learner.learners import VOCAB, make_model, make_rows
from tests.unit.learner.test_metamorphic import cut_anywhere, make_scripts, rollout_of, shuffled

LENGTHS = [30, 12, 44, 9, 25]


def open_critic(folder: Path, *, lr: float = 1e-2, clip: float | None = None, **learner: object) -> LocalCritic:
    optimizer = {"lr": lr, "max_grad_norm": 1e6}
    algo = make_algo(advantage={"name": "gae"}, critic={"optimizer": optimizer, "value_clip": clip})
    return LocalCritic(folder, LearnerConfig(precision="float32", device="cpu", threads=1, **learner), algo, seed=0)


@pytest.fixture
def critic(model: Path) -> Iterator[LocalCritic]:
    opened = open_critic(model)
    yield opened
    opened.close()


def constant(rows: list[Row], value: float) -> dict[RowKey, np.ndarray]:
    return {row.key: np.full(len(row.mask), value, np.float32) for row in rows}


def value_batch(rows: list[Row], returns: dict[RowKey, np.ndarray], **sizes: int) -> GlobalBatch:
    sizes = {"data_parallel_size": 1, "tokens_per_micro": 128, "pad_id": 0} | sizes
    return pack_rows(rows, kind="value", returns=returns, values=constant(rows, 0.0), **sizes)  # type: ignore[arg-type]


def rank_of(critic: LocalCritic) -> FsdpRank:
    assert isinstance(critic.rank, FsdpRank)
    return critic.rank


def spread_head(critic: LocalCritic) -> None:
    """Give the head weights that are not 0, so that values and the gradient of all weights are not."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in rank_of(critic).model.head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))


def test_a_new_head_gives_every_state_a_value_of_zero(critic):
    rows = make_rows(LENGTHS)
    values = critic.values(value_batch(rows, constant(rows, 0.0)))
    assert {key: row.shape for key, row in values.items()} == {row.key: row.mask.shape for row in rows}
    assert not any(row.any() for row in values.values())


def test_a_value_is_of_the_state_before_its_token(critic, tmp_path):
    """It is what the saved token classifier says one position earlier, so what follows does not change it."""
    spread_head(critic)
    [row] = make_rows([20])
    batch = value_batch([row], constant([row], 0.0))
    values = critic.values(batch)[row.key]
    critic.save(tmp_path / "critic")
    critic.finish_save()
    saved = AutoModelForTokenClassification.from_pretrained(tmp_path / "critic" / "model")
    with torch.no_grad():
        alone = saved.eval()(input_ids=torch.from_numpy(row.token_ids)[None].long()).logits[0, :, 0]
    assert np.allclose(values[1:], alone[:-1].numpy(), atol=1e-4)
    assert values[0] == 0
    row.token_ids[12] = (row.token_ids[12] + 1) % VOCAB
    changed = critic.values(value_batch([row], constant([row], 0.0)))[row.key]
    assert (changed[:13] == values[:13]).all()
    assert changed[13] != values[13]


def gradient(critic: LocalCritic, batch: GlobalBatch) -> torch.Tensor:
    rank, norms = rank_of(critic), []

    def keep(lr_scale: float) -> dict[str, float]:
        norms.append(torch.cat([p.grad.flatten().clone() for p in rank.model.hf.parameters()]))
        return {}

    rank._update = keep  # type: ignore[method-assign]
    for share in batch.micro:
        critic.train_step(GlobalBatch((share,), "value", sequence_sizes=batch.sequence_sizes))
    return torch.stack(norms).sum(0)


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float64, 1e-6), (torch.float32, 1e-4)], ids=str)
def test_the_gradient_does_not_depend_on_packing_order_shares_or_chunks(critic, dtype, limit):
    rank_of(critic).model.to(dtype)
    spread_head(critic)
    rows, rng = make_rows(LENGTHS), np.random.default_rng(0)
    returns = {row.key: rng.normal(size=len(row.mask)).astype(np.float32) for row in rows}
    expected = gradient(critic, value_batch(rows, returns))
    actual = {
        "packing": gradient(critic, value_batch(rows, returns, tokens_per_micro=8)),
        "order": gradient(critic, value_batch(rows[::-1], returns)),
        "shares": gradient(critic, value_batch(rows, returns, data_parallel_size=2, tokens_per_micro=64)),
    }
    rank_of(critic).model.logits_chunk = 3
    actual["chunks"] = gradient(critic, value_batch(rows, returns))
    far = {name: float((one - expected).norm() / expected.norm()) for name, one in actual.items()}
    assert max(far.values()) < limit, far


def test_the_gradient_does_not_depend_on_how_rollouts_are_cut_into_rows(critic):
    """Values, returns and batches are the driver's own, of episodes that branch anywhere."""
    rank_of(critic).model.to(torch.float64)
    spread_head(critic)
    config = validate({"algo": {"advantage": {"name": "gae", "options": {"lam": 0.5}}}})
    scripts, rng = make_scripts(1, groups=2), np.random.default_rng(5)

    def of(rollouts: list[Rollout]) -> torch.Tensor:
        groups = group_rollouts(rollouts)
        scores = StepScores(values=critic.values(pack(groups.rows, pack_options(config, 0))))
        [batch] = training_step(config, groups, scores).value_batches()
        return gradient(critic, batch)

    full_rollout = [rollout_of(script) for script in scripts]
    expected, actual = of(full_rollout), of(shuffled([cut_anywhere(script, rng) for script in scripts], rng))
    assert (actual - expected).norm() < 1e-6 * expected.norm()


def test_it_learns_a_constant_and_then_the_last_token(critic):
    rows = make_rows(LENGTHS)
    state_before = {row.key: np.roll(row.token_ids, 1) for row in rows}
    steps = {
        "constant": constant(rows, 0.7),
        "state": {key: np.where(ids < VOCAB // 2, 1.0, -1.0).astype(np.float32) for key, ids in state_before.items()},
    }
    for returns in steps.values():
        batch = value_batch(rows, returns)
        losses = [critic.train_step(batch)["train/loss"] for _ in range(30)]
        assert losses[-1] < 0.02, losses
    values = critic.values(batch)
    for row in rows:
        is_sampled = row.mask.astype(bool)
        assert (np.sign(values[row.key]) == steps["state"][row.key])[is_sampled].all()


def test_clipping_stops_a_value_that_has_moved_far_enough(model):
    critic = open_critic(model, clip=0.1, lr=3e-3)
    try:
        rows = make_rows(LENGTHS)
        batch = value_batch(rows, constant(rows, 5.0))
        shares = [critic.train_step(batch)["train/clip_fraction"] for _ in range(22)]
        values = critic.values(batch)
    finally:
        critic.close()
    assert (shares[0], shares[-1]) == (0, pytest.approx(1, abs=0.05))
    trained = np.concatenate([values[row.key][row.mask.astype(bool)] for row in rows])
    assert trained.mean() < 1, "far from the returns of 5"


def test_a_saved_critic_goes_on_bit_for_bit(model, tmp_path):
    rows = make_rows(LENGTHS)
    batch = value_batch(rows, constant(rows, 1.0))
    critic = open_critic(model)
    try:
        critic.train_step(batch)
        critic.save(tmp_path / "critic")
        critic.finish_save()
        expected = [critic.train_step(batch), critic.train_step(batch)]
        values = critic.values(batch)
    finally:
        critic.close()
    critic = open_critic(tmp_path / "critic" / "model")
    try:
        assert any(row.any() for row in critic.values(batch).values()), "the head was read too"
        critic.load(tmp_path / "critic")
        assert [critic.train_step(batch), critic.train_step(batch)] == expected
        again = critic.values(batch)
        assert all((again[key] == row).all() for key, row in values.items())
        with pytest.raises(CheckpointError, match="learner"):
            critic.load(tmp_path)
        rank_of(critic).config.optimizer.name = "muon"
        with pytest.raises(CheckpointError, match=r"'adamw', this run has 'muon' \(algo\.critic\.optimizer\.name\)"):
            critic.load(tmp_path / "critic")
    finally:
        critic.close()


def test_it_shares_the_process_with_the_policy_and_changes_nothing_of_it(model):
    config = LearnerConfig(precision="float32", device="cpu", threads=1)
    policy = LocalLearnerGroup(model, config, make_algo(), seed=0)
    critic = open_critic(model)
    try:
        rows = make_rows(LENGTHS)
        batch = value_batch(rows, constant(rows, 1.0))
        logprobs_before = policy.logprobs(batch)
        critic.train_step(batch)
        logprobs_after = policy.logprobs(batch)
        assert all((logprobs_after[key] == row).all() for key, row in logprobs_before.items())
        with pytest.raises(LearnerError, match="'critic'"):
            policy.rank.values(batch)
        critic.sleep()
        with pytest.raises(LearnerError, match="sleeps"):
            critic.values(batch)
        critic.wake()
        critic.close()
        policy.train_step(
            pack_rows(
                rows, {row.key.rollout_id: 1.0 for row in rows}, data_parallel_size=1, tokens_per_micro=64, pad_id=0
            )
        )
    finally:
        policy.close()


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_heads_of_other_architectures(family, tmp_path):
    critic = open_critic(make_model(tmp_path, family))
    try:
        rows = make_rows([12, 9])
        batch = value_batch(rows, constant(rows, 0.3))
        losses = [critic.train_step(batch)["train/loss"] for _ in range(3)]
        assert losses[-1] < losses[0]
    finally:
        critic.close()
