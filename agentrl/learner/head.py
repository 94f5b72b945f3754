"""Scores of tokens from hidden states: log-probabilities and entropies, without keeping logits, or values.

Legend: ``V`` vocabulary, ``H`` hidden.

The logits of a chunk of tokens exist once in the forward pass and are computed again in the backward pass, which derives
their gradient in closed form. The vocabulary may be divided among ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from agentrl.algo.base import TokenScores
from agentrl.batch.microbatch import Truncation
from agentrl.learner.token_support import Coefficients, SupportChunk, TokenSupport
from agentrl.models.batch_invariant import tiled_product


@dataclass(frozen=True, slots=True)
class VocabularyPart:
    """The rows of a head's weight that a rank has."""

    first: int
    """Token id of the first row."""
    group: dist.ProcessGroup
    """The ranks that have the other rows."""


@dataclass(frozen=True, slots=True)
class HeadOptions:
    """How a language head is computed."""

    temperature: float
    """Logits are divided by it."""
    entropy: bool
    """Whether entropies are computed."""
    chunk: int
    """Tokens whose logits exist at the same time."""
    compiled: bool
    """Whether what follows the matrix products is compiled."""
    vocabulary_part: VocabularyPart | None = None
    """This rank's part of a divided weight. Gradients of hidden states are then those of the part; ranks add them up."""
    batch_invariant: bool = False
    """Whether logits are those of `agentrl.models.batch_invariant`."""
    truncation: Truncation | None = None
    """Top-k and top-p sampling, after which distributions are renormalised. A target always stays in its distribution. The
    computation is not compiled then."""
    centering: Coefficients | None = None
    """Coefficients of the ids of a sampling support in score centering, without gradient; None: none is computed."""


def token_scores(
    hidden_N_H: torch.Tensor,
    weight_V_H: torch.Tensor,
    bias_V: torch.Tensor | None,
    targets_N: torch.Tensor,
    options: HeadOptions,
    support: TokenSupport | None = None,
) -> TokenScores:
    """Return log-probabilities of ``targets_N`` and entropies (nats) of their distributions, at least float32, ``[N]`` each.

    Under autocast the factors of the logits are rounded, but not the logits: these are about 20 in size, where adjacent
    bfloat16 values differ by an eighth, so that log-probabilities would be off by several hundredths.

    Args:
        hidden_N_H: hidden states from which the tokens are predicted.
        weight_V_H: of the head.
        bias_V: of the head.
        targets_N: int64 token ids.
        options: temperature, and how it is computed.
        support: the ids that the distributions have; None: all, or what ``options.truncation`` leaves.
    """
    device = hidden_N_H.device.type
    dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else hidden_N_H.dtype
    with torch.autocast(device, enabled=False):
        apply: Any = _TokenScores.apply
        logprobs_N, entropy_N, centering_N = apply(hidden_N_H, weight_V_H, bias_V, targets_N, dtype, options, support)
    return TokenScores(
        logprobs_N, entropy_N if options.entropy else None, None if options.centering is None else centering_N
    )


def token_values(hidden_N_H: torch.Tensor, weight_1_H: torch.Tensor, bias_1: torch.Tensor | None) -> torch.Tensor:
    """Return the values ``[N]`` of a value head, at least float32, also under autocast."""
    dtype = torch.promote_types(hidden_N_H.dtype, torch.float32)
    with torch.autocast(hidden_N_H.device.type, enabled=False):
        bias_1 = None if bias_1 is None else bias_1.to(dtype)
        return F.linear(hidden_N_H.to(dtype), weight_1_H.to(dtype), bias_1).sum(-1)


