"""The backend ``fsdp``: PyTorch's FSDP2 on the Hugging Face model."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from typing_extensions import override

from agentrl.batch.packing import MULTIPLE
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import EXPERT_PARALLEL
from agentrl.core.errors import ConfigError
from agentrl.learner.base import LearnerBackend, RankClass
from agentrl.models.load import ROPE_BY_LENGTH, read_experts, read_heads, read_rope_types

KEY = "learner.context_parallel"
_FP8_MULTIPLE = 16
"""Products in float8 take multiples of so many tokens."""


class FsdpBackend(LearnerBackend):
    """Every rank has a shard of every weight, in ``learner.replicas`` copies.

    ``learner.context_parallel`` ranks compute a micro-batch together. ``learner.expert_parallel`` ranks divide the experts.
    """

    @property
    @override
    def data_parallel_size(self) -> int:
        return self.config.ranks // self.config.context_parallel

    @override
    def check(self, algo: AlgoConfig, models: Sequence[Path]) -> None:
        """Check how ranks are divided; all else is checked when a model is loaded."""
        for key, divisor in (("learner.replicas", self.config.replicas), (KEY, self.config.context_parallel)):
            if self.config.ranks % divisor:
                raise ConfigError(
                    f"{key}={divisor} does not divide learner.ranks={self.config.ranks}: set learner.ranks to a multiple of "
                    f"{divisor}"
                )
        self._check_experts(models)
        size = self.config.context_parallel
        if size == 1:
            return
        multiple = _FP8_MULTIPLE if self.config.fp8 else 1
        if MULTIPLE % (size * multiple):
            of_fp8 = (
                f" with learner.fp8, whose products want {_FP8_MULTIPLE} tokens of each rank" if self.config.fp8 else ""
            )
            sizes = [n for n in range(1, MULTIPLE + 1) if MULTIPLE % (n * multiple) == 0]
            raise ConfigError(
                f"{KEY}={size}{of_fp8}: micro-batches are multiples of {MULTIPLE} tokens; set {KEY} to "
                f"{', '.join(map(str, sizes[:-1]))} or {sizes[-1]}"
            )
        for folder in models:
            _check_attention(folder, size)

    def _check_experts(self, models: Sequence[Path]) -> None:
        size, copy_ranks = self.config.expert_parallel, self.config.ranks // self.config.replicas
        if size == 1:
            return
        if copy_ranks % size:
            raise ConfigError(
                f"{EXPERT_PARALLEL}={size} does not divide the {copy_ranks} ranks of a copy of the weights (learner.ranks="
                f"{self.config.ranks}, learner.replicas={self.config.replicas}): set {EXPERT_PARALLEL} to a divisor"
            )
        for folder in models:
            experts = read_experts(folder)
            if not experts:
                raise ConfigError(
                    f"{EXPERT_PARALLEL}={size}: the model in {folder} has no experts; set {EXPERT_PARALLEL}=1"
                )
            if experts % size:
                raise ConfigError(
                    f"{EXPERT_PARALLEL}={size} does not divide the {experts} experts of the model in {folder}: set "
                    f"{EXPERT_PARALLEL} to a divisor"
                )

    @override
    def rank_class(self) -> RankClass:
        from agentrl.learner.fsdp.rank import FsdpRank

        return FsdpRank


def _check_attention(folder: Path, size: int) -> None:
    heads = read_heads(folder)
    if heads is not None and heads % size:
        raise ConfigError(
            f"{KEY}={size} does not divide the {heads} attention heads of the model in {folder}: set {KEY} to a divisor"
        )
    if rope_types := sorted(read_rope_types(folder) & ROPE_BY_LENGTH):
        raise ConfigError(
            f"{KEY}={size}: the RoPE of the model in {folder} ({', '.join(rope_types)}) depends on the longest row, of which a "
            f"rank has only a part; set {KEY}=1"
        )
