"""Base classes of advantage estimators and policy losses, and what they get and return.

Legend: ``N`` tokens at the loss mask of a micro-batch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from agentrl.batch.groups import RolloutGroups
from agentrl.config.base import Section
from agentrl.core.types import RowKey

MAX_LOG_RATIO = 20.0
"""Log-ratios are clamped to this before they are exponentiated: an infinite ratio has no gradient but NaN."""
RowValues = Mapping[RowKey, NDArray[np.float32]]
"""By row: ``[T]``, a value of each token; values at tokens that are not trained are ignored."""
Advantages = Mapping[str, float] | RowValues
"""One number a rollout, by ``rollout_id``, or ``[T]`` numbers a row, by its key."""


class Algorithm(ABC):
    """What estimators and policy losses have in common: options, and the name in the configuration.

    Args:
        options: an instance of the class's ``Options``.
        name: ``algo.advantage.name`` or ``algo.loss.name``, for messages; by default the name of the class.
    """

    class Options(Section):
        """The options, one field each; a subclass with options derives its own from this class."""

    options: Options

    def __init__(self, options: Section | None = None, name: str | None = None) -> None:
        options = self.Options() if options is None else options
        assert isinstance(options, self.Options), f"{type(self).__name__} has other options than {options!r}"
        self.options = options
        self.name = name or type(self).__name__


@dataclass(frozen=True, slots=True)
class AdvantageInput:
    """The whole rollouts of a training step, or with ``async.streaming`` of some of its groups."""

    groups: RolloutGroups
    """All rollouts that were not dropped, by task."""
    kl: RowValues = field(default_factory=dict)
    """The KL penalty of each token, ``kl_coef`` times its estimate, if it belongs to the reward; else empty."""
    values: RowValues = field(default_factory=dict)
    """The critic's value of the state in which each token was sampled; empty without a critic."""


class AdvantageEstimator(Algorithm):
    """Computes advantages from whole rollouts, on the driver. A run has one instance for each source of tasks.

    The class attributes declare what the estimator needs; configurations are checked against them before a run starts.
    """

    compares_group: ClassVar[bool] = False
    """Whether it compares the rollouts of a task with each other, so that a task with a single rollout has no advantage."""
    streams: ClassVar[bool] = False
    """Whether the advantages of a group depend on no other group of the training step, as ``async.streaming`` requires."""
    needs_critic: ClassVar[bool] = False
    """Whether it reads `AdvantageInput.values`. Then the run has a critic, which learns to predict `returns`."""
    needs_nonnegative_rewards: ClassVar[bool] = False
    """Whether rewards must be at least 0, so that penalties may not be taken off them."""
    needs_several_rewards: ClassVar[bool] = False
    """Whether it reads `Rollout.rewards`, which only ``reward.functions`` sets."""
    role_options: ClassVar[tuple[str, ...]] = ()
    """Options that list roles of the environment. With any, the environment must be one of several agents."""

    @abstractmethod
    def advantages(self, inputs: AdvantageInput) -> Advantages:
        """Return an advantage for every rollout, or for every row."""

    def returns(self, inputs: AdvantageInput) -> RowValues:
        """Return the training targets of the critic for every trained token; only called with ``needs_critic``."""
        raise NotImplementedError(f"{type(self).__name__} has needs_critic=True and no method `returns`")

    def update(self, inputs: AdvantageInput) -> None:
        """Update the state after a training step, whose advantages were computed with the state before it."""

    def state(self) -> dict[str, Any]:
        """Return a copy of the state as JSON, for checkpoints; empty without a state."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned, after a round trip through JSON."""

    def metrics(self, source: str = "") -> dict[str, float]:
        """Return metrics of the state by their full names.

        Args:
            source: the name of the estimator's source, to be part of the metrics' names; empty unless the run is mixed.
        """
        return {}


