"""What Megatron-Core learner ranks compute in the tests; see `forked`."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from agentrl.config.learner import LearnerConfig
from agentrl.learner.base import RowScores
from agentrl.learner.in_process import LocalLearnerGroup
from agentrl.learner.megatron.rank import MegatronRank
from agentrl.learner.registry import make_backend
from agentrl.testing import check_learner
from tests.algo_config import make_algo
from tests.unit.learner.learners import contract_rows
from tests.unit.learner.megatron.rank_work import (
    FOUR,
    LONG,
    LONG_OF_EXPERTS,
    ONE,
    RESUMED,
    TWO,
    TWO_OF_EXPERTS,
    Found,
    compute,
    critic_of,
    learner_config,
    make_batches,
    make_critic,
    make_rank,
    with_offload,
)

MOMENTS = ("exp_avg", "exp_avg_sq")


def one_rank(folder: Path) -> dict[str, Found]:
    """One rank."""
    return {name: _computed(folder / "qwen3", name, options) for name, options in ONE.items()}


def contract(folder: Path) -> bool:
    """Check one rank against the contract of learners."""
    model, config = folder / "qwen3", learner_config("megatron")
    check_learner(lambda: LocalLearnerGroup(model, config, make_algo(), seed=0), contract_rows(), folder / "contract")
    return True


def new_head(folder: Path) -> RowScores:
    """Values of a critic that starts from a policy."""
    critic = make_critic(folder / "qwen3", MegatronRank, learner_config("megatron"))
    values: RowScores = critic.values(make_batches(1)["value"])
    return values


def two_ranks(folder: Path) -> dict[str, Found]:
    """Every layout of two ranks."""
    results = {name: _computed(folder / "qwen3", name, options) for name, options in TWO.items()}
    return results | {name: _computed(folder / "experts", name, options) for name, options in TWO_OF_EXPERTS.items()}


def long(folder: Path) -> dict[str, Found]:
    """Layouts of two ranks that others have in them."""
    results = {name: _computed(folder / "qwen3", name, options) for name, options in LONG.items()}
    return results | {name: _computed(folder / "experts", name, options) for name, options in LONG_OF_EXPERTS.items()}


def resumed(folder: Path) -> dict[str, dict[str, dict[str, float]]]:
    """Metrics of the step after a checkpoint, of those that load it, and of those that write it: a policy, and a critic that
    sleeps."""
    results = {}
    for name, options in RESUMED.items():
        config = with_offload(learner_config("megatron", options, 2), name)
        batches, steps = make_batches(make_backend(config).data_parallel_size), {}
        policy, critic = folder / "experts", critic_of(folder / "qwen3")
        for kind, (make, model) in {"grpo": (make_rank, policy), "value": (make_critic, critic)}.items():
            rank, checkpoint = make(model, MegatronRank, config), folder / f"checkpoint of {kind}"
            batch = replace(batches[kind], micro=(batches[kind].micro[rank.data_parallel_rank],))
            if not results:
                rank.train_step(batch)
                if kind == "value":
                    rank.sleep()
                rank.save(checkpoint)
                rank.wake()
            else:
                rank.load(checkpoint)
            steps[kind] = rank.train_step(batch)  # what is written is the state before it
            rank.finish_save()
            check_offload(rank, config)
        results[name] = steps
        parallel_state.destroy_model_parallel()
    return results


def four_ranks(folder: Path) -> dict[str, Found]:
    """Every layout of four ranks."""
    return {name: _computed(folder / "tied", name, options) for name, options in FOUR.items()}


def _computed(model: Path, name: str, options: dict[str, Any]) -> Found:
    """Return what a layout computes; its name says what is computed again."""
    recompute = next((each for each in ("selective", "full") if each in name.split(", ")), "none")
    config = learner_config("megatron", options, dist.get_world_size()).model_copy(update={"recompute": recompute})
    config = with_offload(config, name)
    rank, critic = make_rank(model, MegatronRank, config), make_critic(critic_of(model), MegatronRank, config)
    rank.training.states._chunk_bytes = 20_000
    computed = compute(rank, critic, make_backend(config).data_parallel_size)
    check_offload(rank, config)
    weights = {spec.name: torch.empty(spec.shape) for spec in rank.specs()}
    rank.gather([*weights.items()])
    digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights.values())).digest()
    digests: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(digests, digest)
    assert len({*digests}) == 1, "each rank gathers the same weights"
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, computed)
    assert all(each.metrics == computed.metrics for each in everywhere)
    parallel_state.destroy_model_parallel()
    return Found(
        computed.metrics, *(_together([getattr(each, name) for each in everywhere]) for name in ("logprobs", "values"))
    )


def check_offload(rank: MegatronRank, config: LearnerConfig) -> None:
    """Check that moments, after a step, have memory if they are not offloaded, and none if they are."""
    optimizers = rank.training._optimizers()
    moments = [state[name] for inner in optimizers for state in inner.optimizer.state.values() for name in MOMENTS]
    assert len(moments) > 8
    has_memory = {bool(moment.untyped_storage().nbytes()) for moment in moments}
    assert has_memory == {config.cpu_offload == "none"}


def _together(of_ranks: list[RowScores]) -> RowScores:
    keys = [key for scores in of_ranks for key in scores]
    assert len(keys) == len(set(keys)), "each row comes from one rank"
    return {key: row for scores in of_ranks for key, row in scores.items()}
