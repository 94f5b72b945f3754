"""The ``algo`` section: advantage estimator, policy loss, and what keeps the policy near other policies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, PrivateAttr

from agentrl.config.base import Section
from agentrl.config.learner import OptimizerConfig
from agentrl.config.validation import parse_section
from agentrl.core.errors import unknown_name

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
"""See `agentrl.algo.kl.kl_estimate`."""
RejectionKind = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""See `agentrl.algo.correction.rejected`."""


class NoOptions(Section):
    """No options."""


class GrpoAdvantage(Section):
    """``grpo``: group-relative advantages (DeepSeekMath, arXiv:2402.03300)."""

    std_normalise: bool = True
    """Divide by the standard deviation (n - 1) of the group's rewards. Dr.GRPO (arXiv:2503.20783) does not."""
    std_eps: PositiveFloat = 1e-6
    """Added to that standard deviation, so that nearly equal rewards do not explode."""


class ReinforcePlusPlusAdvantage(Section):
    """``reinforce_plus_plus``: discounted returns, normalised over all sampled tokens (REINFORCE++, arXiv:2501.03262)."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a sampled token."""


class MaxRlAdvantage(Section):
    """``maxrl``: the group's centred rewards, which are at least 0, divided by their mean (MaxRL, arXiv:2602.02710)."""

    eps: PositiveFloat = 1e-6
    """Added to that mean."""


class GaeAdvantage(Section):
    """``gae``: generalised advantage estimation with a critic (arXiv:1506.02438), for PPO."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a step."""
    lam: float = Field(default=1.0, ge=0, le=1)
    """1 takes the whole return, 0 the temporal difference of one step."""
    step: Literal["token", "turn"] = "token"
    """A time step: every sampled token, or every turn of the policy. Observed tokens are never one."""
    normalise: bool = True
    """Normalise advantages over all sampled tokens of the training step."""


class TurnLevelAdvantage(Section):
    """``turn_level``: the return from each turn on, minus its mean over the group's rollouts that reached the turn."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a turn."""


class RaeAdvantage(Section):
    """``rae``: the reward minus a moving mean of the rewards of its role and class of opponents (SPIRAL, arXiv:2506.24119)."""

    decay: float = Field(default=0.95, ge=0, lt=1)
    """Factor of the older rewards' weights for each further reward."""
    by_role: bool = True
    """A baseline for each role and class of opponents; with ``false`` one for all rollouts, to compare with."""


class AtGrpoAdvantage(GrpoAdvantage):
    """``at_grpo``: the return from each turn on, relative to the same turn of the same agent (AT-GRPO, arXiv:2510.11062)."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a turn."""


class HierarchicalGrpoAdvantage(GrpoAdvantage):
    """``hierarchical_grpo``: group-relative by role, of some roles within their episode."""

    within_episode: tuple[str, ...] = ("solver",)
    """Roles that are compared within an episode; the others are compared across the task's episodes."""


class AgentNormAdvantage(Section):
    """``agent_norm``: the return from each turn on, normalised over all turns of its role (MARSHAL, arXiv:2510.15414)."""

    gamma: float = Field(default=1.0, gt=0, le=1)
    """Discount of a turn."""
    std_eps: PositiveFloat = 1e-6
    """Added to the standard deviation (n - 1)."""


class PpoClipLoss(Section):
    """``ppo_clip``: PPO's clipped objective (arXiv:1707.06347), with two bounds as in DAPO (arXiv:2503.14476)."""

    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """The ratio of new to old probability gains nothing below ``1 - clip_low``."""
    clip_high: float = Field(default=0.2, gt=0)
    """The ratio of new to old probability gains nothing above ``1 + clip_high``; DAPO's clip-higher is 0.28."""
    dual_clip: float | None = Field(default=None, gt=1)
    """With a negative advantage, the ratio costs nothing above this (dual-clip PPO, arXiv:1912.09729; 3 is usual)."""


class GspoLoss(Section):
    """``gspo``, ``gspo_token``: one clipped ratio for all that an agent sampled in a rollout (GSPO, arXiv:2507.18071)."""

    clip_low: float = Field(default=3e-4, gt=0, lt=1)
    """The sequence's ratio gains nothing below ``1 - clip_low``."""
    clip_high: float = Field(default=4e-4, gt=0)
    """The sequence's ratio gains nothing above ``1 + clip_high``."""


class CispoLoss(Section):
    """``cispo``: REINFORCE with the ratio as a weight, clipped from above (MiniMax-M1, arXiv:2506.13585)."""

    clip_high: float = Field(default=2.0, gt=0)
    """The ratio's upper limit is ``1 + clip_high``; it has no lower one."""


