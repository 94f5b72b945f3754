"""The loss of micro-batches, for every learner backend: policy loss, importance correction, KL term and entropy bonus;
and those of supervised and value batches.

Legend: ``N`` tokens at the loss mask of a micro-batch, ``R`` its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from agentrl.algo.base import MAX_LOG_RATIO, Loss, LossInput, LossMetrics, PolicyLoss, TokenLoss, TokenScores
from agentrl.algo.correction import importance_weights
from agentrl.algo.kl import kl_estimate
from agentrl.algo.registry import LOSS_KEY, calling_algorithm, make_policy_loss, needs_whole_sequences
from agentrl.algo.score_centering import centering_coefficients, centering_loss
from agentrl.batch.microbatch import GlobalBatch, Kind, MicroBatch, to_device
from agentrl.config.algo import AlgoConfig
from agentrl.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ValueLoss:
    """``Σ weight · max((V - R)², (clip(V, V_old - c, V_old + c) - R)²) / 2`` with returns R.

    Without clipping it is half the squared error (Schulman et al., arXiv:1707.06347, equation 9); the clipped form is that of
    OpenAI's PPO (Engstrom et al., arXiv:2005.12729, section 3), as in TRL and verl.
    """

    clip: float | None
    """Largest change ``c`` of a value in a training step that the loss rewards; None does not clip."""

    def __call__(self, logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
        """Return the loss of values, which take the place of log-probabilities, and its metrics."""
        values_N, returns_N = logprobs_N, inputs.returns_N
        assert returns_N is not None, "the batch has no returns"
        errors_N = (values_N - returns_N).square()
        clipped_N = torch.zeros_like(errors_N, dtype=torch.bool)
        if self.clip is not None:
            assert inputs.values_N is not None, "the batch has no values of the critic before the training step"
            near_N = torch.clamp(values_N, inputs.values_N - self.clip, inputs.values_N + self.clip)
            clipped_errors_N = (near_N - returns_N).square()
            clipped_N = (clipped_errors_N > errors_N).detach()
            errors_N = torch.maximum(errors_N, clipped_errors_N)
        sums = {"mean": values_N.detach().sum(), "clip_fraction": clipped_N.sum().float()}
        return (inputs.weight_N * errors_N).sum() / 2, LossMetrics(sums=sums)


def sft_loss(logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
    """Return the weighted cross entropy ``-Σ weight · logprob``; its metric ``nll`` is the unweighted mean per token."""
    return -(inputs.weight_N * logprobs_N).sum(), LossMetrics(sums={"nll": -logprobs_N.detach().sum()})


class BatchLoss:
    """The losses of ``rl``, ``sft`` and ``value`` batches."""

    def __init__(self, algo: AlgoConfig, device: torch.device) -> None:
        self.algo = algo
        self.device = device
        self.objective = make_objective(algo)
        self.losses: dict[Kind, Loss] = {
            "rl": self.objective,
            "sft": sft_loss,
            "value": ValueLoss(algo.critic.value_clip),
        }

    def needs_reference(self, batch: GlobalBatch) -> bool:
        """Return whether the loss needs the reference policy's log-probabilities."""
        return batch.kind == "rl" and self.algo.has_kl and self.algo.kl_in != "reward"

    def centering(self, batch: GlobalBatch) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None:
        """Return the coefficients of score centering from log-probabilities of learner and engine; None without it."""
        if batch.kind != "rl" or not self.algo.score_centering:
            return None
        return partial(centering_coefficients, config=self.algo.correction)

    def needs_ratios(self, batch: GlobalBatch, *, divides_rows: bool = False) -> bool:
        """Return whether the loss needs `SequenceRatios`: parts of sequences are in other micro-batches, or on other ranks."""
        return batch.kind == "rl" and (batch.divided_sequences or divides_rows) and needs_whole_sequences(self.algo)

    def __call__(
        self,
        batch: GlobalBatch,
        micro: MicroBatch,
        at_N: torch.Tensor,
        scores: TokenScores,
        *,
        reference_N: torch.Tensor | None = None,
        ratio_N: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, LossMetrics]:
        """Return ``Σ weight · loss`` over tokens of a micro-batch, a scalar, and its metrics.

        Args:
            batch: of the micro-batch.
            micro: on the CPU.
            at_N: positions at the loss mask, int64 on the CPU.
            scores: of these tokens.
            reference_N: the reference policy's log-probabilities, if `needs_reference`.
            ratio_N: of `SequenceRatios`, if `needs_ratios`.
        """
        scores_N, entropy_N, centering_N = scores
        row_N = micro.row_L[at_N].long()
        numbers = {number: index for index, number in enumerate(dict.fromkeys(micro.sequences))}
        sequence_R = torch.tensor([numbers[number] for number in micro.sequences], dtype=torch.int64)
        size_R = torch.tensor([batch.sequence_sizes[number] for number in micro.sequences], dtype=torch.float32)
        loss_input = LossInput(
            weight_N=to_device(micro.weight_L[at_N], self.device),
            advantages_N=to_device(micro.advantages_L[at_N], self.device),
            logprobs_N=to_device(micro.logprobs_L[at_N], self.device),
            sequence_N=to_device(sequence_R[row_N], self.device),
            sequence_size_N=to_device(size_R[row_N], self.device),
            learner_logprobs_N=self._select(micro.learner_logprobs_L, at_N),
            correction_N=self._select(micro.correction_L, at_N),
            sequence_log_ratio_N=ratio_N,
            reference_logprobs_N=reference_N,
            values_N=self._select(micro.values_L, at_N),
            returns_N=self._select(micro.returns_L, at_N),
            entropy_N=entropy_N if self.algo.needs_entropy else None,
            centering_N=centering_N,
            source_tokens=self._source_tokens(micro, at_N),
            sequences=len(numbers),
        )
        loss, metrics = self.losses[batch.kind](scores_N, loss_input)
        if entropy_N is not None:
            metrics.sums["entropy"] = entropy_N.detach().sum()
        return loss, metrics

    def log_ratio(
        self, micro: MicroBatch, at_N: torch.Tensor, logprobs_N: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the log-ratio of each token, ``[N]`` without gradient, and its sequence's number in the batch, int64 ``[N]``."""
        sampler_N = to_device(micro.logprobs_L[at_N], self.device)
        learner_N = self._select(micro.learner_logprobs_L, at_N)
        old_N = self.objective.old_logprobs(logprobs_N, sampler_N, learner_N)
        sequence_N = torch.tensor(micro.sequences, dtype=torch.int64)[micro.row_L[at_N].long()]
        return logprobs_N - old_N, to_device(sequence_N, self.device)

    def _select(self, values_L: torch.Tensor | None, at_N: torch.Tensor) -> torch.Tensor | None:
        return None if values_L is None else to_device(values_L[at_N], self.device)

    def _source_tokens(self, micro: MicroBatch, at_N: torch.Tensor) -> dict[int, torch.Tensor]:
        """Return the indices of each source's tokens among those at the mask; see `LossInput.source_tokens`."""
        source_N = torch.tensor(micro.sources)[micro.row_L[at_N].long()] if micro.sources else at_N[:0]
        places = {number: (source_N == number).nonzero()[:, 0] for number in sorted({*source_N.tolist()})}
        return {number: to_device(at_M, self.device) for number, at_M in places.items()}


def make_objective(config: AlgoConfig) -> PolicyObjective:
    """Return the objective of a configuration, with the policy loss of each source of a mixed run.

    Raises:
        ConfigError, UnknownNameError: as of `make_estimator`.
    """
    losses = [algo.loss for algo in config.by_source.values()]
    if all(loss == losses[0] for loss in losses):
        losses = losses[:1]
    return PolicyObjective(config, [make_policy_loss(loss) for loss in losses])


class PolicyObjective:
    """``Σ weight · (correction · policy loss + score centering + kl_coef · KL estimate - entropy_coef · entropy)`` over a
    micro-batch.

    The last two terms have a gradient also where the policy loss is clipped, has no advantage or is rejected.

    Args:
        config: of the objective.
        policy_losses: the loss of each token, by the number of its source; a single one is that of all tokens.
    """

    def __init__(self, config: AlgoConfig, policy_losses: Sequence[PolicyLoss]) -> None:
        self.config = config
        self.policy_losses = policy_losses
        correction = config.correction
        self._corrects_here = correction.active and not correction.needs_all_tokens

    def __call__(self, logprobs_N: torch.Tensor, inputs: LossInput) -> tuple[torch.Tensor, LossMetrics]:
        """Return the loss and its metrics. ``kl`` is k3 regardless of ``kl_kind``, ``kl_loss`` is before ``kl_coef``."""
        old_N = self.old_logprobs(logprobs_N, inputs.logprobs_N, inputs.learner_logprobs_N)
        weight_N = inputs.weight_N
        token = self._token_loss(logprobs_N, old_N, inputs)
        metrics = _metrics(logprobs_N.detach(), old_N, token.clipped_N, inputs)
        correction_N = self._correction(logprobs_N.detach(), inputs)
        loss_N = token.loss_N
        if correction_N is not None:
            loss_N = correction_N * loss_N
            metrics.sums |= {
                "correction_mean": correction_N.sum(),
                "correction_rejected": (correction_N == 0).sum().float(),
            }
        if self.config.score_centering:
            assert inputs.centering_N is not None, "the learner gave no score centering"
            loss_N = loss_N + centering_loss(inputs.advantages_N, inputs.centering_N)
        if self.config.has_kl and self.config.kl_in == "loss":
            reference_N = inputs.reference_logprobs_N
            assert reference_N is not None, "the learner gave no log-probabilities of the reference policy"
            kl_N = kl_estimate(logprobs_N, reference_N, self.config.kl_kind)
            loss_N = loss_N + self.config.kl_coef * kl_N
            metrics.sums["kl"] = kl_estimate(logprobs_N.detach(), reference_N, "k3").sum()
            metrics.totals["kl_loss"] = (weight_N * kl_N.detach()).sum()
        if self.config.needs_entropy:
            assert inputs.entropy_N is not None, "the learner gave no entropies"
            loss_N = loss_N - self.config.entropy_coef * inputs.entropy_N
        return (weight_N * loss_N).sum(), metrics

    def _token_loss(self, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
        """Return the policy loss of each token, which is that of its source."""
        policy_losses, places = self.policy_losses, inputs.source_tokens
        if len(policy_losses) == 1 or not places:
            return call_policy_loss(policy_losses[0], logprobs_N, old_N, inputs)
        losses = [
            call_policy_loss(policy_losses[source], logprobs_N[at_M], old_N[at_M], inputs.at(at_M))
            for source, at_M in places.items()
        ]
        order_N = torch.cat(list(places.values()))
        loss_N, clipped_N = torch.zeros_like(logprobs_N), torch.zeros_like(order_N, dtype=torch.bool)
        return TokenLoss(
            loss_N.index_copy(0, order_N, torch.cat([loss.loss_N for loss in losses])),
            clipped_N.index_copy(0, order_N, torch.cat([loss.clipped_N for loss in losses])),
        )

    def old_logprobs(
        self, logprobs_N: torch.Tensor, sampler_N: torch.Tensor, learner_N: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the log-probabilities in the ratio's denominator, ``[N]`` without gradient; see ``algo.old_logprobs``.

        Args:
            logprobs_N: of this pass.
            sampler_N: of the engine.
            learner_N: of the learner before the first optimizer step; None: those of this pass.
        """
        if self.config.old_logprobs == "sampler":
            return sampler_N
        return logprobs_N.detach() if learner_N is None else learner_N

    def _correction(self, logprobs_N: torch.Tensor, inputs: LossInput) -> torch.Tensor | None:
        """Return importance weights: the driver's, or those of each token alone."""
        if inputs.correction_N is not None or not self._corrects_here:
            return inputs.correction_N
        # Score centering subtracts the mean of the weights by the log-probabilities of this pass.
        learner_N = logprobs_N if self.config.score_centering else _learner_logprobs(logprobs_N, inputs)
        log_ratio_N = learner_N - inputs.logprobs_N
        return importance_weights(log_ratio_N, torch.arange(len(log_ratio_N)), self.config.correction)


def call_policy_loss(loss: PolicyLoss, logprobs_N: torch.Tensor, old_N: torch.Tensor, inputs: LossInput) -> TokenLoss:
    """Return what `PolicyLoss.token_loss` does.

    Raises:
        ConfigError: a user's loss raised, or returned something else than a value for each token.
    """
    with calling_algorithm(LOSS_KEY, loss.name, "token_loss"):
        token = loss.token_loss(logprobs_N, old_N, inputs)
    shapes = [tuple(values.shape) for values in (token.loss_N, token.clipped_N)] if isinstance(token, TokenLoss) else []
    if shapes != 2 * [(len(logprobs_N),)]:
        raise ConfigError(
            f"{LOSS_KEY}.name={loss.name}: token_loss returned {f'shapes {shapes}' if shapes else type(token).__name__} for "
            f"{len(logprobs_N)} tokens, and no TokenLoss with loss_N and clipped_N of that length"
        )
    return token


def _learner_logprobs(logprobs_N: torch.Tensor, inputs: LossInput) -> torch.Tensor:
    """Return the learner's log-probabilities before the first optimizer step; without a pass before it, those of this pass."""
    return logprobs_N if inputs.learner_logprobs_N is None else inputs.learner_logprobs_N


@torch.no_grad()
def _metrics(logprobs_N: torch.Tensor, old_N: torch.Tensor, clipped_N: torch.Tensor, inputs: LossInput) -> LossMetrics:
    """Return metrics of ratio and clipping, and of the difference between sampler and learner.

    ``sampler_kl`` is the estimator k3 of KL(sampler ‖ learner), ``r - 1 - log r`` with ``r`` learner over sampler
    (Schulman, "Approximating KL Divergence"): never negative, and 0 if both agree on every token.
    ``effective_sample_size`` is that of the same ratios as weights.
    """
    ratio_N = (logprobs_N - old_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gap_N = (_learner_logprobs(logprobs_N, inputs) - inputs.logprobs_N).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    zero, weight_N = ratio_N.new_zeros(1), gap_N.exp()
    return LossMetrics(
        sums={
            "ratio_mean": ratio_N.sum(),
            "clip_fraction": clipped_N.sum().float(),
            "sampler_kl": (gap_N.expm1() - gap_N).sum(),
        },
        maxima={"ratio_max": torch.cat([ratio_N, zero]).max(), "sampler_gap_max": torch.cat([gap_N.abs(), zero]).max()},
        weights={"effective_sample_size": torch.stack([weight_N.sum(), weight_N.square().sum()])},
    )
