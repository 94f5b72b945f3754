"""A run's configuration, one field a section."""

from __future__ import annotations

import re
from typing import Any, Literal

from pydantic import Field, SerializationInfo, field_serializer, field_validator, model_validator

from agentrl.config.algo import AlgoConfig
from agentrl.config.base import Section
from agentrl.config.containers import ContainersConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig, RenderConfig
from agentrl.config.obs import ObsConfig
from agentrl.config.rewards import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.self_play import SelfPlayConfig
from agentrl.config.sft import SftConfig
from agentrl.config.sources import SourceConfig, put_source_on
from agentrl.config.tasks import DataConfig, EnvConfig, TasksConfig
from agentrl.config.toolserver import ToolConfig
from agentrl.config.train import AsyncConfig, BatchConfig, RunConfig, TrainConfig, WeightsConfig

Mode = Literal["separate", "colocate", "disaggregate"]
"""See `PlacementConfig.mode`."""


class PlacementConfig(Section):
    """Where engines and learner run."""

    mode: Mode = "separate"
    """``separate``: the engines on the last GPUs of this machine, the learner's ranks where Ray places them, starting with
    the first ones here; on a machine with one GPU both use it, and neither releases its memory. ``colocate``: the engines
    share the learner's GPUs by time sharing; the idle side has released its memory. ``disaggregate``: the engines have
    their own GPUs. ``colocate`` and ``disaggregate`` reserve their GPUs as a Ray placement group, on one machine or
    several."""

    @property
    def reserves_gpus(self) -> bool:
        """Whether learner and engines have a Ray placement group."""
        return self.mode != "separate"

    @property
    def shares_gpus(self) -> bool:
        """Whether learner and engines share GPUs by time sharing; the idle side has released its memory."""
        return self.mode == "colocate"


_OF_SOURCES = ("env", "tasks", "data", "reward", "rollout", "algo")
"""Sections that differ among the sources of a mixed run."""


class Config(Section):
    """Configuration of a run."""

    run: RunConfig = Field(default_factory=RunConfig)
    """The run's folder and seed."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """The environment."""
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    """The taskset."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Prompts from files."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """A reward function in place of the environment's."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Sources of tasks of a mixed run, by name; without any, the run has one environment. docs/how_to/mixed.md."""
    tools: dict[str, ToolConfig] = Field(default_factory=dict)
    """Tool servers, by the tool's name."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """The sandbox of tool servers that the run starts."""
    containers: ContainersConfig = Field(default_factory=ContainersConfig)
    """Machines in which tasks of containers are played and graded. docs/how_to/containers.md."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy."""
    render: RenderConfig = Field(default_factory=RenderConfig)
    """The chat format."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """The engines and sampling parameters."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Episodes and their failure policy."""
    self_play: SelfPlayConfig | None = None
    """Opponents of the policy in environments of several agents; null: the policy plays all agents. docs/how_to/self_play.md."""
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    """The algorithm."""
    batch: BatchConfig = Field(default_factory=BatchConfig)
    """Training batches."""
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    """The learner."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """GPUs of the learner and the engines."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """Weight sync."""
    asynchronous: AsyncConfig = Field(default_factory=AsyncConfig, alias="async")
    """Sampling while the learner trains."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Length, evaluation and checkpoints."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation."""
    sft: SftConfig = Field(default_factory=SftConfig)
    """Supervised fine-tuning, for ``agentrl sft``."""
    obs: ObsConfig = Field(default_factory=ObsConfig)
    """Terminal output, trackers, traces and recorded rollouts."""

    @field_validator("sources")
    @classmethod
    def _names(cls, sources: dict[str, SourceConfig]) -> dict[str, SourceConfig]:
        for name in sources:
            if not re.fullmatch(r"\w[\w-]*", name):
                raise ValueError(f"the name {name!r} becomes part of task ids and metrics: letters, digits, _ - only")
        return sources

    @field_serializer("sources")
    def _as_given(self, sources: dict[str, SourceConfig], info: SerializationInfo) -> dict[str, Any]:
        """Write only the keys that each source sets, so that the others are still those of the run after reading back."""
        mode = "json" if info.mode_is_json() else "python"
        return {name: source.model_dump(mode=mode, exclude_unset=True) for name, source in sources.items()}

    @property
    def max_tokens(self) -> int:
        """``rollout.max_tokens``; in a mixed run the largest value of its sources."""
        return max(config.rollout.max_tokens for config in self.by_source().values())

    @property
    def label(self) -> str:
        """The environment's name; in a mixed run the names of the sources."""
        return "+".join(self.sources) if self.sources else self.env.name

    def by_source(self) -> dict[str, Config]:
        """Return the configuration of each source as that of a run with one environment, in their order.

        Without ``sources`` it is this one, named ``""``.
        """
        if not self.sources:
            return {"": self}
        run = self.model_dump(include={*_OF_SOURCES})
        return {name: self._source_config(put_source_on(run, source)) for name, source in self.sources.items()}

    def _source_config(self, tree: dict[str, Any]) -> Config:
        sections = {name: type(getattr(self, name)).model_validate(tree[name]) for name in _OF_SOURCES}
        return self.model_copy(update={**sections, "sources": {}})

    @model_validator(mode="after")
    def _resolve_correction(self) -> Config:
        """Choose the ratio's denominator, and the correction, by the engine."""
        algo, by_learner = self.algo, self.sampler.renormalise == "learner"
        if algo.old_logprobs == "auto":
            algo.old_logprobs = "learner" if self.sampler.uses_sglang or by_learner else "sampler"
        if algo.correction.rollout_is == "auto":
            corrects = algo.old_logprobs == "learner" and not by_learner
            algo.correction.rollout_is = "token" if corrects else "none"
        return self

    @model_validator(mode="after")
    def _resolve_sft(self) -> Config:
        """Choose length and context weight of supervised fine-tuning: files and rollouts have epochs, demonstrations steps."""
        sft = self.sft
        has_epochs = self.data.path is not None or sft.rollouts.path is not None
        if sft.context_weight is None:
            sft.context_weight = 0.0 if has_epochs else 0.3
        if sft.steps is None and sft.epochs is None:
            sft.steps, sft.epochs = (None, 1.0) if has_epochs else (1000, None)
        return self

    @model_validator(mode="after")
    def _resolve_policies(self) -> Config:
        """Give the names of ``env.roles.ROLE.policy`` to ``learner.lora``, which learner ranks get."""
        lora, names = self.learner.lora, [*self.env.policies]
        if lora is None or not names or lora.policies == names:
            return self
        if "policies" in lora.model_fields_set:
            raise ValueError(
                f"learner.lora.policies={lora.policies}, and env.roles names the policies {names}; leave out "
                "learner.lora.policies"
            )
        lora.policies = names
        return self

    @model_validator(mode="after")
    def _resolve_sources(self) -> Config:
        """Give the algorithm of every source to the section ``algo``, which learner ranks get."""
        algorithms = {name: config.algo for name, config in self.by_source().items()} if self.sources else {}
        self.algo.set_sources(algorithms)
        return self
