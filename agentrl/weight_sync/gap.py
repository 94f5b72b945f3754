"""How far the log-probabilities of an engine and of the learner may be apart: limits by precision, experts and depth of turn.

The gap is the estimator k3 of a KL divergence, the mean of ``e^d - 1 - d`` with ``d`` learner minus engine (Schulman 2020,
"Approximating KL Divergence"). Usual values are those of published runs: 2e-4 for dense models in 16 bits, 2e-3 with experts.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from agentrl.config.schema import Config
from agentrl.core.errors import ModelError
from agentrl.models.float8 import is_quantized

_LIMITS = {
    ("float32", False): 1e-4, ("float32", True): 1e-3,
    ("16-bit", False): 2e-3, ("16-bit", True): 2e-2,
    ("float8", False): 2e-2, ("float8", True): 5e-2,
}  # fmt: skip
"""Nats a token of a first turn, by precision and whether the model has experts: ten times what is usual, for float8 less."""
_OF_TEXT = 25
"""How much larger the gap of fixed text may be than that of tokens that the policy has sampled. Measured: up to 8 times the
limits, after a few steps of policies of 2M weights in bfloat16 that know little of such text."""
_TURNS_TO_DOUBLE = 8
"""Turns after which twice the gap is allowed: rounding adds up along a row."""
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
_MAX_LOG_RATIO = 20.0


@dataclass(frozen=True, slots=True)
class GapBand:
    """The gap that is allowed. Example: ``GapBand(2e-3, "16-bit weights")``."""

    first_turn: float
    """Nats a token in the first turn, of tokens that the policy has sampled."""
    why: str
    """What it is for."""

    def limit(self, turn: int) -> float:
        """Return the limit of fixed text in a turn, counted from 1."""
        return _OF_TEXT * self.first_turn * (1 + (turn - 1) / _TURNS_TO_DOUBLE)


def gap_band(config: Config, model: Path, engine_dtype: str | None) -> GapBand | None:
    """Return what is allowed in a run; None with ``weights.gap_limit=off``.

    Args:
        config: of the run.
        model: folder of the model.
        engine_dtype: that all engines report; None: not known.

    Raises:
        ModelError: the model's ``config.json`` cannot be read.
    """
    limit = config.weights.gap_limit
    if limit == "off":
        return None
    if limit != "auto":
        return GapBand(limit, f"weights.gap_limit={limit:g}")
    precision, experts = _precision(config, model, engine_dtype), has_experts(model)
    return GapBand(_LIMITS[precision, experts], f"{precision} weights{' and experts' if experts else ''}")


def _precision(config: Config, model: Path, engine_dtype: str | None) -> str:
    options = {name.replace("-", "_"): str(value) for name, value in config.sampler.sglang.items()}
    if options.get("quantization") or "fp8" in options.get("kv_cache_dtype", "") or is_quantized(model):
        return "float8"
    return "float32" if engine_dtype == config.learner.precision == "float32" else "16-bit"


def has_experts(model: Path) -> bool:
    """Return whether a model is a mixture of experts, as its ``config.json`` says.

    Raises:
        ModelError: it cannot be read.
    """
    try:
        fields = json.loads((model / "config.json").read_text(encoding="utf-8"))
        sections = [fields, fields.get("text_config") or {}]
        return any(int(section.get(name) or 0) > 1 for section in sections for name in _EXPERTS)
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ModelError(f"{model / 'config.json'} cannot be read: {error!r}") from error


def mean_gap(learner_N: NDArray[np.float32], engine_N: NDArray[np.float32]) -> float:
    """Return k3 of log-probabilities of the same ``N`` tokens, in nats a token."""
    ratio_N = np.clip(learner_N.astype(np.float64) - engine_N.astype(np.float64), -_MAX_LOG_RATIO, _MAX_LOG_RATIO)
    return float((np.expm1(ratio_N) - ratio_N).mean())
