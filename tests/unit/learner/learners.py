"""Tiny random models and batches for the learner's tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.core.types import MaskReason, Provenance, Row, RowKey
from agentrl.learner.fsdp.model import PackedModel
from agentrl.learner.in_process import LocalLearnerGroup
from tests.algo_config import make_algo
from tests.batches import pack_rows

VOCAB = 96
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
MODELS = {
    "qwen3": lambda sizes: Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=16, tie_word_embeddings=True)),
    "qwen2": lambda sizes: Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True)),
    "qwen3_moe": lambda sizes: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**sizes, head_dim=16, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=16)
    ),
    "llama": lambda sizes: LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)),
}


def make_model(folder: Path, family: str = "qwen3", **sizes: int) -> Path:
    """Save a random model with another file to copy."""
    torch.manual_seed(7)
    MODELS[family](SIZES | sizes).save_pretrained(folder)
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


def make_rows(lengths: Sequence[int], seed: int = 0) -> list[Row]:
    """Rows whose middle third was sampled, at log-probabilities near a uniform policy's."""
    rng = np.random.default_rng(seed)
    rows = []
    for number, length in enumerate(lengths):
        mask = np.zeros(length, np.uint8)
        mask[length // 3 : max(length // 3 + 1, 2 * length // 3)] = 1
        mask[0] = 0
        sampled = mask.astype(bool)
        rows.append(
            Row(
                key=RowKey(f"p{number % 2}", f"r{number}"),
                token_ids=rng.integers(2, VOCAB, length).astype(np.int32),
                provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
                mask=mask,
                mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
                logprobs=(-rng.uniform(3, 6, length) * mask).astype(np.float32),
                versions=np.where(sampled, 0, -1).astype(np.int32),
                requests=np.where(sampled, 0, -1).astype(np.int32),
                request_ids=("q",),
            )
        )
    return rows


def contract_rows() -> list[Row]:
    """Rows of two rollouts, for `check_learner`."""
    rows = enumerate(make_rows((30, 21, 12)))
    return [replace(row, key=replace(row.key, rollout_id=f"r{number % 2}", row=number)) for number, row in rows]


def make_batch(
    lengths: Sequence[int],
    *,
    seed: int = 0,
    shares: int = 1,
    bin_: int = 64,
    micro: int = 128,
    rows: list[Row] | None = None,
    provenance: Literal["strict", "warn"] = "strict",
) -> GlobalBatch:
    """A packed batch of ``rows``, or of `make_rows`, with advantages of both signs."""
    rows = make_rows(lengths, seed) if rows is None else rows
    rng = np.random.default_rng(seed + 1)
    advantages = {row.key.rollout_id: float(rng.normal()) for row in rows}
    sizes = {"data_parallel_size": shares, "tokens_per_micro": micro}
    return pack_rows(rows, advantages, **sizes, pad_id=0, provenance=provenance)


class Learners:
    """Opens learners one at a time: a process has one default process group."""

    def __init__(self, model: Path) -> None:
        self.model = model
        self.current: LocalLearnerGroup | None = None

    def open(
        self,
        name: str = "adamw",
        *,
        folder: Path | None = None,
        reference: Path | None = None,
        algo: AlgoConfig | None = None,
        lr: float = 1e-2,
        max_grad_norm: float = 1e6,
        optimizer: Mapping[str, object] | None = None,
        **options,
    ) -> LocalLearnerGroup:
        """Open a learner in place of the one before.

        Args:
            name: of the optimizer, or ``8bit`` for AdamW with moments in 8 bits.
            folder, reference, algo: of the models and the algorithm.
            lr, max_grad_norm, optimizer: keys of the optimizer.
            **options: keys of the learner.
        """
        self.close()
        kind = {"name": "adamw", "state": "8bit"} if name == "8bit" else {"name": name}
        settings = {**kind, "lr": lr, "max_grad_norm": max_grad_norm, **(optimizer or {})}
        config = LearnerConfig(
            **{"device": "cpu", "threads": 1, "precision": "float32"} | options, optimizer=OptimizerConfig(**settings)
        )
        self.current = LocalLearnerGroup(folder or self.model, config, algo or make_algo(), seed=0, reference=reference)
        return self.current

    def close(self) -> None:
        """Close the learner that is open."""
        if self.current is not None:
            self.current.close()
            self.current = None


def tensors(learner: LocalLearnerGroup) -> dict[str, torch.Tensor]:
    """Return copies of all weights by name."""
    return {name: tensor.clone() for bucket in learner.buckets(1 << 40) for name, tensor in bucket.tensors()}


def models(learner: LocalLearnerGroup) -> list[PackedModel]:
    """Return the policy's model, and the reference's."""
    rank = learner.rank
    if rank.reference is None:
        return [rank.model]
    with rank.reference.model() as reference:
        return [rank.model, reference]


def gradients(learner: LocalLearnerGroup, batch: GlobalBatch, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the whole gradient of a batch, without taking the step."""
    rank = learner.rank
    by_name: dict[str, torch.Tensor] = {}

    def keep(lr_scale: float) -> dict[str, float]:
        for name, parameter in rank.model.hf.named_parameters():
            by_name[name] = parameter.grad.clone()
        return {}

    rank._update = keep
    learner.train_step(batch)
    assert all(value.dtype == dtype for value in by_name.values())
    return by_name
