"""What Megatron-Core learner ranks compute in the tests; see `forked`."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from agentrl.learner.megatron.rank import MegatronRank
from agentrl.learner.registry import make_backend
from tests.unit.learner.megatron.rank_work import (
    FOUR,
    ONE,
    RESUMED,
    TWO,
    TWO_OF_EXPERTS,
    Found,
    compute,
    learner_config,
    make_batch,
    make_rank,
)


def one_rank(folder: Path) -> dict[str, Found]:
    """One rank."""
    return {name: _computed(folder / "qwen3", options) for name, options in ONE.items()}


def two_ranks(folder: Path) -> dict[str, Found]:
    """Every layout of two ranks."""
    found = {name: _computed(folder / "qwen3", options) for name, options in TWO.items()}
    return found | {name: _computed(folder / "experts", options) for name, options in TWO_OF_EXPERTS.items()}


def resumed(folder: Path) -> dict[str, dict[str, float]]:
    """Metrics of the step after a checkpoint, of the learner that wrote it, and of others that load it."""
    found = {}
    for name, options in RESUMED.items():
        config = learner_config("megatron", options, 2)
        rank = make_rank(folder / "qwen3", MegatronRank, config)
        batch = make_batch(make_backend(config).shares)
        batch = replace(batch, micro=(batch.micro[rank.share],))
        if not found:
            rank.train_step(batch)
            rank.sleep()
            rank.save(folder / "checkpoint")
            rank.wake()
        else:
            rank.load(folder / "checkpoint")
        found[name] = rank.train_step(batch)
        parallel_state.destroy_model_parallel()
    return found


def four_ranks(folder: Path) -> dict[str, Found]:
    """Every layout of four ranks."""
    return {name: _computed(folder / "tied", options) for name, options in FOUR.items()}


def _computed(model: Path, options: dict[str, Any]) -> Found:
    config = learner_config("megatron", options, dist.get_world_size())
    rank = make_rank(model, MegatronRank, config)
    found = compute(rank, make_backend(config).shares)
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    assert all(each.metrics == found.metrics for each in everywhere)
    keys = [key for each in everywhere for key in each.logprobs]
    assert len(keys) == len(set(keys)), "each row comes from one rank"
    parallel_state.destroy_model_parallel()
    return Found(found.metrics, {key: row for each in everywhere for key, row in each.logprobs.items()})
