"""What learners of the tests compute: models, layouts, losses and batches. Imports no Megatron-Core."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.algo.registry import algorithm_faults
from agentrl.batch.loss_weights import count_units
from agentrl.batch.microbatch import GlobalBatch
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import LearnerConfig, OptimizerConfig
from agentrl.config.load import validate
from agentrl.core.types import Row, RowKey
from agentrl.learner.base import RankOptions
from tests.batches import pack_rows
from tests.integration.rank_processes import STEP_TIMEOUT_S, check_timeouts
from tests.supports import add_support
from tests.unit.learner.learners import VOCAB, make_rows
from tests.unit.learner.megatron.models import EP, PP, SP, TP, VPP

LENGTHS = (30, 50, 20, 7)
ALGOS: dict[str, dict[str, Any]] = {
    "grpo": {"kl_coef": 0.3, "entropy_coef": 0.1, "routing_replay": True},
    "gspo": {"loss": {"name": "gspo", "options": {"clip_low": 0.9, "clip_high": 9.0}}},
    "centered": {
        "loss": {"name": "reinforce"},
        "old_logprobs": "learner",
        "correction": {"rollout_is": "token"},
        "score_centering": True,
        "kl_coef": 0.2,
    },
    # With the usual eps a gradient that is zero but for rounding moves its weight by a whole step.
    "ppo": {"advantage": {"name": "gae"}, "critic": {"optimizer": {"lr": 1e-3, "max_grad_norm": 5.0, "eps": 1e-5}}},
}
ONE: dict[str, dict[str, Any]] = {"one rank": {}}
TWO: dict[str, dict[str, Any]] = {
    "DP2, overlapped, offloaded": {"overlap_grad_reduce": True, "overlap_param_gather": True},
    "TP2, SP, selective": TP | SP,
    "PP2, VPP2": PP | VPP,
}
TWO_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "TP2, SP, ETP2": TP | SP,
    "TP2, SP, EP2, ETP1, full": TP | SP | EP | {"expert_tensor_parallel_size": 1},
    "PP2, experts, selective": PP,
    "CP2, experts": {"context_parallel_size": 2},
}
LONG: dict[str, dict[str, Any]] = {
    "DP2": {},
    "TP2, selective": TP,
    "PP2, full": PP,
    "CP2": {"context_parallel_size": 2},
}
LONG_OF_EXPERTS: dict[str, dict[str, Any]] = {
    "EP2, selective": EP,
    "TP2, SP, ETP1": TP | SP | {"expert_tensor_parallel_size": 1},
}
"""Under `make test-long` only: layouts above have all that these have, and more."""
FOUR: dict[str, dict[str, Any]] = {"TP2, SP, PP2": TP | SP | PP}
RESUMED = {"TP2, SP, offloaded": TP | SP, "PP2": PP, "DP2, offloaded": {}, "EP2": EP}
"""The first writes a checkpoint that the others load; the model has experts."""
STATES = {
    "gpt_oss": TP | SP | EP | {"expert_tensor_parallel_size": 1},
    "mixtral": {},
    "deepseek_v3": EP,
    "qwen2": PP,
    "fsdp qwen3_moe": {},
}
OTHER_STATES = {"gpt_oss": {}, "mixtral": TP | SP, "deepseek_v3": PP, "qwen2": TP, "fsdp qwen3_moe": {}}
"""Layouts of two ranks that write a checkpoint, and load it, by the model."""
KILLS = {"rank 1": (1, "__1_0.distcp"), "rank 0": (0, ".metadata")}
"""The rank that is killed, and the end of the name of the file that it begins to write."""
MODELS = {"qwen3": "qwen3", "experts": "qwen3_moe", "tied": "qwen2"}


@dataclass
class Found:
    """What a learner computed."""

    metrics: dict[str, dict[str, float]]
    """Of a step with each loss, one after the other, and of the critic's."""
    logprobs: dict[RowKey, NDArray[np.float32]]
    """Before the steps."""
    values: dict[RowKey, NDArray[np.float32]]
    """After the critic's step."""


def learner_config(backend: str, options: dict[str, Any] | None = None, ranks: int = 1) -> LearnerConfig:
    """The configuration of a learner."""
    optimizer = OptimizerConfig(lr=1e-3, max_grad_norm=5.0)
    return LearnerConfig(
        backend=backend, ranks=ranks, device="cpu", threads=1, precision="float32", optimizer=optimizer,
        megatron=options or {}, logits_chunk=16, step_timeout_s=STEP_TIMEOUT_S,
    )  # fmt: skip


def with_offload(config: LearnerConfig, layout: str) -> LearnerConfig:
    """Return the configuration of a layout, whose name says whether the optimizer's states are in CPU memory."""
    return config.model_copy(update={"cpu_offload": "optimizer" if "offloaded" in layout else "none"})


