"""Rows of random tokens for ``agentrl bench learner``, as different rollouts have them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from agentrl.core.types import MaskReason, Provenance, Row, RowKey

SAMPLES = 8
"""Rows of a group, and of an episode with forks."""
PROMPT, OWN = 2048, 512
"""Tokens of a group's prompt, and of each row after it."""
TURN, FORK = 512, 256
"""Tokens that every turn adds to an episode, half of them sampled, and of the fork after each turn."""


@dataclass(frozen=True, slots=True)
class RowOptions:
    """Options of the rows."""

    rows: int
    """Their number, at least."""
    median_tokens: int
    """Of ``lognormal``."""
    longest: int
    """Of ``lognormal``."""
    vocabulary: int
    """Number of token ids."""
    seed: int = 0


def lognormal_rows(options: RowOptions) -> list[Row]:
    """Return rows with log-normal lengths, of at least 256 and at most ``longest`` tokens; half of the tokens are trained."""
    rng = np.random.default_rng(options.seed)
    lengths = np.clip(rng.lognormal(np.log(options.median_tokens), 0.5, options.rows), 256, options.longest).astype(int)
    rows = []
    for number, length in enumerate(lengths):
        sampled = rng.random(length) < 0.5
        sampled[0] = False
        rows.append(_row(RowKey(f"p{number}", f"p{number}/0"), rng.integers(0, options.vocabulary, length), sampled))
    return rows


def group_rows(options: RowOptions) -> list[Row]:
    """Return groups of rows with a common prompt. What follows it is trained."""
    rng = np.random.default_rng(options.seed)
    sampled = np.arange(PROMPT + OWN) >= PROMPT
    rows = []
    for group in range(-(-options.rows // SAMPLES)):
        prompt = rng.integers(0, options.vocabulary, PROMPT)
        for sample in range(SAMPLES):
            ids = np.concatenate([prompt, rng.integers(0, options.vocabulary, OWN)])
            rows.append(_row(RowKey(f"p{group}", f"p{group}/{sample}"), ids, sampled))
    return rows


def fork_rows(options: RowOptions) -> list[Row]:
    """Return episodes with a fork after every turn, as of chat formats without earlier reasoning. Forks are trained."""
    rng = np.random.default_rng(options.seed)
    rows = []
    for episode in range(-(-options.rows // SAMPLES)):
        turns = rng.integers(0, options.vocabulary, SAMPLES * TURN)
        for turn in range(1, SAMPLES + 1):
            ids = np.concatenate([turns[: turn * TURN], rng.integers(0, options.vocabulary, FORK)])
            sampled = np.arange(len(ids)) >= turn * TURN
            rows.append(_row(RowKey(f"p{episode}", f"p{episode}/0", row=turn - 1), ids, sampled))
    return rows


WORKLOADS: dict[str, Callable[[RowOptions], list[Row]]] = {
    "lognormal": lognormal_rows,
    "groups": group_rows,
    "forks": fork_rows,
}
"""By name."""


def _row(key: RowKey, token_ids: NDArray[np.int64], sampled: NDArray[np.bool_]) -> Row:
    return Row(
        key=key,
        token_ids=token_ids.astype(np.int32),
        provenance=np.where(sampled, Provenance.SAMPLED, Provenance.OBSERVED).astype(np.uint8),
        mask=sampled.astype(np.uint8),
        mask_reason=np.where(sampled, MaskReason.NONE, MaskReason.OBSERVED).astype(np.uint8),
        logprobs=np.where(sampled, -12.0, 0).astype(np.float32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
        requests=np.where(sampled, 0, -1).astype(np.int32),
        request_ids=("q",),
    )