class DppoLoss(Section):
    """``dppo``: tokens are masked whose divergence from the old policy is too large (arXiv:2602.04879)."""

    divergence: Literal["tv", "kl"] = "tv"
    """Total variation or KL divergence between the old and the new policy, of the sampled token against all others."""
    clip_low: float = Field(default=0.2, gt=0)
    """Tokens with a negative advantage are masked if their ratio is below 1 and the divergence is above this."""
    clip_high: float = Field(default=0.2, gt=0)
    """Tokens with a positive advantage are masked if their ratio is above 1 and the divergence is above this."""
    ratio_limit: float = Field(default=20.0, gt=1)
    """Upper limit of the ratio, which is a weight without gradient."""


ADVANTAGES: dict[str, type[Section]] = {
    "grpo": GrpoAdvantage,
    "rloo": NoOptions,
    "reinforce_plus_plus": ReinforcePlusPlusAdvantage,
    "reinforce_plus_plus_baseline": NoOptions,
    "maxrl": MaxRlAdvantage,
    "gae": GaeAdvantage,
    "turn_level": TurnLevelAdvantage,
    "rae": RaeAdvantage,
    "at_grpo": AtGrpoAdvantage,
    "hierarchical_grpo": HierarchicalGrpoAdvantage,
    "seat_grpo": GrpoAdvantage,
    "agent_norm": AgentNormAdvantage,
}
"""The options of each estimator."""
LOSSES: dict[str, type[Section]] = {
    "ppo_clip": PpoClipLoss,
    "gspo": GspoLoss,
    "gspo_token": GspoLoss,
    "cispo": CispoLoss,
    "reinforce": NoOptions,
    "dppo": DppoLoss,
}
"""The options of each loss."""


_GROUP_RELATIVE = ("grpo", "rloo", "maxrl", "turn_level", "at_grpo", "hierarchical_grpo", "seat_grpo")


class AdvantageConfig(Section):
    """The advantage estimator."""

    name: str = "grpo"
    """``grpo``, ``rloo``, ``reinforce_plus_plus``, ``reinforce_plus_plus_baseline``, ``maxrl``, ``gae``, ``turn_level``; for
    self-play ``rae``, ``at_grpo``, ``hierarchical_grpo``, ``seat_grpo``, ``agent_norm``; or a function as ``module:function``
    or ``FILE.py:function``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator."""

    @property
    def compares_group(self) -> bool:
        """Whether the estimator compares the rollouts of a group with each other, and with no others."""
        return self.name in _GROUP_RELATIVE


class LossConfig(Section):
    """The policy loss of a token."""

    name: str = "ppo_clip"
    """``ppo_clip``, ``gspo``, ``gspo_token``, ``cispo``, ``reinforce``, ``dppo``, or a function as ``module:function`` or
    ``FILE.py:function``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the loss."""


class CorrectionConfig(Section):
    """Correction of the gap between engine and learner, in the words of verl's rollout correction.

    The ratio is the learner's probability of a token over the engine's.
    """

    rollout_is: Literal["auto", "token", "geometric", "sequence", "none"] = "auto"
    """Importance weights: the ratio of each token, its geometric mean over a sequence (all that an agent sampled in a
    rollout), or its product. ``auto`` is ``token`` if ``algo.old_logprobs`` is ``learner``, else ``none``."""
    rollout_is_threshold: PositiveFloat = 2.0
    """Upper limit of the weights (truncated importance sampling)."""
    rollout_is_lower: NonNegativeFloat | None = None
    """With a number, weights below it or above ``rollout_is_threshold`` are 0 instead of truncated (masked importance
    sampling, IcePop; 0.5 and 5 are usual)."""
    rollout_is_batch_normalize: bool = False
    """Divide the weights by their mean over the training step."""
    rollout_rs: tuple[RejectionKind, ...] = ()
    """What rejects tokens: a divergence of each token (``token_``), or the sum, mean or maximum over a sequence
    (``seq_``), by the estimator k1, k2 or k3. What is rejected has no gradient; the denominators stay."""
    rollout_rs_threshold: PositiveFloat = 2.0
    """The limit of ``rollout_rs``: of k2 and k3, or of the ratio of k1, whose lower limit is the inverse."""
    m2po_threshold: PositiveFloat | None = None
    """With a number, tokens with the largest squared log-ratios are masked until the mean over the training step is at
    most this (M2PO, arXiv:2510.01161; 0.04 in the paper)."""

    @property
    def active(self) -> bool:
        """Whether there is any correction."""
        return self.rollout_is != "none" or bool(self.rollout_rs) or self.m2po_threshold is not None

    @property
    def needs_all_tokens(self) -> bool:
        """Whether it needs the log-ratios of whole sequences, or of all of the training step, at the same time."""
        levels = self.rollout_is in ("geometric", "sequence") or any(kind.startswith("seq") for kind in self.rollout_rs)
        normalises = self.rollout_is_batch_normalize and self.rollout_is != "none"
        return levels or normalises or self.m2po_threshold is not None


