"""The ``algo`` section: advantage estimator, policy loss, and what keeps the policy near other policies."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, PrivateAttr

from agentrl.config.base import Section
from agentrl.config.learner import OptimizerConfig

KlKind = Literal["k1", "k2", "k3", "low_var_kl"]
"""See `agentrl.algo.kl.kl_estimate`."""
RejectionKind = Literal[
    "token_k1", "token_k2", "token_k3",
    "seq_sum_k1", "seq_sum_k2", "seq_sum_k3",
    "seq_mean_k1", "seq_mean_k2", "seq_mean_k3",
    "seq_max_k2", "seq_max_k3",
]  # fmt: skip
"""See `agentrl.algo.correction.rejected`."""


class AdvantageConfig(Section):
    """The advantage estimator."""

    name: str = "grpo"
    """A name of docs/reference/algorithms.md, such as ``rloo``; or a class as ``module:Class`` or ``FILE.py:Class``."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Options of the estimator."""


class LossConfig(Section):
    """The policy loss of a token."""

    name: str = "ppo_clip"
    """A name of docs/reference/algorithms.md, such as ``gspo``; or a class as ``module:Class`` or ``FILE.py:Class``."""
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
    """The critic of estimators that need one, such as ``gae``: it learns the values of states.

    It has its own ranks, as many as ``learner.ranks``.
    """

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
    """On-policy distillation from teachers, on top of the rewards' advantages or in their place. docs/how_to/distillation.md."""

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
    """The objective. docs/reference/algorithms.md has each algorithm with its formula."""

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
    routers (R3, arXiv:2510.11370). For models with experts; docs/reference/algorithms.md says which."""
    score_centering: bool = False
    """Take the engine's expected score off the gradient of each token, so that a difference between engine and learner does not
    move the policy by itself (arXiv:2609.20807). It needs ``sampler.renormalise=engine`` and ``algo.loss.name=reinforce``;
    docs/reference/algorithms.md."""
    overlong: OverlongConfig = Field(default_factory=OverlongConfig)
    """A penalty for long rollouts."""
    reward_post_process: str | None = None
    """A function that turns the rewards of a training step into those that advantages are computed from, after ``algo.overlong``:
    ``module:function`` or ``FILE.py:function`` (slime's ``custom_reward_post_process_path``). docs/how_to/own_functions.md."""
    critic: CriticConfig = Field(default_factory=CriticConfig)
    """The critic of estimators that need one, such as ``gae``."""

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
    def replays_routing(self) -> bool:
        """Whether the learner's routers take the experts of an engine's, in any source."""
        return any(algo.routing_replay for algo in self.by_source.values())

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
        return self.has_kl or any(teacher.policy == "reference" for teacher in self.distillation.teachers.values())

    @property
    def needs_entropy(self) -> bool:
        """Whether the loss needs entropies with a gradient."""
        return self.entropy_coef > 0

    @property
    def trains_everything(self) -> bool:
        """Whether tokens without an advantage have a gradient too."""
        return (self.has_kl and self.kl_in == "loss") or self.needs_entropy
