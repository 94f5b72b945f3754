"""The configuration of a run, whole."""

from __future__ import annotations

from typing import Any

from pydantic import Field, model_validator

from agentrl.config.algo import AlgoConfig
from agentrl.config.base import Section
from agentrl.config.checks import transport_fault
from agentrl.config.data import DataConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.placement import PlacementConfig
from agentrl.config.render import RenderConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.sections import (
    BatchConfig,
    EnvConfig,
    ModelConfig,
    ObsConfig,
    RolloutConfig,
    RunConfig,
    SamplerConfig,
    TasksConfig,
    ToolConfig,
    TrainConfig,
    WeightsConfig,
)
from agentrl.config.sft import SftConfig
from agentrl.core.errors import ConfigError


class Config(Section):
    """Everything a run is made of."""

    run: RunConfig = Field(default_factory=RunConfig)
    """Where the run lies, and its seed."""
    env: EnvConfig = Field(default_factory=EnvConfig)
    """The environment."""
    tasks: TasksConfig = Field(default_factory=TasksConfig)
    """The problems."""
    data: DataConfig = Field(default_factory=DataConfig)
    """Problems from files."""
    reward: RewardConfig = Field(default_factory=RewardConfig)
    """The reward function, where it is not the environment's own."""
    tools: dict[str, ToolConfig] = Field(default_factory=dict)
    """Tool servers, by the tool's name."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """Where tool servers that the run starts run code."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy."""
    render: RenderConfig = Field(default_factory=RenderConfig)
    """Messages to tokens and back."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """The engine and how it samples."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """The episodes."""
    algo: AlgoConfig = Field(default_factory=AlgoConfig)
    """The algorithm."""
    batch: BatchConfig = Field(default_factory=BatchConfig)
    """From rollouts to batches."""
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    """The learner."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """Which GPUs the learner and the engines get."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """The way of new weights to the engine."""
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Length, checkpoints and evaluation of training."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """What an evaluation is."""
    sft: SftConfig = Field(default_factory=SftConfig)
    """Supervised fine-tuning, for ``agentrl sft``."""
    obs: ObsConfig = Field(default_factory=ObsConfig)
    """What is shown and recorded."""

    def tool_options(self, name: str, *, sandboxed: bool = False) -> dict[str, Any]:
        """Return ``tools.NAME.options``, for a tool that runs code with the ``sandbox`` section as ``sandbox``.

        Raises:
            ConfigError: the options have such a section of their own.

        """
        options = dict(self.tools[name].options) if name in self.tools else {}
        if not sandboxed:
            return options
        if "sandbox" in options:
            raise ConfigError(
                f"tools.{name}.options.sandbox: all tools share the section sandbox; set sandbox.backend=… there"
            )
        return {**options, "sandbox": self.sandbox.model_dump(mode="json")}

    @model_validator(mode="after")
    def _batches(self) -> Config:
        fault = batch_fault(self)
        if fault is not None:
            raise ValueError(fault)
        return self

    @model_validator(mode="after")
    def _transport(self) -> Config:
        fault = transport_fault(self.weights, self.placement, self.learner, self.sampler)
        if fault is not None:
            raise ValueError(fault)
        return self


def batch_fault(config: Config) -> str | None:
    """Return what is wrong with how a step's rollouts are divided into optimizer steps, or how old they are, or None.

    As in slime, ``rollout.batch_size`` x ``rollout.n_samples_per_prompt`` must be ``batch.global_batch_size`` x
    ``train.steps_per_rollout``; and an optimizer step takes whole groups.
    """
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    wanted, steps = config.batch.global_batch_size, config.train.steps_per_rollout
    if steps > 1 and config.algo.old_logprobs == "learner":
        return (
            f"algo.old_logprobs=learner with train.steps_per_rollout={steps}: the ratio would be 1 in every optimizer "
            "step and nothing would keep the policy near the one that sampled; set algo.old_logprobs=sampler"
        )
    if config.weights.sync_every > 1 and config.algo.old_logprobs == "learner":
        return (
            f"algo.old_logprobs=learner with weights.sync_every={config.weights.sync_every}: engines sample with older weights "
            "than the learner's, and nothing would correct for it; set algo.old_logprobs=sampler"
        )
    shown = wanted if wanted is not None else f"{prompts * samples / steps:g}"
    if prompts % steps == 0 and wanted in (None, prompts * samples // steps):
        return None
    if prompts * samples == (wanted or 0) * steps or wanted is None:
        why = f"an optimizer step takes whole groups, and {prompts} prompts cannot be divided into {steps} parts"
    else:
        why = f"{prompts} x {samples} = {prompts * samples} rollouts a step, but {wanted} x {steps} = {(wanted or 0) * steps}"
    return (
        f"rollout.batch_size={prompts} x rollout.n_samples_per_prompt={samples} must be "
        f"batch.global_batch_size={shown} x train.steps_per_rollout={steps}: {why}; set for example {_fitting(config)}"
    )


def _fitting(config: Config) -> str:
    """Return settings near the given ones that fit together."""
    prompts, samples = config.rollout.batch_size, config.rollout.n_samples_per_prompt
    wanted, steps = config.batch.global_batch_size, config.train.steps_per_rollout
    if prompts % steps == 0:
        return f"batch.global_batch_size={prompts // steps * samples}"
    if wanted is not None and wanted % samples == 0:
        return f"rollout.batch_size={wanted // samples * steps}"
    more = -(-prompts // steps) * steps
    return f"rollout.batch_size={more}" + (f" batch.global_batch_size={more // steps * samples}" if wanted else "")