class OverlongConfig(Section):
    """A penalty for long rollouts (DAPO's soft overlong punishment, arXiv:2503.14476, equation 13)."""

    max_tokens: PositiveInt | None = None
    """Sampled tokens of a rollout with the whole penalty; None is no penalty."""
    buffer_tokens: PositiveInt = 512
    """The penalty grows linearly from ``max_tokens - buffer_tokens`` on."""
    penalty: PositiveFloat = 1.0
    """The reward that a rollout of ``max_tokens`` loses."""


class CriticConfig(Section):
    """The critic of ``gae``: a learner of the values of states, with its own ranks, as many as ``learner.ranks``."""

    path: str | None = None
    """Its initial weights: a folder, a shipped model's name or a hub id. Without it, the policy that the run starts with. A
    language head is replaced by a value head of zeros. It must have the policy's tokenizer."""
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig)
    """The critic's optimizer; all other settings are those of ``learner``."""
    value_clip: PositiveFloat | None = 0.5
    """A value gains nothing by moving farther than this from the value before the training step; null does not clip."""
    warmup_steps: int = Field(default=0, ge=0)
    """First steps of the run that train the critic alone."""


class TeacherConfig(Section):
    """A teacher: one of ``url``, ``path`` and ``policy``. It must have the policy's tokenizer."""

    url: str | None = None
    """Address of a running server that speaks SGLang's protocol; ``sglang-router`` puts several behind one."""
    path: str | None = None
    """A folder, a shipped model's name or a hub id. The run starts an engine with it, as ``sampler`` configures its own."""
    policy: Literal["main", "reference"] | None = None
    """Self-distillation: the policy with its weights of the step (``main``, needs ``context``), or ``algo.reference``."""
    context: str | None = None
    """What the teacher reads in place of the first prompt, such as a hint: a text that replaces its last message, with
    ``{message}`` and ``{answer}`` in it, or a function as ``module:function`` or ``FILE.py:function``, which gets the
    finished rollout as a ``Sample`` and returns messages."""
    weight: PositiveFloat = Field(default=1.0, allow_inf_nan=False)
    """Share in the weighted mean of several teachers."""


class DistillationConfig(Section):
    """On-policy distillation from teachers, on top of the rewards' advantages or in their place. docs/distillation.md."""

    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """The teachers by name; none is no distillation."""
    coef: PositiveFloat = Field(default=1.0, allow_inf_nan=False)
    """Weight of the term: this times the difference of the log-probabilities, the policy's minus the teacher's, is taken off
    each token's advantage (slime's ``opd_kl_coef``)."""
    reward_coef: NonNegativeFloat = Field(default=1.0, allow_inf_nan=False)
    """Weight of the advantages that the estimator computes from rewards. 0 trains on the teachers alone: no reward is needed."""
    task_key: str | None = None
    """Key of a task's metadata with the name of its teacher. Without it, every teacher scores every rollout, and the term
    has the weighted mean of their log-probabilities."""
    default: str | None = None
    """Teacher of tasks without that key, or with a value that names no teacher; without it, such a task ends the run."""