def algo_of(name: str) -> AlgoConfig:
    sampler = {"renormalise": "engine", "top_k": 6} if name == "centered" else {}
    return validate({"algo": ALGOS[name], "sampler": sampler}, [algorithm_faults]).algo


def batch_rows() -> list[Row]:
    """Return rows of a few agents, of which each has several: sequences are divided among micro-batches and shares.

    The experts of most tokens are given; models without experts ignore them.
    """
    rows = [replace(row, key=RowKey("p", f"r{n % 2}", row=n)) for n, row in enumerate(make_rows(LENGTHS))]
    return [replace(row, experts=_experts(len(row.mask), seed)) for seed, row in enumerate(rows)]


def _experts(tokens: int, seed: int) -> NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    order = rng.permuted(np.broadcast_to(np.arange(4, dtype=np.uint8), (tokens, 4, 4)), axis=2)
    order[rng.random(tokens) < 0.3] = 255
    return order[..., :2].copy()


def make_batches(shares: int) -> dict[str, GlobalBatch]:
    """Return batches by algorithm: ``ppo`` has an advantage for each token, and ``value`` is the batch of its critic."""
    rows = batch_rows()
    rng = np.random.default_rng(1)
    advantages = {row.key.rollout_id: float(rng.normal()) for row in rows}
    of_tokens, values, returns = (
        {row.key: rng.normal(size=len(row.mask)).astype(np.float32) for row in rows} for _ in range(3)
    )
    sizes: dict[str, Any] = {"data_parallel_size": shares, "tokens_per_micro": 64, "pad_id": 0}
    batch = pack_rows(rows, advantages, **sizes)
    ppo = pack_rows(rows, of_tokens, **sizes)
    supported = [add_support(row, VOCAB, seed) for seed, row in enumerate(rows)]
    centered = pack_rows(supported, of_tokens, **sizes, replays_support=True)
    return {
        "grpo": batch,
        "gspo": batch,
        "centered": centered,
        "ppo": ppo,
        "value": pack_rows(rows, kind="value", values=values, returns=returns, **sizes),
    }


def make_parts(shares: int) -> list[GlobalBatch]:
    """Return the batch of an optimizer step in two parts, a rollout each."""
    rows, parts = batch_rows(), []
    for name, more in (("r0", {"completes": False}), ("r1", {"gradient_scale": 1 / count_units(rows, "token_mean")})):
        result = [row for row in rows if row.key.rollout_id == name]
        options: dict[str, Any] = {
            "data_parallel_size": shares,
            "tokens_per_micro": 64,
            "pad_id": 0,
            "units": 1,
            **more,
        }
        parts.append(pack_rows(result, {"r0": -1.5, "r1": 0.7}, **options))
    return parts


def algos_of(layout: str) -> tuple[str, ...]:
    """Return the losses of a layout. Those that divide sequences have all of them, as has each division of a dense model.

    A loss does not see whether the model has experts, or stages within which tensors are divided.
    """
    is_repeated = layout in FOUR or (layout in TWO_OF_EXPERTS and "CP2" not in layout)
    return ("grpo",) if is_repeated else tuple(ALGOS)


def compute(policy: Any, critic: Any, shares: int, algos: Sequence[str]) -> Found:
    """Compute losses with a rank or a local learner's, which has a reference, and with one of a critic."""
    from agentrl.algo.batch_loss import BatchLoss

    def share_of(batch: GlobalBatch) -> GlobalBatch:
        return replace(batch, micro=(batch.micro[policy.data_parallel_rank],), metrics={})

    batches = {name: share_of(batch) for name, batch in make_batches(shares).items()}
    logprobs, metrics = policy.logprobs(batches["grpo"]), {}
    for name in algos:
        policy.loss = BatchLoss(algo_of(name), policy.device)
        metrics[name] = policy.train_step(batches[name])
    if not policy.config.megatron.get("overlap_grad_reduce"):  # which adds gradients over ranks within a part
        _, metrics["parts"] = (policy.train_step(share_of(batch_part)) for batch_part in make_parts(shares))
    metrics["value"] = critic.train_step(batches["value"])
    return Found(metrics, logprobs, critic.values(batches["value"]))


def make_rank(folder: Path, cls: Any, config: LearnerConfig) -> Any:
    """Make a rank with a reference."""
    algo, reference = algo_of("grpo"), folder.parent / "reference"
    rank = cls(RankOptions(folder, config, algo, torch.device("cpu"), seed=0, reference=reference))
    check_timeouts()
    return rank


def make_critic(folder: Path, cls: Any, config: LearnerConfig) -> Any:
    """Make a rank of a critic."""
    return cls(RankOptions(folder, config, algo_of("ppo"), torch.device("cpu"), seed=0, role="critic"))


def critic_of(folder: Path) -> Path:
    """The folder of the critic of a policy in ``folder``."""
    return folder.with_name(f"critic of {folder.name}")
