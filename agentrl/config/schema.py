"""A run's configuration, one field a section."""

from __future__ import annotations

from pydantic import Field, model_validator

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
    tools: dict[str, ToolConfig] = Field(default_factory=dict)
    """Tool servers, by the tool's name."""
    sandbox: SandboxConfig = Field(default_factory=SandboxConfig)
    """The sandbox of tool servers that the run starts."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy."""
    render: RenderConfig = Field(default_factory=RenderConfig)
    """The chat format."""
    sampler: SamplerConfig = Field(default_factory=SamplerConfig)
    """The engines and sampling parameters."""
    rollout: RolloutConfig = Field(default_factory=RolloutConfig)
    """Episodes and their failure policy."""
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
    train: TrainConfig = Field(default_factory=TrainConfig)
    """Length, evaluation and checkpoints."""
    eval: EvalConfig = Field(default_factory=EvalConfig)
    """Evaluation."""
    sft: SftConfig = Field(default_factory=SftConfig)
    """Supervised fine-tuning, for ``agentrl sft``."""
    obs: ObsConfig = Field(default_factory=ObsConfig)
    """Terminal output, trackers and recorded rollouts."""

    @model_validator(mode="after")
    def _resolve_correction(self) -> Config:
        """Choose the ratio's denominator, and the correction, by the engine."""
        algo = self.algo
        if algo.old_logprobs == "auto":
            algo.old_logprobs = "sampler" if self.sampler.backend == "embedded" else "learner"
        if algo.correction.rollout_is == "auto":
            algo.correction.rollout_is = "token" if algo.old_logprobs == "learner" else "none"
        return self
