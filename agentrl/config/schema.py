"""A run's configuration, one field a section."""

from __future__ import annotations

from pydantic import Field

from agentrl.config.algo import AlgoConfig
from agentrl.config.base import Section
from agentrl.config.batch import BatchConfig
from agentrl.config.env import EnvConfig
from agentrl.config.evaluation import EvalConfig
from agentrl.config.learner import LearnerConfig
from agentrl.config.model import ModelConfig
from agentrl.config.obs import ObsConfig
from agentrl.config.placement import PlacementConfig
from agentrl.config.render import RenderConfig
from agentrl.config.reward import RewardConfig
from agentrl.config.rollout import RolloutConfig
from agentrl.config.run import RunConfig
from agentrl.config.sampler import SamplerConfig
from agentrl.config.sandbox import SandboxConfig
from agentrl.config.sft import SftConfig
from agentrl.config.tasks import DataConfig, TasksConfig
from agentrl.config.tools import ToolConfig
from agentrl.config.train import TrainConfig
from agentrl.config.weights import WeightsConfig


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
