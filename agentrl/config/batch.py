"""The ``batch`` section: how rollouts become training batches."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from agentrl.config.base import Section


class BatchConfig(Section):
    """How rollouts become batches."""

    aggregation: Literal["token_mean", "sequence_mean", "rollout_mean", "constant"] = "token_mean"
    """How tokens share the loss. ``token_mean``: every sampled token weighs the same (DAPO, arXiv:2503.14476);
    ``sequence_mean``: every agent of every rollout does; ``rollout_mean``: every rollout does; ``constant``: the sum over all
    tokens is divided by the number of rollouts times ``constant_tokens`` (Dr.GRPO, arXiv:2503.20783)."""
    constant_tokens: PositiveInt | None = None
    """The divisor of ``constant``; None is ``rollout.max_tokens``."""
    denominator: Literal["live", "all"] = "live"
    """Which rollouts count in the denominators of means: those with an advantage, or all (as in TRL and slime)."""
    global_batch_size: PositiveInt | None = None
    """Rollouts an optimizer step; without a number, all rollouts of a step divided by ``train.steps_per_rollout``."""
    tokens_per_micro: PositiveInt = 4096
    """Tokens a rank computes at the same time, in one sequence of packed rows; a longer row gets a separate one."""
    share_prefixes: bool = True
    """Compute tokens that several rows of a micro-batch begin with, such as a group's prompt, only once, where that is
    faster. Loss and gradient stay the same up to rounding. Layers that mix rows, such as Mamba, rule it out."""