class TokenScores(NamedTuple):
    """What a learner computes of ``N`` tokens, on its device and with gradients."""

    scores_N: torch.Tensor
    """Log-probabilities or a critic's values, at least float32."""
    entropy_N: torch.Tensor | None
    """Entropies (nats) of the tokens' distributions; None if none were requested."""
    centering_N: torch.Tensor | None = None
    """``Σ c · log p`` over the ids of each token's sampling support, of `agentrl.algo.score_centering`; None without."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """The fields of a micro-batch at its loss mask, on the device; all float32 ``[N]`` unless noted."""

    weight_N: torch.Tensor
    """Each token's share of the global batch; the driver has already divided by the denominator."""
    advantages_N: torch.Tensor
    """0 in supervised batches."""
    logprobs_N: torch.Tensor
    """The sampler's log-probabilities, at the learner's temperature; 0 in supervised batches."""
    sequence_N: torch.Tensor | None = None
    """int64 number of the token's sequence in the micro-batch: all that one agent sampled in a rollout."""
    sequence_size_N: torch.Tensor | None = None
    """Tokens of that sequence in the global batch, of which some may be in other micro-batches."""
    learner_logprobs_N: torch.Tensor | None = None
    """The learner's log-probabilities before the first optimizer step of the training step, if they were computed."""
    correction_N: torch.Tensor | None = None
    """Importance weights that the driver computed; 0 for rejected tokens."""
    sequence_log_ratio_N: torch.Tensor | None = None
    """Mean log-ratio of the token's sequence, if it is divided among micro-batches; else losses compute it."""
    reference_logprobs_N: torch.Tensor | None = None
    """The reference policy's, at the same temperature; None if the loss needs none."""
    values_N: torch.Tensor | None = None
    """The critic's values before the first optimizer step of the training step, in its batches."""
    returns_N: torch.Tensor | None = None
    """The targets of the critic's values, in its batches."""
    entropy_N: torch.Tensor | None = None
    """Entropies (nats) of the learner's distributions, with a gradient; None if the loss needs none."""
    centering_N: torch.Tensor | None = None
    """See `TokenScores.centering_N`; None without score centering."""
    source_tokens: Mapping[int, torch.Tensor] = field(default_factory=dict)
    """int64 places among ``N`` of the tokens of each source of a mixed run, by its number; sources without tokens are
    left out. The sizes are known on the host, so nothing waits for a GPU."""
    sequences: int | None = None
    """Sequences of the micro-batch: above every number in ``sequence_N``."""

    def at(self, places_M: torch.Tensor) -> LossInput:
        """Return the fields at some of the tokens, int64 ``[M]``."""
        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        tensors: dict[str, Any] = {
            name: tensor_N[places_M] for name, tensor_N in columns.items() if isinstance(tensor_N, torch.Tensor)
        }
        return replace(self, source_tokens={}, **tensors)

    def sequence_mean(self, values_N: torch.Tensor) -> torch.Tensor:
        """Return the mean of values over each token's sequence, ``[N]``, for sequences that are whole in the micro-batch."""
        assert self.sequence_N is not None, "supervised batches have no sequences"
        assert self.sequence_size_N is not None
        return over_sequences(values_N, self.sequence_N, "sum", self.sequences) / self.sequence_size_N


def over_sequences(
    values_N: torch.Tensor, sequence_N: torch.Tensor, reduce: str, sequences: int | None = None
) -> torch.Tensor:
    """Return the reduced value (``sum``, ``mean`` or ``amax``) of each token's sequence, ``[N]``.

    Args:
        values_N: of tokens.
        sequence_N: int64 numbers of their sequences.
        reduce: how.
        sequences: above every number; None computes it, for which the host waits for a GPU.
    """
    if sequences is None:
        sequences = int(sequence_N.max()) + 1 if len(sequence_N) else 0
    reduced_S = values_N.new_zeros(sequences).scatter_reduce(0, sequence_N, values_N, reduce, include_self=False)
    return reduced_S[sequence_N]


@dataclass(slots=True)
class LossMetrics:
    """Metrics of one micro-batch as scalars without gradient, in a form that adds up over micro-batches and ranks."""

    sums: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums over tokens; divided by the number of tokens of the global batch for the log."""
    totals: dict[str, torch.Tensor] = field(default_factory=dict)
    """Sums weighted like the loss; logged as they are."""
    maxima: dict[str, torch.Tensor] = field(default_factory=dict)
    """Maxima; without any token they hold the smallest possible value."""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    """``[2]`` sums of the tokens' weights and of their squares; logged as the effective sample size."""


@dataclass(frozen=True, slots=True)
class TokenLoss:
    """What a policy loss returns."""

    loss_N: torch.Tensor
    """Loss of each token, with gradient; it is multiplied by ``weight_N`` and summed."""
    clipped_N: torch.Tensor
    """bool: where clipping or masking makes the gradient 0."""


class PolicyLoss(Algorithm):
    """Computes the loss of each token, on every rank. The class attributes declare what it needs."""

    one_advantage_per_sequence: ClassVar[bool] = False
    """Whether all tokens that an agent sampled in a rollout get the mean of their advantages."""
    needs_whole_sequences: ClassVar[bool] = False
    """Whether it reads `LossInput.sequence_log_ratio_N`, which is computed if micro-batches divide sequences."""

    @abstractmethod
    def token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        """Return the loss of each token.

        Args:
            logprobs_N: of the policy, with gradient.
            old_N: of the policy in the ratio's denominator (``algo.old_logprobs``), without gradient.
            inputs: advantages and the other fields of the micro-batch.
        """


Loss = Callable[[torch.Tensor, LossInput], tuple[torch.Tensor, LossMetrics]]
"""Returns ``Σ weight · loss`` over the mask of a micro-batch, a scalar, and its metrics, from the scores of tokens: policy loss,
KL term and entropy bonus, or the loss of supervised fine-tuning."""