class _TokenScores(torch.autograd.Function):
    """With ``z`` the logits over the temperature, ``p`` their softmax, and the entropy ``S``, of a token with target ``t``:

    ``∂ log p_t / ∂ z = 1_t - p`` and ``∂ S / ∂ z = -p (log p + S)``.

    With a truncation or a support the softmax is one of the tokens that it keeps, which are constants; other logits have no
    gradient. With coefficients ``c`` of these tokens, which are constants too, ``∂ Σ c log p / ∂ z = c - p Σ c``.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden_N_H: torch.Tensor,
        weight_V_H: torch.Tensor,
        bias_V: torch.Tensor | None,
        targets_N: torch.Tensor,
        dtype: torch.dtype,
        options: HeadOptions,
        support: TokenSupport | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        compiled = options.compiled and options.truncation is None and support is None
        statistics = _function(_statistics, compiled)
        factor_V_H = weight_V_H.to(dtype)  # once, not for every chunk
        if options.vocabulary_part is not None:
            targets_N = targets_N - options.vocabulary_part.first
        chunk_statistics, thresholds = [], []
        kept_logits: list[tuple[torch.Tensor, torch.Tensor]] = []
        for first, hidden, targets in zip(
            range(0, max(1, len(targets_N)), options.chunk),
            torch.split(hidden_N_H, options.chunk),
            torch.split(targets_N, options.chunk),
            strict=True,
        ):
            logits = _logits(hidden, factor_V_H, bias_V, compiled=compiled, tiled=options.batch_invariant)
            if support is not None:
                chunk = _support_chunk(support, first, logits, options)
                is_kept = chunk.keep(logits.shape[1])
                if options.centering is not None:
                    kept_logits.append((chunk.gather(logits) / options.temperature, chunk.is_here_e))
            elif options.truncation is None:
                chunk_statistics.append(statistics(logits, targets, options.temperature, options.entropy))
                continue
            else:
                thresholds.append(_threshold(logits, options))
                is_kept = _is_kept(logits, targets, thresholds[-1])
            chunk_statistics.append(_truncated_statistics(logits, targets, is_kept, options))
        normalizer_N, target_N, mean_N = (torch.cat(chunks) for chunks in zip(*chunk_statistics, strict=True))
        if options.vocabulary_part is not None:
            is_here_N = (targets_N >= 0) & (targets_N < len(weight_V_H))
            target_N = torch.where(is_here_N, target_N, 0)
            normalizer_N, target_N, mean_N = _combine_statistics(
                normalizer_N, target_N, mean_N, options.vocabulary_part.group
            )
        logprobs_N = target_N - normalizer_N
        entropy_N = normalizer_N - mean_N if options.entropy else mean_N
        threshold_N = torch.cat(thresholds) if thresholds else None
        centering_N, coefficients_E, total_N = logprobs_N.new_zeros(0), None, None
        if options.centering is not None:
            assert support is not None, "score centering is over a sampling support"
            logits_E, is_here_E = (torch.cat(parts) for parts in zip(*kept_logits, strict=True))
            centering_N, coefficients_E, total_N = support.centering(
                logits_E,
                is_here_E,
                normalizer_N,
                options.centering,
                None if options.vocabulary_part is None else options.vocabulary_part.group,
            )
        ctx.save_for_backward(
            hidden_N_H, weight_V_H, bias_V, targets_N, normalizer_N, entropy_N, threshold_N, coefficients_E, total_N
        )
        ctx.dtype, ctx.options, ctx.support = dtype, options, support
        ctx.set_materialize_grads(False)
        return logprobs_N, entropy_N, centering_N

    @staticmethod
    def backward(ctx: Any, *gradients_N: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        hidden_N_H, weight_V_H, bias_V, targets_N, normalizer_N, entropy_N, threshold_N, *centering = ctx.saved_tensors
        coefficients_E, total_N = centering
        gradient_logprob_N, gradient_entropy_N, gradient_centering_N = gradients_N
        needs_gradient, support = ctx.needs_input_grad, ctx.support
        if all(gradient_N is None for gradient_N in gradients_N) or not any(needs_gradient):
            return None, None, None, None, None, None, None
        if gradient_logprob_N is None:
            gradient_logprob_N = torch.zeros_like(normalizer_N)
        compiled = ctx.options.compiled and threshold_N is None and support is None
        derive = _function(_logits_gradient, compiled)
        factor_V_H = weight_V_H.to(ctx.dtype)
        hidden_gradients, weight_gradient, bias_gradient = [], None, None
        for first in range(0, max(1, len(targets_N)), ctx.options.chunk):  # without tokens the gradients are zeros
            chunk = slice(first, first + ctx.options.chunk)
            logits_n_V = _logits(
                hidden_N_H[chunk], factor_V_H, bias_V, compiled=compiled, tiled=ctx.options.batch_invariant
            )
            gradient_n_V = derive(
                logits_n_V,
                targets_N[chunk],
                ctx.options.temperature,
                normalizer_N[chunk],
                gradient_logprob_N[chunk],
                None if gradient_entropy_N is None else entropy_N[chunk],
                None if gradient_entropy_N is None else gradient_entropy_N[chunk],
                ctx.dtype if bias_V is None else None,
            )
            is_kept: torch.Tensor | None = None
            if support is not None:
                ids = _support_chunk(support, first, logits_n_V, ctx.options)
                is_kept = ids.keep(logits_n_V.shape[1])
                if coefficients_E is not None and gradient_centering_N is not None:
                    gradient_n_V = gradient_n_V + _centering_gradient(
                        logits_n_V / ctx.options.temperature - normalizer_N[chunk, None],
                        ids,
                        coefficients_E[ids.slice],
                        total_N[chunk],
                        gradient_centering_N[chunk] / ctx.options.temperature,
                    )
            elif threshold_N is not None:
                is_kept = _is_kept(logits_n_V, targets_N[chunk], threshold_N[chunk])
            if is_kept is not None:
                gradient_n_V = gradient_n_V.masked_fill(~is_kept, 0)
            if bias_V is not None and needs_gradient[2]:
                bias_gradient = _add(bias_gradient, gradient_n_V.sum(0))
            gradient_n_V = gradient_n_V.to(ctx.dtype)
            if needs_gradient[0]:
                hidden_gradients.append(gradient_n_V @ factor_V_H)
            if needs_gradient[1]:
                weight_gradient = _add(weight_gradient, _product(gradient_n_V.t(), hidden_N_H[chunk].to(ctx.dtype)))
        return (
            torch.cat(hidden_gradients).to(hidden_N_H.dtype) if hidden_gradients else None,
            None if weight_gradient is None else weight_gradient.to(weight_V_H.dtype),
            None if bias_gradient is None else bias_gradient.to(bias_V.dtype),
            None,
            None,
            None,
            None,
        )


def _logits(
    hidden_n_H: torch.Tensor,
    factor_V_H: torch.Tensor,
    bias_V: torch.Tensor | None,
    *,
    compiled: bool,
    tiled: bool = False,
) -> torch.Tensor:
    hidden_n_H = hidden_n_H.to(factor_V_H.dtype)
    logits_n_V = tiled_product(hidden_n_H, factor_V_H) if tiled else _product(hidden_n_H, factor_V_H.t())
    if bias_V is not None:
        logits_n_V = logits_n_V + bias_V.to(logits_n_V.dtype)
    if compiled:
        torch._dynamo.mark_static(logits_n_V, 1)  # what is compiled then divides by a constant
    return logits_n_V


def _product(lhs: torch.Tensor, rhs: torch.Tensor) -> torch.Tensor:
    """Return the matrix product in at least float32."""
    if lhs.dtype in (torch.float32, torch.float64):
        return lhs @ rhs
    if lhs.is_cuda:
        return torch.mm(lhs, rhs, out_dtype=torch.float32)
    return lhs.float() @ rhs.float()


def _add(total: torch.Tensor | None, summand: torch.Tensor) -> torch.Tensor:
    return summand if total is None else total.add_(summand)


def _statistics(
    logits_n_V: torch.Tensor, targets_n: torch.Tensor, temperature: float, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the logarithm of the softmax's denominator, the targets' scaled logits, and the means of all, or nothing.

    The logit of a target that is no column is arbitrary.
    """
    scaled_n_V = logits_n_V / temperature
    if torch.compiler.is_compiling() and (block := _block(scaled_n_V.shape[1])):
        return _statistics_of_blocks(scaled_n_V, targets_n, block, entropy)
    normalizer_n = scaled_n_V.logsumexp(-1)
    target_n = scaled_n_V.gather(-1, targets_n.clamp(0, logits_n_V.shape[1] - 1)[:, None])[:, 0]
    if not entropy:
        return normalizer_n, target_n, target_n.new_zeros(0)
    return normalizer_n, target_n, ((scaled_n_V - normalizer_n[:, None]).exp() * scaled_n_V).sum(-1)


