"""The ``algo`` section: the objective."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveFloat

from agentrl.config.base import Section

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
"""See `agentrl.algo.kl.kl_estimate`."""


class GrpoConfig(Section):
    """Group relative policy optimisation (DeepSeekMath, arXiv:2402.03300)."""

    name: Literal["grpo"] = "grpo"
    """The algorithm."""
    std_normalise: bool = True
    """Divide advantages by the standard deviation of their group's rewards."""
    std_eps: PositiveFloat = 1e-6
    """Added to that standard deviation, so that nearly equal rewards do not explode."""
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability gains nothing below ``1 - clip_low``."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio of new to old probability gains nothing above ``1 + clip_high``."""
    old_logprobs: Literal["sampler", "learner"] = "sampler"
    """The log-probabilities in the ratio's denominator: those the engine sampled with, or the learner's of this step
    (the ratio is then 1 and nothing is clipped: the plain policy gradient)."""
    kl_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the KL term to the reference policy in the loss of every token (slime's ``kl_loss_coef``; Search-R1 takes
    0.001). 0 loads no reference. With it, rollouts without an advantage are trained on too."""
    kl_kind: KlKind = "k3"
    """Estimator of that term: ``k3`` is GRPO's; ``low_var_kl`` is k3 cut off at 10, as verl and slime have it; ``k2`` has
    the exact gradient of the KL on fresh samples, ``k1`` one of 0 in the mean (Schulman, "Approximating KL Divergence")."""
    reference: str | None = None
    """The frozen policy of the KL term: a folder, a shipped model's name or a hub id. Without it, the policy that the run
    started with (``model.path``, after its warm start), after ``--resume`` too. It must have the policy's tokenizer."""

    entropy_coef: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    """Weight of the entropy bonus: so much of the entropy (nats) of the distribution that each trained token is from is
    taken off its loss, which keeps a policy exploring (Mnih et al., arXiv:1602.01783; Search-R1 takes 0.001). With it,
    rollouts without an advantage are trained on too."""

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs log-probabilities of a reference policy."""
        return self.kl_coef > 0

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs entropies with a gradient."""
        return self.entropy_coef > 0

    @property
    def trains_everything(self) -> bool:
        """Whether tokens without an advantage have a gradient too."""
        return self.needs_reference or self.needs_entropy


AlgoConfig = GrpoConfig
"""The algorithms that ``algo.name`` chooses from; a union discriminated by ``name`` once there are several."""
