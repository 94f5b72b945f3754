"""Losses against those of TRL's `GRPOTrainer`, which computes them from its inputs once it has log-probabilities."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from agentrl.algo.batch_loss import make_objective
from tests.algo_config import make_algo
from tests.unit.algo.test_losses import Tokens, make_tokens

LONGEST = 77
WIDE = {"clip_low": 0.05, "clip_high": 0.1}
CASES = {
    "ppo_clip": ({"name": "ppo_clip"}, {}),
    "clip-higher": ({"name": "ppo_clip", "options": {"clip_high": 0.28}}, {"epsilon_high": 0.28}),
    "dual clip": ({"name": "ppo_clip", "options": {"dual_clip": 1.5}}, {"delta": 1.5}),
    "gspo": (
        {"name": "gspo", "options": WIDE},
        {"importance_sampling_level": "sequence", "epsilon_low": 0.05, "epsilon_high": 0.1},
    ),
    "cispo": ({"name": "cispo", "options": {"clip_high": 0.3}}, {"epsilon_high": 1.3}),
}


class Trainer:
    """What `GRPOTrainer._compute_loss` uses of itself, with log-probabilities that are given."""

    def __init__(self, new_B_T: torch.Tensor, settings: dict[str, object], beta: float) -> None:
        values = {"loss_type": "grpo", "importance_sampling_level": "token", "epsilon_low": 0.2, "epsilon_high": 0.2}
        self.__dict__ |= values | {name: value for name, value in settings.items() if name != "delta"}
        self.beta, self.new_B_T, self.max_completion_length = beta, new_B_T, LONGEST
        self.args = SimpleNamespace(delta=settings.get("delta"), use_bias_correction_kl=False)
        self.model = SimpleNamespace(training=False)
        self.accelerator = SimpleNamespace(
            num_processes=1, reduce=lambda value, reduction: value, gather=lambda value: value
        )
        self.use_vllm = self.vllm_importance_sampling_correction = True
        self.top_entropy_quantile, self.off_policy_mask_threshold = 1.0, None
        self.aux_loss_enabled = self._entropy_bonus_enabled = False
        self._metrics = {"eval": defaultdict(list)}

    def _get_per_token_logps_and_entropies(self, *_: object, **__: object) -> tuple[torch.Tensor, torch.Tensor, None]:
        return self.new_B_T, torch.zeros_like(self.new_B_T), None


def padded(tokens: Tokens, *values: np.ndarray) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the mask and the values as ``[B, T]``, a row a sequence, with observed tokens in between."""
    names = np.unique(tokens.numbers)
    longest = max((tokens.numbers == name).sum() for name in names)
    mask_B_T = torch.zeros(len(names), 2 * longest, dtype=torch.float64)
    actual_values = [torch.zeros_like(mask_B_T) for _ in values]
    for row, name in enumerate(names):
        chosen = tokens.numbers == name
        mask_B_T[row, 1 : 2 * chosen.sum() : 2] = 1
        for into, value in zip(actual_values, values, strict=True):
            into[row, 1 : 2 * chosen.sum() : 2] = torch.from_numpy(value[chosen])
    return mask_B_T, actual_values


def weights_of(tokens: Tokens, loss_type: str) -> np.ndarray:
    sizes = np.bincount(tokens.numbers)[tokens.numbers]
    sequences, every = len(np.unique(tokens.numbers)), np.ones(len(sizes))
    return {
        "grpo": every / (sequences * sizes),
        "bnpo": every / len(sizes),
        "dapo": every / len(sizes),
        "cispo": every / len(sizes),
        "dr_grpo": every / (sequences * LONGEST),
    }[loss_type]


@pytest.mark.parametrize(
    ("case", "loss_type"),
    [
        *itertools.product(["ppo_clip", "clip-higher", "dual clip", "gspo"], ["grpo", "bnpo", "dapo", "dr_grpo"]),
        ("cispo", "cispo"),
    ],
)
def test_losses_and_gradients_are_those_of_trl(case, loss_type):
    # Its import takes seconds, and every process that shares the tests collects this file.
    from trl.trainer.grpo_trainer import GRPOTrainer

    loss, settings = CASES[case]
    settings = {"loss_type": loss_type} | settings
    for seed in range(2):
        tokens, rng = make_tokens(seed), np.random.default_rng(seed)
        one_each = rng.normal(size=12)[tokens.numbers]  # TRL has one advantage a sequence
        tokens = replace(tokens, advantages=one_each, weights=weights_of(tokens, loss_type))
        against, correction = tokens.new + rng.normal(0, 1, len(one_each)), rng.random(len(one_each)) * 2
        if (
            case == "gspo"
        ):  # TRL multiplies the sequence's loss, of which every token has the whole, with each token's weight
            correction[:] = 1.0

        arrays = (tokens.new, tokens.old, one_each, against, correction)
        mask_B_T, (new, old, advantages, reference, ratio) = padded(tokens, *arrays)
        new.requires_grad_()
        inputs = {
            "prompt_ids": torch.zeros(len(new), 1), "prompt_mask": torch.ones(len(new), 1),
            "completion_ids": torch.zeros(new.shape), "completion_mask": torch.ones(new.shape), "tool_mask": mask_B_T,
            "advantages": advantages.sum(1) / mask_B_T.sum(1), "old_per_token_logps": old,
            "ref_per_token_logps": reference, "importance_sampling_ratio": ratio,
            "num_items_in_batch": mask_B_T.sum(),
        }  # fmt: skip
        theirs = GRPOTrainer._compute_loss(Trainer(new, settings, 0.1), None, inputs)
        theirs.backward()

        loss_input = replace(
            tokens.given(), reference_logprobs_N=torch.from_numpy(against), correction_N=torch.from_numpy(correction)
        )
        logprobs = torch.from_numpy(tokens.new).requires_grad_()
        ours, _ = make_objective(make_algo(loss=loss, kl_coef=0.1))(logprobs, loss_input)
        ours.backward()
        _, (gradient,) = padded(tokens, logprobs.grad.numpy())
        assert ours.item() == pytest.approx(theirs.item(), rel=1e-9)
        assert torch.allclose(gradient, new.grad * mask_B_T, rtol=1e-9, atol=1e-15)
