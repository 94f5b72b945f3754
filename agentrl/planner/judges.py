"""Engines of judges in a plan: on the policy's GPUs in turn, or on their own GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from agentrl.config.judges import judge_configs, judge_keys, judge_sampler
from agentrl.config.merging import Tree
from agentrl.config.rewards import JudgeConfig
from agentrl.config.schema import Config
from agentrl.models.shipped_architectures import find_architecture, meta_model
from agentrl.planner.engine import GIB, MACHINE, EnginePlan, EngineWeights, plan_engines, sets_tensor

RESTING_BYTES = int(1.5 * GIB)
"""What the process of an engine keeps of a GPU after it has released its memory: its CUDA context, and CUDA graphs."""


@dataclass(frozen=True, slots=True)
class JudgePlan:
    """Engines of one judge model."""

    key: str
    """Key of the judge's section."""
    model: str
    """``judge.model``."""
    is_shared: bool
    """Whether they share the GPUs of the policy's engines, in turn with them."""
    engines: EnginePlan
    row_tokens: int
    """Tokens of the longest answer with its judgement."""
    is_chosen: bool
    """Whether the plan has chosen the GPUs of an engine, and not the configuration."""

    @property
    def gpus(self) -> int:
        """GPUs of all of its engines."""
        return self.engines.engines * self.engines.tensor

    @property
    def settings(self) -> Tree:
        """Keys of the judge; without them its engines have the ``tp_size`` that the plan chooses for the policy's."""
        if not self.is_chosen:
            return {}
        settings: Tree = {"sglang": {"tp_size": self.engines.tensor}}
        for name in reversed(self.key.split(".")):
            settings = {name: settings}
        return settings

    def fault(self, shared_gpus: int) -> str:
        """Return why it does not fit, if the policy's engines have so many GPUs; empty if it does."""
        if self.is_shared and self.gpus > shared_gpus:
            return (
                f"{self.key}.engines={self.engines.engines} of {self.engines.tensor} GPUs each do not fit on the {shared_gpus} "
                f"of the policy's engines: lower it, or set {self.key}.gpus=own"
            )
        if not self.engines.rows(self.row_tokens):
            return (
                f"the KV cache of an engine of {self.key} with tp_size={self.engines.tensor} does not hold {self.row_tokens:,} "
                "tokens (rollout.max_tokens and max_new_tokens of the judge)"
            )
        return ""

    def line(self) -> str:
        """Return its engines and their memory in words."""
        gpus = "in turn with the policy's engines" if self.is_shared else "on GPUs of their own"
        return f"{self.model}: {self.engines.line(gpus)}"


def plan_judges(config: Config, mode: str, gpu_bytes: int, shared_gpus: int) -> tuple[JudgePlan, ...]:
    """Return the engines of all judge models with their own engines.

    Args:
        config: of the run.
        mode: ``placement.mode``.
        gpu_bytes: memory of a GPU.
        shared_gpus: GPUs of the policy's engines.

    Raises:
        ConfigError: an option of SGLang whose memory is not known here.
        ModelError: the architecture of a judge is not found.
    """
    return tuple(_plan_judges(config, mode, gpu_bytes, shared_gpus, [*judge_configs(config).items()]))


def own_gpus(config: Config, gpu_bytes: int) -> int:
    """Return the GPUs of all judges that have their own; see `plan_judges` for what it raises."""
    own_judges = [(model, judge) for model, judge in judge_configs(config).items() if judge.gpus == "own"]
    return sum(plan.gpus for plan in _plan_judges(config, "disaggregate", gpu_bytes, 0, own_judges))


def _plan_judges(
    config: Config, mode: str, gpu_bytes: int, shared_gpus: int, judges: Sequence[tuple[str, JudgeConfig]]
) -> Iterator[JudgePlan]:
    keys = judge_keys(config)
    for model, judge in judges:
        folder = find_architecture(model, f"{keys[model]}.model")
        network = meta_model(folder, f"{keys[model]}.model")
        is_shared, sampler = judge.gpus == "shared", judge_sampler(config, judge)
        row_tokens = config.max_tokens + judge.max_new_tokens
        engines = next(
            plan_engines(
                network.config,
                EngineWeights.count(network),
                sampler,
                mode=mode if is_shared else "disaggregate",
                gpus=shared_gpus if is_shared else MACHINE,
                gpu_bytes=gpu_bytes,
                row_tokens=row_tokens,
            )
        )
        is_chosen = not sets_tensor(sampler)
        yield JudgePlan(keys[model], model, is_shared, replace(engines, engines=judge.engines), row_tokens, is_chosen)
