"""What Megatron-Core ranks compute of batches with images; see `forked`."""

from __future__ import annotations

import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from agentrl.batch.microbatch import GlobalBatch
from agentrl.core.errors import LearnerError
from agentrl.learner.base import RankOptions
from agentrl.learner.megatron.rank import MegatronRank
from tests.unit.learner.megatron.cases import end_layout
from tests.unit.learner.megatron.models import CP, PP, SP, TP
from tests.unit.learner.megatron.rank_work import algo_of, learner_config

WHOLE = {"use_distributed_optimizer": False}
"""With which each data-parallel rank has the whole gradient."""
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "DP2": ("qwen2.5-vl", WHOLE),
    "TP2": ("qwen2.5-vl", TP),
    "PP2": ("qwen2.5-vl", PP),
    "CP2": ("qwen2.5-vl", CP | WHOLE),
    "TP2, SP": ("qwen3-vl", TP | SP),
    "PP2, deepstack": ("qwen3-vl", PP),
}
"""Of two ranks: the family, and the options ``learner.megatron``."""


def one_rank(folder: Path) -> dict[str, Any]:
    """Each family: scores of policy and reference, gradients, and the weights before and after a step with a frozen tower."""
    results = {}
    for family in ("qwen2.5-vl", "qwen3-vl"):
        rank = make_rank(folder / family, {}, freeze=["*.visual.*"])
        batch = read_batch(folder, family, rank)
        before = weights(rank)
        scores, references = rank.logprobs(batch), rank.logprobs(batch, "reference")
        rank.train_step(batch)
        after = weights(rank)
        results[family] = scores, references, before, after
        del rank
        end_layout()
        critic = make_critic(folder, family, {}, freeze=["*.visual.*", "*embed_tokens*"])
        before, values = weights(critic), critic.values(batch)
        critic.train_step(pickle.loads((folder / f"{family}.values").read_bytes()))
        results[f"critic of {family}"] = values, before, weights(critic)
        del critic
        end_layout()
    text = make_rank(folder / "text", {})
    try:
        text.logprobs(read_batch(folder, "qwen2.5-vl", text))
    except LearnerError as error:
        results["refused"] = str(error)
    return results


def two_ranks(folder: Path) -> dict[str, Any]:
    """Each layout: scores and gradients, and what a checkpoint of the first restores in the third."""
    results = {}
    for name, (family, options) in LAYOUTS.items():
        rank = make_rank(folder / family, options)
        batch = read_batch(folder, family, rank)
        scores: list[Any] = [None] * 2
        dist.all_gather_object(scores, rank.logprobs(batch))
        gradients: dict[str, torch.Tensor] = {}
        update = rank._update

        def keep(lr_scale: float, rank: Any = rank, into: dict[str, torch.Tensor] = gradients) -> dict[str, float]:
            into |= gathered(rank, lambda weight: weight.main_grad)
            return {}

        rank._update = keep
        rank.train_step(batch)
        rank._update = update
        results[name] = scores[0] | scores[1], gradients
        if name == "TP2":
            rank.train_step(batch)
            rank.save(folder / "checkpoint")
            rank.finish_save()
            results["saved"] = weights(rank)
        if name == "PP2":
            rank.load(folder / "checkpoint")
            results["loaded"] = weights(rank)
        del rank
        end_layout()
    critic = make_critic(folder, "qwen3-vl", PP)
    values: list[Any] = [None] * 2
    dist.all_gather_object(values, critic.values(read_batch(folder, "qwen3-vl", critic)))
    results["critic"] = values[0] | values[1]
    del critic
    end_layout()
    return results


def make_critic(folder: Path, family: str, options: dict[str, Any], **learner: Any) -> MegatronRank:
    """Make a rank of a critic of a family's model."""
    config = learner_config("megatron", options, dist.get_world_size()).model_copy(update=learner)
    path = folder / f"critic of {family}"
    return MegatronRank(RankOptions(path, config, algo_of("ppo"), torch.device("cpu"), seed=0, role="critic"))


def make_rank(folder: Path, options: dict[str, Any], **learner: Any) -> MegatronRank:
    """Make a rank whose reference is the policy's folder."""
    config = learner_config("megatron", options, dist.get_world_size()).model_copy(update=learner)
    return MegatronRank(RankOptions(folder, config, algo_of("grpo"), torch.device("cpu"), seed=0, reference=folder))


def read_batch(folder: Path, family: str, rank: MegatronRank) -> GlobalBatch:
    """Return the rank's part of a batch, which is packed for as many data-parallel ranks as there are."""
    batches = pickle.loads((folder / f"{family}.batches").read_bytes())
    from megatron.core import parallel_state

    batch: GlobalBatch = batches[parallel_state.get_data_parallel_world_size()]
    return replace(batch, micro=(batch.micro[rank.data_parallel_rank],))


def weights(rank: MegatronRank) -> dict[str, torch.Tensor]:
    """Return the whole weights by name, as engines get them."""
    tensors = {spec.name: torch.empty(spec.shape) for spec in rank.specs()}
    rank.gather([*tensors.items()])
    return tensors


def gathered(rank: MegatronRank, read: Any) -> dict[str, torch.Tensor]:
    """Return what ``read`` returns of each weight, by name."""
    tensors = {spec.name: torch.empty(spec.shape) for spec in rank.specs()}
    rank.trained.weights.gather([*tensors.items()], rank._groups, read)
    return tensors
