"""Batched sampling of the next token, with counter-based random numbers.

A random number is a hash of a request's seed and a token's position, without state. What a request samples therefore
depends neither on the other requests of its batch nor on earlier ones. A request that was interrupted, by an abort or by
the end of the engine, continues with the numbers it would have drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.inference.embedded.request import KeptTokens, Request

_GAMMA = np.uint64(0x9E3779B97F4A7C15)
_WORD = (1 << 64) - 1


def as_uint64(seed: int) -> int:
    """Return an integer of any sign and size modulo 2**64."""
    return seed & _WORD


def uniforms(seeds_B: NDArray[np.uint64], positions_B: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Return a float64 in [0, 1) for each pair of a seed and a position.

    SplitMix64 (Steele, Lea, Flood 2014, "Fast Splittable Pseudorandom Number Generators") with the position as its
    counter: number ``position`` of the generator that starts at the hashed seed. Without the hash, neighbouring seeds
    would give the same numbers, shifted.
    """
    words = _mix(_mix(seeds_B + _GAMMA) + (positions_B + np.uint64(1)) * _GAMMA)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(words: NDArray[np.uint64]) -> NDArray[np.uint64]:
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return words ^ (words >> np.uint64(31))


def sample(
    logits_BV: Tensor, requests: Sequence[Request], *, batch_invariant: bool = False
) -> tuple[list[int], list[float], list[KeptTokens | None]]:
    """Return a token id, its log-probability and its sampling support for each request: a pure function of logits, seeds and
    positions.

    Log-probabilities are those of the full distribution at the request's temperature (temperature 1 if it is greedy),
    not renormalised after top-p and top-k, as in SGLang. Those of the support are renormalised.

    Raises:
        FloatingPointError: the model's logits are not finite.
    """
    greedy = torch.tensor([request.options.greedy for request in requests])
    temperatures = torch.tensor([1.0 if r.options.greedy else r.options.temperature for r in requests])
    scaled_BV = logits_BV / temperatures[:, None]
    logprobs_BV = scaled_BV.log_softmax(-1)
    filtered_BV: Tensor | None = None
    if bool(greedy.all()):
        ids = logits_BV.argmax(-1)
    else:
        filtered_BV = _apply_top_k_top_p(logprobs_BV.exp(), requests)
        ids = _draw(filtered_BV, _uniforms(requests))
        ids = torch.where(greedy, logits_BV.argmax(-1), ids) if bool(greedy.any()) else ids
    chosen = _chosen(scaled_BV, logprobs_BV, ids, batch_invariant=batch_invariant)
    if not bool(chosen.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite: its weights are broken")
    supports = [
        None if request.support is None else _kept_tokens(scaled_BV[row], filtered_BV, row, int(ids[row]), request)
        for row, request in enumerate(requests)
    ]
    return ids.tolist(), chosen.tolist(), supports


def _kept_tokens(scaled_V: Tensor, filtered_BV: Tensor | None, row: int, sampled: int, request: Request) -> KeptTokens:
    """Return what a token was sampled from, by the learner's own formula."""
    if request.options.greedy or filtered_BV is None:
        return KeptTokens([sampled], [0.0], 0.0)
    is_kept_V = filtered_BV[row] > 0
    normalizer = scaled_V.masked_fill(~is_kept_V, float("-inf"))[None].logsumexp(-1)
    logprobs_V = scaled_V - normalizer
    (kept_ids,) = is_kept_V.nonzero(as_tuple=True)
    return KeptTokens(kept_ids.tolist(), logprobs_V[kept_ids].tolist(), float(logprobs_V[sampled]))


def prompt_logprobs(logits_TV: Tensor, token_ids: NDArray[np.int32], *, batch_invariant: bool = False) -> list[float]:
    """Return the log-probability of each token, at temperature 1 as in SGLang; ``logits_TV`` are those before each.

    Raises:
        FloatingPointError: the model's logits are not finite.
    """
    ids_T = torch.from_numpy(token_ids.astype(np.int64))
    chosen = _chosen(logits_TV, logits_TV.log_softmax(-1), ids_T, batch_invariant=batch_invariant)
    if not bool(chosen.isfinite().all()):
        raise FloatingPointError("the model's logits are not finite: its weights are broken")
    logprobs: list[float] = chosen.tolist()
    return logprobs


def _chosen(scaled_BV: Tensor, logprobs_BV: Tensor, ids_B: Tensor, *, batch_invariant: bool) -> Tensor:
    """Return the log-probabilities of tokens; with ``batch_invariant`` by the learner's own formula."""
    if batch_invariant:
        return scaled_BV.gather(1, ids_B[:, None])[:, 0] - scaled_BV.logsumexp(-1)
    return logprobs_BV.gather(1, ids_B[:, None])[:, 0]


def _draw(probabilities_BV: Tensor, uniforms_B: Tensor) -> Tensor:
    """Sample by the inverse cumulative distribution, in float64 so that rare tokens keep their probability."""
    sums_BV = probabilities_BV.cumsum(-1, dtype=torch.float64)
    targets_B1 = uniforms_B[:, None] * sums_BV[:, -1:]
    return torch.searchsorted(sums_BV, targets_B1, right=True)[:, 0].clamp_(max=probabilities_BV.shape[1] - 1)


def _uniforms(requests: Sequence[Request]) -> Tensor:
    seeds_B = np.array([request.seed for request in requests], np.uint64)
    positions_B = np.array([len(request.prompt) + len(request.output) for request in requests], np.uint64)
    return torch.from_numpy(uniforms(seeds_B, positions_B))


def _apply_top_k_top_p(probabilities_BV: Tensor, requests: Sequence[Request]) -> Tensor:
    size = probabilities_BV.shape[1]
    rows = [row for row, r in enumerate(requests) if r.options.top_p < 1 or 0 < r.options.top_k < size]
    if not rows:
        return probabilities_BV
    top_k = torch.tensor([requests[row].options.top_k for row in rows])[:, None]
    top_p = torch.tensor([requests[row].options.top_p for row in rows])[:, None]
    values, order = probabilities_BV[rows].sort(descending=True, stable=True)
    # As in SGLang, both are of the whole distribution: the fewest tokens whose share reaches top-p, and of these top-k.
    preceding = values.cumsum(-1) - values
    values = values.masked_fill((top_p < 1) & (preceding >= top_p), 0.0)
    values = values.masked_fill((torch.arange(size) >= top_k) & (top_k > 0), 0.0)
    filtered_BV = probabilities_BV.clone()
    filtered_BV[rows] = torch.zeros_like(values).scatter_(1, order, values)
    return filtered_BV
