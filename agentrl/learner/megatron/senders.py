"""The ranks that send weights to engines: the first of each pipeline stage, and of groups of its expert-parallel ranks.

What a sender has gathered from its group does not pass through any other rank. Ranks with copies of weights, those of data and
context parallelism, have no part in it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from typing_extensions import override

from agentrl.distributed.base import TensorSpec
from agentrl.learner.base import StreamSource, WeightSource
from agentrl.learner.megatron.weights import GatherGroups, ModelWeights, Pair
from agentrl.learner.streams import make_groups, stream_order
from agentrl.models.engine_float8 import EngineFloat8

MOST_SENDERS = 16
"""Most senders of experts, unless there are more pipeline stages: each GPU of an engine has a communicator for each sender."""


@dataclass(frozen=True, slots=True)
class RankPart:
    """What this rank and some others gather. Example: ``RankPart((0, 1), frozenset({"model.norm.weight"}), groups)``."""

    ranks: tuple[int, ...]
    """The sender first."""
    names: frozenset[str]
    """Names of the weights."""
    groups: GatherGroups
    """In which they are gathered."""


def rank_parts(weights: ModelWeights, timeout_s: float) -> list[RankPart]:
    """Return the parts of the weights that this rank gathers with others; none on ranks with copies. Collective.

    Args:
        weights: of the model.
        timeout_s: time limit of a gather.
    """
    names, parts = weights.names_on_rank(), dict[tuple[int, ...], frozenset[str]]()
    layers = experts = parallel_state.get_tensor_model_parallel_group()

    def add(part_names: frozenset[str], group: dist.ProcessGroup) -> None:
        if union := _union(part_names, group):
            ranks = tuple(dist.get_process_group_ranks(group))
            parts[ranks] = parts.get(ranks, frozenset()) | union

    if not parallel_state.get_data_parallel_rank(with_context_parallel=True):
        add(names - weights.expert_names, layers)
    if weights.expert_names:
        experts = _expert_group(timeout_s, is_stacked=weights.model.family.stacked is not None)
        if not parallel_state.get_expert_data_parallel_rank():
            add(names & weights.expert_names, experts)
    groups = GatherGroups(layers, experts)
    return [RankPart(ranks, parts[ranks], groups) for ranks in sorted(parts, key=stream_order)]


def senders_per_stage(stages: int, expert_ranks: int) -> int:
    """Return how many ranks of a pipeline stage send experts: a divisor of its expert-parallel ranks."""
    return next(
        count
        for count in range(expert_ranks, 0, -1)
        if expert_ranks % count == 0 and (count == 1 or count * stages <= MOST_SENDERS)
    )


def _expert_group(timeout_s: float, *, is_stacked: bool) -> dist.ProcessGroup:
    """Return the group in which this rank's experts are gathered: so many expert-parallel ranks that senders are few."""
    stage: dist.ProcessGroup = parallel_state.get_expert_tensor_and_model_parallel_group()
    stages, expert_ranks = (
        parallel_state.get_pipeline_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_world_size(),
    )
    # Experts that are stacked in one tensor are gathered by all of a stage.
    senders = 1 if is_stacked else senders_per_stage(stages, expert_ranks)
    if senders == 1:
        return stage
    if senders == expert_ranks:
        group: dist.ProcessGroup = parallel_state.get_expert_tensor_parallel_group()
        return group
    ranks, size = dist.get_process_group_ranks(stage), stage.size() // senders
    first = dist.get_rank(stage) // size * size
    timeout = timedelta(seconds=timeout_s)
    gathered = tuple(ranks[first : first + size])
    [group] = make_groups([gathered], lambda ranks: dist.new_group(list(ranks), timeout)).values()
    return group


def _union(names: frozenset[str], group: dist.ProcessGroup) -> frozenset[str]:
    """Return the names on all ranks of a group: of a weight that all hold alike, only one has it."""
    by_rank: list[Any] = [None] * group.size()
    dist.all_gather_object(by_rank, names, group=group)
    return frozenset[str]().union(*by_rank)


class PartSource(StreamSource):
    """A part of a rank's weights."""

    def __init__(
        self,
        rank_part: RankPart,
        rank: WeightSource,
        weights: ModelWeights,
        computing: Callable[[], AbstractContextManager[None]],
        readable: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        """Gather ``rank_part`` of the ``weights`` of ``rank``, as it computes; ``readable`` as of `ModelWeights.gather`."""
        self.ranks: Sequence[int] = rank_part.ranks
        self.float32_weights = rank.float32_weights
        self._part = rank_part
        self._rank = rank
        self._weights = weights
        self._computing = computing
        self._readable = readable

    @property
    @override
    def float8(self) -> EngineFloat8:
        return self._rank.float8

    @property
    @override
    def gathers_on(self) -> torch.device:
        return self._rank.gathers_on

    @override
    def specs(self) -> Sequence[TensorSpec]:
        return [spec for spec in self._weights.specs() if spec.name in self._part.names]

    @override
    def gather(self, into: Sequence[Pair]) -> None:
        with self._computing():
            self._weights.gather(into, self._part.groups, self._readable)
