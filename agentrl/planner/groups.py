"""Groups of engines in a plan (``sampler.groups``), which have their own GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from agentrl.config.engine_groups import group_sampler
from agentrl.config.merging import Tree
from agentrl.config.schema import Config
from agentrl.planner.engine import MACHINE, EnginePlan, EngineWeights, plan_engines


@dataclass(frozen=True, slots=True)
class GroupPlan:
    """Engines of one group."""

    name: str
    serves: str
    """``sampler.groups.NAME.serves``."""
    engines: EnginePlan
    row_tokens: int
    """Tokens of the longest row."""

    @property
    def gpus(self) -> int:
        """GPUs of all of its engines."""
        return self.engines.engines * self.engines.tensor

    @property
    def settings(self) -> Tree:
        """Keys of the group; without them it has the GPUs of an engine that the plan chooses for the others."""
        return {self.name: {"sglang": {"tp_size": self.engines.tensor, "mem_fraction_static": self.engines.fraction}}}

    def fault(self) -> str:
        """Return why it does not fit; empty if it does."""
        if self.engines.rows(self.row_tokens):
            return ""
        return (
            f"the KV cache of an engine of sampler.groups.{self.name} with tp_size={self.engines.tensor} does not hold a row of "
            f"{self.row_tokens:,} tokens"
        )

    def line(self) -> str:
        """Return its engines and their memory in words."""
        return f"{self.name} ({self.serves}): {self.engines.line('on GPUs of their own')}"


def plan_groups(config: Config, hf: Any, weights: EngineWeights, gpu_bytes: int) -> tuple[GroupPlan, ...]:
    """Return the engines of all groups.

    Args:
        config: of the run.
        hf: configuration of the model in transformers.
        weights: those of the model.
        gpu_bytes: memory of a GPU.

    Raises:
        ConfigError: an option of SGLang whose memory is not known here.
    """
    return tuple(_plan_groups(config, hf, weights, gpu_bytes))


def _plan_groups(config: Config, hf: Any, weights: EngineWeights, gpu_bytes: int) -> Iterator[GroupPlan]:
    for name, group in config.sampler.groups.items():
        sampler = group_sampler(config.sampler, name)
        sizes = {"gpus": MACHINE, "gpu_bytes": gpu_bytes, "row_tokens": config.max_tokens}
        engines = next(plan_engines(hf, weights, sampler, mode="disaggregate", **sizes))
        yield GroupPlan(name, group.serves, replace(engines, engines=group.engines), config.max_tokens)
