"""The head over sampling supports: the engine's distribution, its gradient, and score centering; also of a divided vocabulary."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import cast

import numpy as np
import pytest
import torch
import torch.distributed as dist

from agentrl.algo.score_centering import centering_coefficients
from agentrl.config.algo import CorrectionConfig
from agentrl.core.sampling_support import SamplingSupport
from agentrl.learner import head, token_support
from agentrl.learner.head import HeadOptions, VocabularyPart, token_scores
from agentrl.learner.token_support import TokenSupport
from tests.unit.learner.test_logits import N, Threads, V, given

TEMPERATURE = 0.7
CORRECTIONS = {
    "none": CorrectionConfig(rollout_is="none"),
    "truncated": CorrectionConfig(rollout_is="token", rollout_is_threshold=1.2),
    "masked": CorrectionConfig(rollout_is="token", rollout_is_threshold=1.5, rollout_is_lower=0.7),
}


def make_support(targets: torch.Tensor, vocabulary: int, *, unknown: bool = True) -> SamplingSupport:
    """Supports of one to seven ids with each target; the third token has none if some are to be unknown."""
    rng = np.random.default_rng(0)
    counts, ids, logprobs = [], [], []
    for place, target in enumerate(targets.tolist()):
        others = rng.permutation(np.delete(np.arange(vocabulary), target))[: rng.integers(0, 7)]
        kept = rng.permutation([target, *others]) if place != 2 or not unknown else np.zeros(0, np.int64)
        counts.append(len(kept))
        ids += kept.tolist()
        logprobs += np.log(rng.dirichlet(np.ones(max(1, len(kept)))))[: len(kept)].tolist()
    return SamplingSupport(np.array(counts, np.int32), np.array(ids, np.int32), np.array(logprobs, np.float32))


def kept_tokens(support: SamplingSupport, vocabulary: int) -> torch.Tensor:
    """Return bools ``[N, V]``, one token at a time."""
    kept = torch.zeros(len(support), vocabulary, dtype=torch.bool)
    offsets = support.offsets
    for place in range(len(support)):
        ids = support.token_ids[offsets[place] : offsets[place + 1]].tolist()
        kept[place, ids if ids else slice(None)] = True
    return kept


@pytest.mark.parametrize("chunk", [1, 4, 64])
@pytest.mark.parametrize("entropy", [True, False])
def test_the_distribution_is_that_of_the_support_with_its_gradient(chunk: int, entropy: bool) -> None:
    hidden, weight, offset, targets = given(torch.float64, bias=True)
    support = make_support(targets, V)
    inputs = [hidden.requires_grad_(), weight.requires_grad_(), offset.requires_grad_()]
    options = HeadOptions(TEMPERATURE, entropy, chunk, compiled=True)
    scores = token_scores(hidden, weight, offset, targets, options, TokenSupport(support, hidden.device))
    logits = torch.nn.functional.linear(hidden, weight, offset) / TEMPERATURE
    distribution = torch.distributions.Categorical(logits=logits.masked_fill(~kept_tokens(support, V), -1e9))
    expected = [distribution.log_prob(targets)] + ([distribution.entropy()] if entropy else [])
    actual = [scores.scores_N] + ([] if scores.entropy_N is None else [scores.entropy_N])
    assert scores.centering_N is None
    factors = [torch.linspace(-1, 2, N, dtype=torch.float64), torch.linspace(3, -1, N, dtype=torch.float64)]
    for mine, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(mine, theirs, atol=1e-12, rtol=1e-12)
    ours = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, actual, strict=False)), inputs)
    theirs = torch.autograd.grad(sum((f * x).sum() for f, x in zip(factors, expected, strict=False)), inputs)
    for mine, theirs_row in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_row, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize("kind", CORRECTIONS)
@pytest.mark.parametrize("chunk", [3, 64])
def test_score_centering_is_the_weighted_sum_of_log_probabilities(kind: str, chunk: int) -> None:
    hidden, weight, _, targets = given(torch.float64, bias=False)
    support = make_support(targets, V)
    inputs = [hidden.requires_grad_(), weight.requires_grad_()]
    coefficients = partial(centering_coefficients, config=CORRECTIONS[kind])
    options = HeadOptions(TEMPERATURE, False, chunk, compiled=False, centering=coefficients)
    scores = token_scores(hidden, weight, None, targets, options, TokenSupport(support, hidden.device))
    assert scores.centering_N is not None
    logits = (hidden @ weight.T / TEMPERATURE).masked_fill(~kept_tokens(support, V), -1e9)
    logprobs_N_V = logits.log_softmax(-1)
    sampler_N_V = torch.full_like(logits, -torch.inf)
    token_E = np.repeat(np.arange(N), support.counts)
    assert support.logprobs is not None
    sampler_N_V[token_E, support.token_ids] = torch.from_numpy(support.logprobs).double()
    ratio = (logprobs_N_V - sampler_N_V).exp().detach()
    weights = {
        "none": torch.ones_like(ratio),
        "truncated": ratio.clamp(max=1.2),
        "masked": ratio * ((ratio >= 0.7) & (ratio <= 1.5)),
    }[kind]
    products = torch.where(sampler_N_V.isfinite(), sampler_N_V.exp() * weights.nan_to_num(0, 0, 0), 0) * logprobs_N_V
    expected = products.sum(-1)
    torch.testing.assert_close(scores.centering_N, expected, atol=1e-6, rtol=1e-6)
    factors = torch.linspace(-1, 2, N, dtype=torch.float64)
    ours = torch.autograd.grad((factors * (scores.centering_N + 2 * scores.scores_N)).sum(), inputs)
    logprobs = logprobs_N_V.gather(1, targets[:, None])[:, 0]
    theirs = torch.autograd.grad((factors * (expected + 2 * logprobs)).sum(), inputs)
    for mine, theirs_row in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, theirs_row, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", CORRECTIONS)
def test_the_expected_score_of_the_engines_samples_is_zero(kind: str) -> None:
    """Σ_y q_y (w_y ∇ log p_y - Σ_v c_v ∇ log p_v) = 0, for any engine; not so without centering."""
    hidden, weight, _, _ = given(torch.float64, bias=False)
    hidden = hidden / 10  # so that no token has most of the probability, and some weights are cut off
    targets = torch.tensor([4, 9, 2, 17, 11, 20])  # each of the support once, as if it were sampled
    size = len(targets)
    log_p = (hidden[0] @ weight.T / TEMPERATURE)[targets]
    log_q = (log_p + 0.5 * torch.linspace(-1, 1, size, dtype=torch.float64)).log_softmax(-1).float().double()
    ids, logprobs = np.tile(targets.numpy().astype(np.int32), size), np.tile(log_q.numpy().astype(np.float32), size)
    support = SamplingSupport(np.full(size, size, np.int32), ids, logprobs)
    hidden = hidden[:1].expand(size, -1).clone().requires_grad_()
    coefficients = partial(centering_coefficients, config=CORRECTIONS[kind])
    options = HeadOptions(TEMPERATURE, False, 64, compiled=False, centering=coefficients)
    scores = token_scores(hidden, weight, None, targets, options, TokenSupport(support, hidden.device))
    assert scores.centering_N is not None
    weights = centering_coefficients(scores.scores_N, log_q, CORRECTIONS[kind]) / log_q.exp()
    [plain] = torch.autograd.grad((log_q.exp() * weights * scores.scores_N).sum(), [hidden], retain_graph=True)
    [centered] = torch.autograd.grad((log_q.exp() * (weights * scores.scores_N - scores.centering_N)).sum(), [hidden])
    assert plain.sum(0).abs().max() > 1e-3
    assert centered.sum(0).abs().max() < 1e-6


def test_nothing_is_subtracted_where_engine_and_learner_agree() -> None:
    hidden, weight, _, targets = given(torch.float64, bias=False)
    support = make_support(targets, V, unknown=False)
    logits = (hidden @ weight.T / TEMPERATURE).masked_fill(~kept_tokens(support, V), -1e9)
    token_E = np.repeat(np.arange(N), support.counts)
    agreed = logits.log_softmax(-1)[token_E, support.token_ids].numpy().astype(np.float64)
    support = replace(support, logprobs=agreed)
    coefficients = partial(centering_coefficients, config=CORRECTIONS["truncated"])
    options = HeadOptions(TEMPERATURE, False, 4, compiled=False, centering=coefficients)
    hidden.requires_grad_()
    scores = token_scores(hidden, weight, None, targets, options, TokenSupport(support, hidden.device))
    assert scores.centering_N is not None
    [gradient] = torch.autograd.grad(scores.centering_N.sum(), [hidden])
    assert gradient.abs().max() < 1e-12


def test_parts_of_a_vocabulary_have_the_support_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, weight, _, targets = given(torch.float64, bias=False)
    weight, targets, ranks = weight[:22], targets.clamp(max=21), Threads()
    support = TokenSupport(make_support(targets, 22), hidden.device)
    coefficients = partial(centering_coefficients, config=CORRECTIONS["truncated"])
    whole = HeadOptions(TEMPERATURE, True, 4, compiled=False, centering=coefficients)
    factors = torch.linspace(-1, 2, N, dtype=torch.float64)

    def score(weights: torch.Tensor, options: HeadOptions) -> tuple[list[torch.Tensor], torch.Tensor]:
        part = weights.clone().requires_grad_()
        scores = token_scores(hidden, part, None, targets, options, support)
        results = [result for result in scores if result is not None]
        assert len(results) == 3
        [gradient] = torch.autograd.grad(sum((factors * result).sum() for result in results), [part])
        return [result.detach() for result in results], gradient

    expected, gradient = score(weight, whole)
    for module in (head, token_support):
        monkeypatch.setattr(module.dist, "all_reduce", ranks.all_reduce)

    def score_part(rank: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        ranks.rank.number = rank
        vocabulary_part = VocabularyPart(rank * 11, cast(dist.ProcessGroup, ranks))
        return score(weight[11 * rank : 11 * (rank + 1)], replace(whole, vocabulary_part=vocabulary_part))

    with ThreadPoolExecutor(2) as threads:
        for rank, (scores, part_gradient) in enumerate(threads.map(score_part, range(2))):
            torch.testing.assert_close(scores, expected, atol=1e-7, rtol=1e-7)
            torch.testing.assert_close(part_gradient, gradient[11 * rank : 11 * (rank + 1)], atol=1e-7, rtol=1e-7)
