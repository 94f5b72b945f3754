"""Sampling supports as tests write them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from agentrl.core.sampling_support import SamplingSupport
from agentrl.core.types import Row


def add_support(row: Row, vocabulary: int, seed: int, most: int = 6) -> Row:
    """Return a row whose trained tokens were sampled from a few random ids, of which each is one."""
    rng = np.random.default_rng(seed)
    counts, ids, logprobs = np.zeros(len(row.mask), np.int32), [], []
    sampled_logprobs = row.logprobs.copy()
    for place in np.flatnonzero(row.mask):
        others = rng.permutation(np.delete(np.arange(vocabulary), row.token_ids[place]))[: rng.integers(0, most)]
        kept = rng.permutation([row.token_ids[place], *others])
        log_q = np.log(rng.dirichlet(np.full(len(kept), 2.0))).astype(np.float32)
        counts[place] = len(kept)
        ids += kept.tolist()
        logprobs += log_q.tolist()
        sampled_logprobs[place] = log_q[kept == row.token_ids[place]][0]
    support = SamplingSupport(counts, np.array(ids, np.int32), np.array(logprobs, np.float32))
    return replace(row, support=support, logprobs=np.minimum(sampled_logprobs, 0))


def assert_same_support(actual: SamplingSupport | None, expected: SamplingSupport | None) -> None:
    """Fail if two supports differ."""
    assert (actual is None) == (expected is None)
    if actual is None or expected is None:
        return
    assert actual.counts.tolist() == expected.counts.tolist()
    assert actual.token_ids.tolist() == expected.token_ids.tolist()
    assert (actual.logprobs is None) == (expected.logprobs is None) or not len(actual.token_ids)
    if actual.logprobs is not None and expected.logprobs is not None:
        assert actual.logprobs.tobytes() == expected.logprobs.tobytes()