def _threshold(logits_n_V: torch.Tensor, options: HeadOptions) -> torch.Tensor:
    """Return the least logit ``[n]`` that a truncation keeps; of a divided vocabulary the parts' candidates are gathered."""
    truncation, part = options.truncation, options.vocabulary_part
    assert truncation is not None
    size = logits_n_V.shape[1]
    candidates = logits_n_V.topk(min(truncation.top_k, size) if truncation.top_k > 0 else size).values
    if part is not None:
        candidates = _gather_columns(candidates, part).sort(descending=True).values
    if truncation.top_k > 0:
        candidates = candidates[:, : truncation.top_k]
    if truncation.top_p == 1:
        return candidates[:, -1]
    normalizers = (logits_n_V / options.temperature).logsumexp(-1, keepdim=True)
    if part is not None:
        normalizers = _gather_columns(normalizers, part).logsumexp(-1, keepdim=True)
    probabilities = (candidates / options.temperature - normalizers).exp()
    preceding = probabilities.cumsum(-1) - probabilities
    last_n = (preceding < truncation.top_p).sum(-1).clamp(min=1) - 1
    return candidates.gather(1, last_n[:, None])[:, 0]


def _gather_columns(columns: torch.Tensor, part: VocabularyPart) -> torch.Tensor:
    """Return the columns of all parts of a divided vocabulary, side by side."""
    gathered = [torch.empty_like(columns) for _ in range(part.group.size())]
    dist.all_gather(gathered, columns.contiguous(), group=part.group)
    return torch.cat(gathered, 1)


