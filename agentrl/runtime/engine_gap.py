"""How far the log-probabilities of engines and of the learner may be apart: limits by precision, experts and depth of turn.

The gap is the estimator k3 of a KL divergence, the mean of ``e^d - 1 - d`` with ``d`` learner minus engine, of tokens that the
engine has sampled (Schulman 2020, "Approximating KL Divergence"). Usual values are those of published runs: 2e-4 for dense
models in 16 bits, 2e-3 with experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from agentrl.config.schema import Config
from agentrl.models.engine_float8 import DTYPE as FLOAT8
from agentrl.runtime.engine_precision import EnginePrecision, PrecisionClass

_LIMITS: Mapping[PrecisionClass, float] = {
    "dense": 2e-3,
    "experts": 2e-2,
    "float8_weights": 2e-2,
    "float8_cache": 2e-2,
}
"""Nats a token of a first turn: ten times what is usual, for float8 less."""
_FLOAT8_EXPERTS = 2.5
"""How much larger the limits of float8 are with experts."""
_FLOAT32 = 1 / 20
"""How much smaller they are if engines and learner compute in float32."""
_TURNS_TO_DOUBLE = 8
"""Turns after which twice the gap is allowed: rounding adds up along a row."""
_MAX_LOG_RATIO = 20.0
_ERRORS = 2
_WORDS: Mapping[PrecisionClass, str] = {
    "dense": "16-bit weights",
    "experts": "16-bit weights and experts",
    "float8_weights": "float8 weights",
    "float8_cache": "a float8 KV cache",
}


class TokenGap(NamedTuple):
    """The gap of some sampled tokens, in nats a token."""

    mean: float
    error: float
    """Standard error of the mean: a few tokens whose log-probabilities are far apart decide the mean of a hundred."""


@dataclass(frozen=True, slots=True)
class GapBand:
    """The gap that is allowed. Example: ``GapBand(2e-3, "16-bit weights")``."""

    first_turn: float
    """Nats a token in the first turn."""
    why: str = ""
    """What it is for."""

    def limit(self, turn: int) -> float:
        """Return the limit in a turn, counted from 1."""
        return self.first_turn * (1 + (turn - 1) / _TURNS_TO_DOUBLE)

    def allows(self, gap: TokenGap, turn: int) -> bool:
        """Return whether a gap is within the limit of a turn, or not over it by more than two standard errors.

        A limit of 0 is for equal bits, which have no error.
        """
        limit = self.limit(turn)
        return gap.mean - (_ERRORS * gap.error if limit else 0.0) <= limit


def gap_band(config: Config, precision: EnginePrecision, engine_dtype: str | None) -> GapBand | None:
    """Return what is allowed in a run; None with ``weights.gap_limit=off``.

    Args:
        config: of the run.
        precision: of its engines, by configuration and folder.
        engine_dtype: that all engines report; None: not known.
    """
    limit = config.weights.gap_limit
    if limit == "off":
        return None
    if limit != "auto":
        return GapBand(limit, f"weights.gap_limit={limit:g}")
    if config.learner.batch_invariant:
        return GapBand(0.0, "learner.batch_invariant=true, with which both compute the same bits")
    band, is_float8 = precision.band, precision.band in ("float8_weights", "float8_cache")
    if not is_float8 and (engine_dtype == FLOAT8 or config.learner.fp8):
        band, is_float8 = "float8_weights", True
    limit, words = _LIMITS[band], _WORDS[band]
    if is_float8 and precision.experts:
        return GapBand(limit * _FLOAT8_EXPERTS, f"{words} and experts")
    if not is_float8 and engine_dtype == config.learner.precision == "float32":
        return GapBand(limit * _FLOAT32, words.replace("16-bit", "float32"))
    return GapBand(limit, words)


def token_gap(learner_N: NDArray[np.float32], engine_N: NDArray[np.float32]) -> TokenGap:
    """Return k3 of log-probabilities of the same ``N`` tokens."""
    ratio_N = np.clip(learner_N.astype(np.float64) - engine_N.astype(np.float64), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    gap_N = np.expm1(ratio_N) - ratio_N
    return TokenGap(float(gap_N.mean()), float(gap_N.std() / np.sqrt(len(gap_N))))