class AlgoConfig(Section):
    """The objective. docs/algorithms.md has each algorithm with its formula."""

    advantage: AdvantageConfig = Field(default_factory=AdvantageConfig)
    """The advantage estimator."""
    loss: LossConfig = Field(default_factory=LossConfig)
    """The policy loss."""
    old_logprobs: Literal["auto", "sampler", "learner"] = "auto"
    """The log-probabilities in the ratio's denominator: those the engine sampled with, or the learner's before the first
    optimizer step of the training step, with ``algo.correction`` for the difference. ``auto`` is ``sampler`` for the
    embedded engine, which computes as a learner in float32 does, else ``learner``."""
    correction: CorrectionConfig = Field(default_factory=CorrectionConfig)
    """Correction of the gap between engine and learner."""
    kl_coef: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)
    """Weight of the KL term to the reference policy (slime's ``kl_loss_coef``; Search-R1 takes 0.001). 0 loads no
    reference. In the loss, rollouts without an advantage are trained on too."""
    kl_kind: KlKind = "k3"
    """Estimator of that term: ``k3`` is GRPO's; ``low_var_kl`` is k3 cut off at 10, as verl and slime have it; ``k2`` has
    the exact gradient of the KL on fresh samples, ``k1`` one of 0 in the mean (Schulman, "Approximating KL Divergence")."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the term is: in the loss of every token, or in its reward, before advantages are computed (as in RLHF)."""
    reference: str | None = None
    """The frozen policy of the KL term: a folder, a shipped model's name or a hub id. Without it, the policy that the run
    started with (``model.path``, after its warm start), after ``--resume`` too; with ``learner.lora`` that is the policy without
    its adapters, and no second model is loaded. It must have the policy's tokenizer."""
    reference_steps: int = Field(default=0, ge=0)
    """Steps after which the reference becomes the policy, again and again; 0 keeps it."""
    entropy_coef: NonNegativeFloat = Field(default=0.0, allow_inf_nan=False)
    """Weight of the entropy bonus: so much of the entropy (nats) of the distribution that each trained token is from is
    taken off its loss, which keeps a policy exploring (Mnih et al., arXiv:1602.01783; Search-R1 takes 0.001). With it,
    rollouts without an advantage are trained on too."""
    routing_replay: bool = False
    """Have the learner's routers take the experts that the engine's chose for each token, with weights of the learner's
    routers (R3, arXiv:2510.11370). For models with experts; docs/algorithms.md says which."""
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    """A penalty for long rollouts."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The critic of ``algo.advantage.name=gae``."""

    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    """On-policy distillation."""

    _by_source: dict[str, AlgoConfig] = PrivateAttr(default_factory=dict)

    @property
    def by_source(self) -> dict[str, AlgoConfig]:
        """The algorithm of each source of a mixed run, in the order of ``sources``; else this one, named ``""``."""
        return self._by_source or {"": self}

    def set_sources(self, algorithms: dict[str, AlgoConfig]) -> None:
        """Set the algorithms of a mixed run's sources."""
        self._by_source = algorithms

    @property
    def described(self) -> str:
        """Estimator, teachers and loss in a few words, of every source."""
        if self._by_source:
            return "; ".join(f"{name}: {each.described}" for name, each in self._by_source.items())
        teachers = self.distillation.teachers
        estimator = [f"{self.advantage.name} advantages"] if self.distillation.reward_coef or not teachers else []
        distillation = [f"distillation from {', '.join(teachers)}"] if teachers else []
        critic = ["a critic"] if self.needs_critic else []
        return ", ".join([*estimator, *distillation, f"{self.loss.name} loss", *critic])

    @property
    def needs_critic(self) -> bool:
        """Whether an estimator needs a critic."""
        return any(each.advantage.name == "gae" for each in self.by_source.values())

    @property
    def replays_routing(self) -> bool:
        """Whether the learner's routers take the experts of an engine's, in any source."""
        return any(each.routing_replay for each in self.by_source.values())

    @property
    def needs_reward(self) -> bool:
        """Whether advantages are computed from rewards, and not by teachers alone."""
        return self.distillation.reward_coef > 0

    @property
    def has_kl(self) -> bool:
        """Whether there is a KL term."""
        return self.kl_coef > 0

    @property
    def needs_reference(self) -> bool:
        """Whether a reference policy is needed: for the KL term, or as a teacher."""
        return self.has_kl or any(one.policy == "reference" for one in self.distillation.teachers.values())

    @property
    def needs_sequences(self) -> bool:
        """Whether a loss needs the ratio of whole sequences."""
        return any(each.loss.name in ("gspo", "gspo_token") for each in self.by_source.values())

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs entropies with a gradient."""
        return self.entropy_coef > 0

    @property
    def trains_everything(self) -> bool:
        """Whether tokens without an advantage have a gradient too."""
        return (self.has_kl and self.kl_in == "loss") or self.needs_entropy


def parse_options(key: str, config: AdvantageConfig | LossConfig, known: dict[str, type[Section]]) -> Section:
    """Return the options of an estimator or a loss of agentrl.

    Args:
        key: ``algo.advantage`` or ``algo.loss``.
        config: the section.
        known: the options by name.

    Raises:
        ConfigError: there is no such name, or an option is unknown or does not fit.

    """
    if config.name not in known:
        raise unknown_name(key.rpartition(".")[2], config.name, known, f"{key}.name")
    return parse_section(known[config.name], config.options, prefix=f"{key}.options.")