def _is_kept(logits_n_V: torch.Tensor, targets_n: torch.Tensor, threshold_n: torch.Tensor) -> torch.Tensor:
    """Return which tokens ``[n, V]`` a truncation keeps, and the targets."""
    is_target_n_V = torch.arange(logits_n_V.shape[1], device=logits_n_V.device) == targets_n[:, None]
    return (logits_n_V >= threshold_n[:, None]) | is_target_n_V


def _support_chunk(support: TokenSupport, first: int, logits_n_V: torch.Tensor, options: HeadOptions) -> SupportChunk:
    """Return the support of the tokens of a chunk, which begins with the token ``first``."""
    first_id = 0 if options.vocabulary_part is None else options.vocabulary_part.first
    return support.chunk(first, first + len(logits_n_V), first_id, logits_n_V.shape[1])


def _centering_gradient(
    log_n_V: torch.Tensor,
    ids: SupportChunk,
    coefficients_e: torch.Tensor,
    total_n: torch.Tensor,
    gradient_n: torch.Tensor,
) -> torch.Tensor:
    """Return the gradient of the logits by ``Σ c · log p``; see `_TokenScores`."""
    gradient_n_V = -log_n_V.exp() * (total_n * gradient_n)[:, None]
    gradient_e = coefficients_e * gradient_n[ids.token_e]
    return gradient_n_V.index_put((ids.token_e, ids.column_e), gradient_e, accumulate=True)


