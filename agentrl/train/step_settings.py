"""What the training steps of a run have in common: packing, the passes before the first optimizer step, learning rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from agentrl.algo.registry import needs_critic
from agentrl.batch.lr_schedule import lr_scale
from agentrl.batch.packing import PackOptions
from agentrl.config.algo import AlgoConfig
from agentrl.config.learner import OptimizerConfig
from agentrl.config.schema import Config
from agentrl.learner.base import CriticGroup, LearnerGroup
from agentrl.learner.registry import make_backend


def pack_options(config: Config, pad_id: int, *models: LearnerGroup | CriticGroup) -> PackOptions:
    """Return how the batches of a run are packed.

    Args:
        config: of the run.
        pad_id: token that fills micro-batches.
        models: learner and critic; prefixes are shared only if all of them can.
    """
    return PackOptions(
        tokens_per_micro=config.batch.tokens_per_micro,
        data_parallel_size=make_backend(config.learner).data_parallel_size,
        pad_id=pad_id,
        share_prefixes=config.batch.share_prefixes and all(model.shares_prefixes for model in models),
        aggregation=config.batch.aggregation,
        constant_tokens=config.batch.constant_tokens or config.rollout.max_tokens,
        temperature=config.sampler.temperature,
        provenance=config.train.provenance,
        sources=tuple(config.sources),
    )


@dataclass(frozen=True, slots=True)
class StepSettings:
    """Settings of a run's training steps."""

    config: Config
    packing: PackOptions

    @property
    def algo(self) -> AlgoConfig:
        """The section ``algo``: common settings; `algo_by_source` has what differs among sources."""
        return self.config.algo

    @property
    def algo_by_source(self) -> Mapping[str, AlgoConfig]:
        """The section ``algo`` of each source of a mixed run; of other runs the only one, by ``""``."""
        return self.config.algo.by_source

    @property
    def needs_learner_logprobs(self) -> bool:
        """Whether log-probabilities of the learner are computed before the first optimizer step of a training step."""
        algo = self.algo
        many_steps = algo.old_logprobs == "learner" and self.config.train.steps_per_rollout > 1
        compares_policies = self.needs_reference_logprobs or bool(algo.distillation.teachers)
        return many_steps or algo.correction.needs_all_tokens or (compares_policies and algo.old_logprobs == "learner")

    @property
    def needs_reference_logprobs(self) -> bool:
        """Whether log-probabilities of the reference policy are, as the KL term is in the reward."""
        return self.algo.has_kl and self.algo.kl_in == "reward"

    @property
    def needs_scores(self) -> bool:
        """Whether a training step begins with forward passes over its rollouts."""
        return self.needs_learner_logprobs or self.needs_reference_logprobs or needs_critic(self.algo)

    def trains_critic_alone(self, step: int) -> bool:
        """Return whether the training step after ``step`` finished ones trains only the critic."""
        return needs_critic(self.algo) and step < self.algo.critic.warmup_steps

    def policy_lr_scale(self, step: int, index: int) -> float:
        """Return the schedule's factor for an optimizer step of the policy, over the training steps that train it.

        Args:
            step: finished training steps.
            index: of the optimizer step in its training step.
        """
        warmup_steps = self.algo.critic.warmup_steps if needs_critic(self.algo) else 0
        return self._lr_scale(self.config.learner.optimizer, step - warmup_steps, index, warmup_steps)

    def critic_lr_scale(self, step: int, index: int) -> float:
        """Return the schedule's factor for an optimizer step of the critic; see `policy_lr_scale`."""
        return self._lr_scale(self.algo.critic.optimizer, step, index, 0)

    def _lr_scale(self, optimizer: OptimizerConfig, step: int, index: int, warmup_steps: int) -> float:
        per_step = self.config.train.steps_per_rollout
        total = (self.config.train.steps - warmup_steps) * per_step
        return lr_scale(optimizer, (step * per_step + index) / total, total, "constant")
