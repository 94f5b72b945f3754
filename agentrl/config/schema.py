"""The configuration of a run, whole."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.algo import AlgoConfig
from agentrl.config.base import Section
from agentrl.config.data import DataConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.reward import RewardConfig
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
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy."""
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