def _truncated_statistics(
    logits_n_V: torch.Tensor, targets_n: torch.Tensor, is_kept_n_V: torch.Tensor, options: HeadOptions
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `_statistics` of the tokens that are kept. A part of a vocabulary may have none of a token's."""
    normalizer_n, target_n, no_mean = _statistics(
        logits_n_V.masked_fill(~is_kept_n_V, float("-inf")), targets_n, options.temperature, entropy=False
    )
    if not options.entropy:
        return normalizer_n, target_n, no_mean
    scaled_n_V = (logits_n_V / options.temperature).masked_fill(~is_kept_n_V, 0)
    weights_n_V = (scaled_n_V - normalizer_n[:, None]).exp().masked_fill(~is_kept_n_V, 0)
    return normalizer_n, target_n, (weights_n_V * scaled_n_V).sum(-1)


def _statistics_of_blocks(
    scaled_n_V: torch.Tensor, targets_n: torch.Tensor, block: int, entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return `_statistics` from those of blocks, for which compiled code reads the logits once, not three times."""
    blocks_n_B_W = scaled_n_V.view(len(scaled_n_V), -1, block)
    largest_n_B = blocks_n_B_W.amax(-1)
    weights_n_B_W = (blocks_n_B_W - largest_n_B[..., None]).exp()
    sums_n_B = weights_n_B_W.sum(-1)
    target_n = scaled_n_V.gather(-1, targets_n.clamp(0, scaled_n_V.shape[1] - 1)[:, None])[:, 0]
    largest_n = largest_n_B.amax(-1)
    factors_n_B = (largest_n_B - largest_n[:, None]).exp()
    sum_n = (sums_n_B * factors_n_B).sum(-1)
    normalizer_n = largest_n + sum_n.log()
    if not entropy:
        return normalizer_n, target_n, target_n.new_zeros(0)
    means_n_B = (weights_n_B_W * blocks_n_B_W).sum(-1)
    return normalizer_n, target_n, (means_n_B * factors_n_B).sum(-1) / sum_n


def _block(vocabulary: int) -> int:
    """Return the largest size of blocks that divides a vocabulary; 0 if it has none."""
    for size in (1024, 512, 256, 128, 64):
        if vocabulary % size == 0:
            return size
    return 0


def _combine_statistics(
    normalizer_N: torch.Tensor, target_N: torch.Tensor, mean_N: torch.Tensor, group: dist.ProcessGroup
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the `_statistics` of the full vocabulary from those of its parts; ``target_N`` is 0 in all parts but one."""
    largest_N = normalizer_N.clone()
    dist.all_reduce(largest_N, dist.ReduceOp.MAX, group)
    scale_N = (normalizer_N - largest_N).exp()
    added = torch.stack([scale_N, target_N, *([scale_N * mean_N] if len(mean_N) == len(scale_N) else [])])
    dist.all_reduce(added, group=group)
    mean_N = added[2] / added[0] if len(added) == 3 else mean_N
    return largest_N + added[0].log(), added[1], mean_N


def _logits_gradient(
    logits_n_V: torch.Tensor,
    targets_n: torch.Tensor,
    temperature: float,
    normalizer_n: torch.Tensor,
    gradient_logprob_n: torch.Tensor,
    entropy_n: torch.Tensor | None,
    gradient_entropy_n: torch.Tensor | None,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    """Return the gradient of the logits; see `_TokenScores`."""
    log_n_V = logits_n_V / temperature - normalizer_n[:, None]
    weight_n_1 = gradient_logprob_n[:, None]
    factor_n_V: torch.Tensor = weight_n_1
    if entropy_n is not None and gradient_entropy_n is not None:
        factor_n_V = weight_n_1 + gradient_entropy_n[:, None] * (log_n_V + entropy_n[:, None])
    gradient_n_V = -log_n_V.exp() * factor_n_V
    is_target_n_V = torch.arange(logits_n_V.shape[1], device=logits_n_V.device) == targets_n[:, None]
    gradient_n_V = torch.where(is_target_n_V, gradient_n_V + weight_n_1, gradient_n_V) / temperature
    return gradient_n_V if dtype is None else gradient_n_V.to(dtype)


@cache
def _function(function: Callable[..., Any], compiled: bool) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True) if compiled else function
